"""CUDA graphs, page-locked memory and streams of RL, on a GPU: replay is eager, late copies are complete."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("lerobot", reason="needs lerobot")

import somaspeed_patch
from somaspeed_patch.pi05 import hints
from somaspeed_patch.rl import heads, stores
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.encoder import Encoder
from somaspeed_patch.rl.features import Features, Tag
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.pi05_flow import PI05Flow
from somaspeed_patch.rl.sampler import Sampler
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.value_head import ValueHead
from somaspeed_patch.testing_pi05 import make_batch, make_policy
from somaspeed_patch.testing_rl import drawn, state_policy, trajectories, value_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
FLOW = Flow(steps=3, noise_level=0.5)
MASK = "observation.language.attention_mask"
SETTINGS = Settings(
    flow=FLOW, executed=2, global_batch=8, micro_batch=4, update_epoch=2, actor_lr=1e-3, tokens=64
)


@pytest.fixture(autouse=True)
def patched():
    with somaspeed_patch.patched("pi05"):
        yield


def pi05():
    policy = make_policy(train_expert_only=True, cameras=2, num_inference_steps=FLOW.steps)
    policy.config.device = "cuda"
    return PI05Flow(policy.cuda())


def state():
    policy = state_policy()
    policy.policy.cuda()
    return policy


POLICIES = {"pi05": pi05, "state": state}


def observed(policy, count):
    if policy.name == "state":
        rng = torch.Generator().manual_seed(3)
        return {"observation": torch.randn(count, 5, generator=rng).cuda()}
    lengths = [1 + 7 * i % 40 for i in range(count)]
    batch = make_batch(policy.policy, batch_size=count, language_lengths=lengths)
    return {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def trained(made, graphs, mode="host", iterations=2):
    policy = made()
    critic = value_head(policy).cuda()
    learner = Learner(policy, critic, SETTINGS, store=stores.make(mode, policy, None), graphs=graphs)
    metrics = []
    for version in range(iterations):
        rng = torch.Generator("cuda").manual_seed(version)
        found = trajectories(
            policy, critic, observed(policy, 16), FLOW, rng, reward=lambda actions: float(actions.sum()),
            version=version,
        )  # fmt: skip
        metrics.append(learner.iterate(found))
    return learner, metrics


@pytest.mark.parametrize("name", POLICIES)
def test_a_replayed_learner_is_the_eager_one_bit_for_bit(name):
    eager, expected = trained(POLICIES[name], graphs=False)
    replayed, found = trained(POLICIES[name], graphs=True)
    assert replayed.replays == 2 * 2 * 4 and eager.replays == 0  # iterations, epochs, microbatches
    assert found == expected
    mine, theirs = (heads.snapshot(each.policy, each.value_head) for each in (replayed, eager))
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", POLICIES)
def test_what_waits_on_the_device_trains_as_what_waits_on_the_host(name):
    ways = [trained(POLICIES[name], graphs=True, mode=mode)[1] for mode in ("host", "device")]
    assert ways[0] == ways[1]


@pytest.mark.parametrize("name", POLICIES)
def test_after_an_update_in_place_the_sampler_samples_as_a_new_one(name):
    policy = POLICIES[name]()
    critic = value_head(policy).cuda()
    sampler = Sampler(policy, critic, FLOW, graphs=True)
    encoded, draws = policy.encode(observed(policy, 3)), drawn(policy, 3, FLOW)
    first = sampler(encoded, draws)[0].action
    with torch.no_grad():
        for each in [*policy.trainable().values(), *critic.parameters()]:
            each.add_(torch.randn_like(each), alpha=0.05)
    found, values = sampler(encoded, draws)
    expected, theirs = Sampler(policy, critic, FLOW, graphs=False)(encoded, draws)
    assert sampler.graph.replays == 2 and not torch.equal(found.action, first)
    moved = (expected.action - draws.noise.cuda()).abs().max()
    assert (found.action - expected.action).abs().max() < 1e-5 * moved  # another batch size, 4 for 3
    assert torch.allclose(values, theirs, atol=1e-5) and torch.equal(found.k, expected.k)


def test_weights_that_moved_elsewhere_are_recorded_anew():
    policy = state()
    sampler = Sampler(policy, value_head(policy).cuda(), FLOW, graphs=True)
    encoded, draws = policy.encode(observed(policy, 4)), drawn(policy, 4, FLOW)
    before = sampler(encoded, draws)[0].action
    layer = policy.policy.layers[0]
    layer.weight.data = layer.weight.data * 2
    after = sampler(encoded, draws)[0].action
    expected = Sampler(policy, value_head(policy).cuda(), FLOW, graphs=False)(encoded, draws)[0].action
    assert torch.equal(after, expected) and not torch.equal(after, before)


def hinted(policy, count):
    batch = observed(policy, count)
    mask = batch[MASK]
    hints.attach(mask, hints.measure(mask.cpu()))
    return batch


def test_a_replayed_encoder_is_the_eager_one_also_of_other_weights(monkeypatch):
    # In TF32 the patches' convolution of 8 images is 1e-3 off that of 6.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    policy = pi05()
    encoder = Encoder(policy, graphs=True)
    ways = []
    for _ in range(2):
        for count in (1, 3, 1):
            batch = hinted(policy, count)
            found, expected = encoder(batch, count), policy.encode(batch)
            mine, theirs = found.tensors(), expected.tensors()
            for name, each in theirs.items():
                scale = each.abs().max()  # 3 are computed as 4, which rounds otherwise
                assert (mine[name] - each).abs().max() <= (0 if count == 1 else 1e-5 * scale)
        ways.append(found.tokens["key"])
        assert encoder.replays >= 3
        with torch.no_grad():
            for each in policy.policy.model.paligemma_with_expert.paligemma.parameters():
                each.mul_(1.5)
    assert not torch.equal(*ways)


def test_many_observations_are_not_recorded():
    policy = pi05()
    encoder = Encoder(policy, graphs=True)
    encoder(hinted(policy, 9), 9)
    assert encoder.replays == 0


def test_what_is_kept_in_page_locked_memory_comes_back_while_others_compute():
    policy = state()
    store = stores.HostStore(policy)
    tag = Tag(model="test", backbone="0")
    groups, expected = [], []
    for seed in range(12):
        rng = torch.Generator("cuda").manual_seed(seed)
        keys = torch.randn(3, 4, 50, 64, device="cuda", generator=rng)
        length = torch.tensor([50, 1, 7, 33], dtype=torch.int32, device="cuda")
        encoded = Features(tokens={"key": keys}, length=length, fixed={"pooled": keys[0, :, 0]})
        kept = store.keep(encoded, tag, [])
        assert all(each.tokens["key"].is_pinned() for each in kept)
        groups.append(kept)
        valid = torch.arange(50, device="cuda") < length[:, None]
        expected.append(torch.where(valid[None, :, :, None], keys, 0.0))
    busy = torch.randn(4096, 4096, device="cuda")
    for found, wanted in zip(store.ahead(groups, tag, 50), expected, strict=True):
        busy = busy @ busy.T / 4096
        assert torch.equal(found.tokens["key"], wanted)


def test_an_actor_on_the_gpu_decides_as_without_graphs():
    policy = state()
    critic = ValueHead(policy.value_width, (8,)).cuda()
    actors = [Actor(policy, critic, _States(), flow=FLOW, executed=2, graphs=each) for each in (True, False)]
    seen = [{"state": torch.randn(5).numpy()} for _ in range(5)]
    draws = [drawn(policy, 1, FLOW, seed) for seed in range(5)]
    for one, other in zip(*(actor.act(seen, draws) for actor in actors), strict=True):
        assert one.k == other.k and one.value == pytest.approx(other.value, abs=1e-6)
        assert torch.allclose(one.x_next, other.x_next, atol=1e-5) and not one.x_next.is_cuda


class _States:
    def batch(self, observations):
        return {"observation": torch.stack([torch.from_numpy(each["state"]) for each in observations]).cuda()}

    def actions(self, chunks):
        return chunks.cpu().numpy()


def test_during_the_critics_warm_up_no_graph_moves_the_policy():
    policy = state()
    learner = Learner(policy, value_head(policy).cuda(), replace(SETTINGS, critic_warmup=2, weight_decay=0.5))
    before = copy.deepcopy(policy.policy.state_dict())
    rng = torch.Generator("cuda").manual_seed(0)
    learner.iterate(trajectories(policy, learner.value_head, observed(policy, 8), FLOW, rng))
    assert learner.replays == 0
    after = policy.policy.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
