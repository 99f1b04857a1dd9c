"""pi0.5 trained from cached features: against LeRobot's own inference, and without the backbone."""

import copy
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("lerobot", reason="needs lerobot")

import somaspeed_patch
from somaspeed_patch.rl import features, scores
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.pi05_flow import PI05Flow
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.testing_pi05 import make_batch, make_policy
from somaspeed_patch.testing_rl import drawn, gradients, replayed, sampled, trajectories, value_head

pytestmark = pytest.mark.usefixtures("steps_by_torch")
FLOW = Flow(steps=3, noise_level=0.5)
SETTINGS = Settings(flow=FLOW, executed=2, global_batch=4, micro_batch=4, update_epoch=2)
LENGTHS = [48, 7, 1, 20]
CASES = {
    "two cameras": (dict(cameras=2), {}),
    "ragged prompts": (dict(cameras=2), dict(language_lengths=LENGTHS)),
    "absent camera in the middle": (dict(cameras=3), dict(language_lengths=LENGTHS, present=[0, 2])),
    "batch 1": ({}, dict(batch_size=1, language_lengths=[5])),
}


@pytest.fixture(autouse=True)
def patched():
    with somaspeed_patch.patched("pi05"):
        yield


def made(**config):
    return PI05Flow(make_policy(train_expert_only=True, **{"cameras": 2, **config}))


def observations(policy, **options):
    return make_batch(policy.policy, **{"language_lengths": LENGTHS, **options})


@pytest.mark.parametrize("name", CASES)
def test_without_noise_it_acts_as_lerobot_does(name):
    config, options = CASES[name]
    policy = made(num_inference_steps=FLOW.steps, **config)
    batch = make_batch(policy.policy, **options)
    found = sampled(policy, policy.encode(batch), FLOW, k=-1).action
    noise = drawn(policy, len(found), FLOW).noise
    expected = policy.policy.predict_action_chunk(batch, noise=noise)
    moved = (expected - noise[..., : policy.action_dim]).abs().max()
    assert moved > 0.05
    assert (found[..., : policy.action_dim] - expected).abs().max() < 2e-6 * moved


@pytest.mark.parametrize("name", CASES)
def test_what_a_graph_replays_of_a_batch_encodes_the_same(name):
    config, options = CASES[name]
    policy = made(**config)
    batch = make_batch(policy.policy, **options)
    expected, recordable = policy.encode(batch), policy.recordable(batch)
    assert recordable.key.longest >= max(options.get("language_lengths", [1]))
    found = recordable.encode({name: each.clone() for name, each in recordable.tensors.items()})
    assert torch.equal(found.length, expected.length)
    assert torch.equal(found.fixed["pooled"], expected.fixed["pooled"])
    for index, size in enumerate(found.length.tolist()):
        for each in ("key", "value"):
            mine, theirs = (one.tokens[each][:, index, :size] for one in (found, expected))
            assert torch.equal(mine, theirs)


def test_a_batch_whose_prompts_only_the_device_knows_is_not_recorded(monkeypatch):
    policy = made()
    monkeypatch.setattr("somaspeed_patch.pi05.hints.of", lambda mask: None)
    assert policy.recordable(observations(policy)) is None


def test_the_critic_may_read_padding_too_and_nothing_else_changes():
    policy = made()
    other = PI05Flow(policy.policy, pool="all")
    batch = observations(policy)
    mine, whole = policy.encode(batch), other.encode(batch)
    assert torch.equal(mine.length, whole.length) and whole.tokens_per_sample == 2 * 4 + 48
    moved = sampled(policy, mine, FLOW).action
    assert torch.allclose(sampled(other, whole, FLOW).action, moved, atol=1e-5)
    full = LENGTHS.index(48)  # without padding the two means are one
    assert torch.allclose(mine.fixed["pooled"][full], whole.fixed["pooled"][full], atol=1e-4)
    assert not torch.allclose(mine.fixed["pooled"][1], whole.fixed["pooled"][1], atol=1e-2)
    assert other.twin().tag == other.tag != policy.tag


def hosts_hidden(policy, batch):
    """PaliGemma's last hidden states [B, N, W] and valid tokens, by LeRobot's own functions."""
    from lerobot.policies.pi05.modeling_pi05 import make_att_2d_masks

    host = policy.policy
    model = host.model
    images, masks = host._preprocess_images(batch)
    tokens, valid = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    embedded, pad, attention = model.embed_prefix(images, masks, tokens, valid)
    mask = torch.where(make_att_2d_masks(pad, attention)[:, None], 0.0, -2.3819763e38)
    (hidden, _), _ = model.paligemma_with_expert.forward(
        attention_mask=mask, position_ids=pad.cumsum(1) - 1, past_key_values=None,
        inputs_embeds=[embedded, None], use_cache=False,
    )  # fmt: skip
    return hidden, pad


@pytest.mark.parametrize("name", CASES)
def test_the_critic_reads_the_mean_of_valid_tokens(name):
    config, options = CASES[name]
    policy = made(**config)
    batch = make_batch(policy.policy, **options)
    with torch.no_grad():
        hidden, valid = hosts_hidden(policy, batch)
    expected = torch.stack([row[seen].mean(0) for row, seen in zip(hidden, valid, strict=True)])
    encoded = policy.encode(batch)
    assert torch.allclose(policy.pooled(encoded), expected, atol=1e-5)
    assert encoded.length.tolist() == valid.sum(1).tolist()
    assert policy.value_width == expected.shape[1]


def test_packing_and_padding_leave_the_velocity_as_it_is():
    policy = made()
    encoded = policy.encode(observations(policy))
    x, s = torch.randn(4, *policy.shape), torch.tensor([1.0, 0.7, 0.3, 0.1])
    expected = policy.velocity(encoded, x, s)
    records = encoded.records(policy.tag)
    for size in (None, 70):
        together = features.batch(records, policy.tag, tokens=size)
        assert torch.allclose(policy.velocity(together, x, s), expected, atol=1e-6)
    garbage = features.batch(records, policy.tag, tokens=70)
    for each in garbage.tokens.values():
        for i, length in enumerate(garbage.length.tolist()):
            each[:, i, length:] = 1e4
    assert torch.equal(policy.velocity(garbage, x, s), policy.velocity(together, x, s))


def test_a_replay_from_the_cache_has_ratio_one():
    policy = made()
    encoded = policy.encode(observations(policy))
    sample, records = sampled(policy, encoded, FLOW), encoded.records(policy.tag)
    with torch.no_grad():
        same = replayed(policy, features.batch(records, policy.tag), sample, FLOW)
        alone = [
            replayed(policy, features.batch([records[i]], policy.tag), sample, FLOW, slice(i, i + 1))
            for i in range(4)
        ]
    assert torch.equal(same, sample.log_prob)
    # In other company the sums may round otherwise; fp32: an error of 2e-6 of v, times sqrt(12) c_k.
    other = scores.reduced(torch.cat(alone), (2, 6)) - scores.reduced(sample.log_prob, (2, 6))
    assert other.abs().max() < 3 * 12**0.5 * 1.84 * 2e-6


def test_training_from_the_cache_is_training_with_the_backbone():
    policy = made()
    batch = observations(policy)
    encoded = policy.encode(batch)
    sample, records = sampled(policy, encoded, FLOW), encoded.records(policy.tag)
    cached = gradients(policy, features.batch(records, policy.tag), sample, FLOW)
    recomputed = gradients(policy, policy.encode(batch), sample, FLOW)
    assert torch.equal(cached[0], recomputed[0]) and cached[1].keys() == recomputed[1].keys()
    assert all(torch.equal(each, recomputed[1][name]) for name, each in cached[1].items())
    assert cached[1].keys() == policy.trainable().keys()


@contextmanager
def counted(policy):
    """Calls of the backbone's modules; its rotary embedding, which the expert uses too, aside."""
    calls = []
    trunk = policy.policy.model.paligemma_with_expert.paligemma.model
    parts = (*trunk.vision_tower.modules(), *trunk.language_model.layers.modules())
    hooks = [each.register_forward_hook(lambda *_: calls.append(1)) for each in parts]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def test_the_learner_never_runs_the_backbone_and_leaves_the_cache_as_it_is():
    policy = made()
    critic = value_head(policy)
    rng = torch.Generator().manual_seed(0)
    episodes = trajectories(
        policy, critic, observations(policy), FLOW, rng, reward=lambda a: float(a.sum()), length=2
    )
    kept = copy.deepcopy([chunk.record.tokens for each in episodes for chunk in each.chunks])
    before = {name: p.detach().clone() for name, p in policy.policy.named_parameters()}
    learner = Learner(policy, critic, SETTINGS)
    with counted(policy) as calls:
        learner.iterate(episodes)
        assert calls == []
        policy.encode(observations(policy))
        assert len(calls) > 10
    after = [chunk.record.tokens for each in episodes for chunk in each.chunks]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(kept, after, strict=True) for n in a)
    moved = {n for n, p in policy.policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved and moved <= policy.trainable().keys() and not any("lm_head" in name for name in moved)


def test_after_an_update_it_samples_as_a_new_model_with_those_weights():
    policy = made()
    learner = Learner(policy, value_head(policy), SETTINGS)
    encoded = policy.encode(observations(policy))
    before = sampled(policy, encoded, FLOW).action
    rng = torch.Generator().manual_seed(0)
    learner.iterate(
        trajectories(
            policy, learner.value_head, observations(policy), FLOW, rng, reward=lambda a: float(a.sum())
        )
    )
    fresh = made()
    fresh.policy.load_state_dict(policy.policy.state_dict())
    after = sampled(policy, encoded, FLOW).action
    assert not torch.equal(after, before)
    assert torch.equal(after, sampled(fresh, fresh.encode(observations(fresh)), FLOW).action)


def test_a_changed_backbone_refuses_old_features():
    policy = made()
    records = policy.encode(observations(policy)).records(policy.tag)
    vision = policy.policy.model.paligemma_with_expert.paligemma.model.vision_tower
    with torch.no_grad():
        next(vision.parameters()).add_(1e-3)
    with pytest.raises(ValueError, match="cached features are of backbone"):
        features.batch(records, policy.tag)
    features.batch(policy.encode(observations(policy)).records(policy.tag), policy.tag)
    next(vision.parameters()).requires_grad_(True)
    with pytest.raises(ValueError, match="can no longer be cached: the PaliGemma side is not frozen"):
        _ = policy.tag


def test_the_tag_is_that_of_the_weights():
    one, two = made(), made()
    assert one.tag == two.tag
    learner = Learner(one, value_head(one), SETTINGS)
    learner.iterate(
        trajectories(one, learner.value_head, observations(one), FLOW, torch.Generator().manual_seed(0))
    )
    assert one.tag == two.tag  # what trains is not in it
    assert made(cameras=1).tag.model != one.tag.model
    assert PI05Flow(make_policy(train_expert_only=True, cameras=2, seed=1)).tag.backbone != one.tag.backbone


def test_refusals():
    with pytest.raises(ValueError, match="cannot be trained from cached features: the PaliGemma side"):
        PI05Flow(make_policy())
    somaspeed_patch.unpatch()
    with pytest.raises(ValueError, match="patch first"):
        made()
