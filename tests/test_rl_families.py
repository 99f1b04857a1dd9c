"""MolmoAct2 and GR00T trained from cached features: against LeRobot's own inference, without the backbone."""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch as replaced

import pytest
import torch

pytest.importorskip("lerobot", reason="needs lerobot")

import somaspeed_patch
from somaspeed_patch import testing_groot, testing_molmoact2
from somaspeed_patch.rl import features, flow_sde
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.groot_flow import GrootFlow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.molmoact2_flow import MolmoAct2Flow
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.testing_ranks import TorchBut
from somaspeed_patch.testing_rl import drawn, gradients, replayed, sampled, trajectories, value_head

pytestmark = pytest.mark.usefixtures("steps_by_torch")
FLOW = Flow(steps=4, noise_level=0.5)  # GR00T's own number of steps
SETTINGS = Settings(flow=FLOW, executed=2, global_batch=2, micro_batch=2, update_epoch=2)
TASKS = ["pick up the bowl", "put the bowl on the plate please now"]


@dataclass
class Case:
    """A family: how to build it, and what LeRobot itself gives for given noise."""

    name: str
    flow: Any
    backbone: Any
    host: Any
    batch: Any

    def make(self):
        return self.flow(self.host())


def molmoact2_policy():
    return testing_molmoact2.make_policy(
        cameras=2, train_action_expert_only=True, action_mode="continuous", num_inference_steps=FLOW.steps
    )


def molmoact2_acts(policy, batch, noise):
    """Whatever the host draws, it is this."""
    with replaced("torch.randn", lambda *shape, **_: noise.clone()):
        return policy.policy.predict_action_chunk(batch)


def groot_acts(policy, batch, noise):
    """One sample at a time, without the padding that the host attends to as if it were tokens."""
    from lerobot.policies.groot import groot_n1_7 as host

    found = []
    for row in range(len(noise)):
        size = int(batch["attention_mask"][row].sum())
        side = 1 if batch["attention_mask"][row, 0] else -1  # where the tokens are
        cut = slice(0, size) if side == 1 else slice(-size, None)
        one = {name: each[row : row + 1] for name, each in batch.items() if torch.is_tensor(each)}
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            one[name] = one[name][:, cut]
        images = len(batch["image_grid_thw"]) // len(noise)
        patches = len(batch["pixel_values"]) // len(noise)
        one["image_grid_thw"] = batch["image_grid_thw"][row * images : (row + 1) * images]
        one["pixel_values"] = batch["pixel_values"][row * patches : (row + 1) * patches]
        drawn = _Randn(noise[row : row + 1])
        with replaced.object(host, "torch", drawn):
            found.append(policy.policy.predict_action_chunk(one))
    return torch.cat(found)


class _Randn(TorchBut):
    def __init__(self, noise):
        super().__init__(lambda *_, **__: noise)
        self.drawn = noise

    def randn(self, *_, **__):
        return self.drawn


CASES = [
    Case(
        name="molmoact2", flow=MolmoAct2Flow, host=molmoact2_policy,
        backbone=lambda p: [p._backbone().transformer, p._backbone().vision_backbone],
        batch=lambda p, tasks: testing_molmoact2.make_batch(p, tasks=tasks),
    ),
    Case(
        name="groot", flow=GrootFlow, host=testing_groot.make_policy,
        backbone=lambda p: [p._groot_model.backbone],
        batch=lambda p, tasks: testing_groot.make_batch(p, images=2, tasks=tasks),
    ),
]  # fmt: skip
ACTS = {"molmoact2": molmoact2_acts, "groot": groot_acts}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    with somaspeed_patch.patched(request.param.name):
        yield request.param


def observations(case, policy, tasks=TASKS):
    return case.batch(policy.policy, tasks)


def test_without_noise_it_acts_as_lerobot_does(case):
    policy = case.make()
    batch = observations(case, policy)
    found = sampled(policy, policy.encode(batch), FLOW, k=-1).action
    noise = drawn(policy, len(found), FLOW).noise
    expected = ACTS[case.name](policy, batch, noise)
    steps, dims = expected.shape[1:]
    moved = (expected - noise[:, :steps, :dims]).abs().max()
    assert dims == policy.action_dim and moved > 0.05
    assert (found[:, :steps, :dims] - expected).abs().max() < 5e-6 * moved


def test_action_dimensions_that_are_padding_stay_zero():
    with somaspeed_patch.patched("molmoact2"):
        policy = CASES[0].make()
        found = sampled(policy, policy.encode(observations(CASES[0], policy)), FLOW)
    assert not found.action[..., policy.action_dim :].any() and found.action[..., : policy.action_dim].all()


def test_training_from_the_cache_is_training_with_the_backbone(case):
    policy = case.make()
    batch = observations(case, policy)
    encoded = policy.encode(batch)
    sample, records = sampled(policy, encoded, FLOW), encoded.records(policy.tag)
    together = features.batch(records, policy.tag, tokens=encoded.tokens_per_sample)
    with torch.no_grad():
        assert torch.equal(replayed(policy, together, sample, FLOW), sample.log_prob)
    assert torch.equal(policy.pooled(together), policy.pooled(encoded))
    cached = gradients(policy, together, sample, FLOW)
    recomputed = gradients(policy, policy.encode(batch), sample, FLOW)
    assert torch.equal(cached[0], recomputed[0]) and cached[1].keys() == recomputed[1].keys()
    assert all(torch.equal(each, recomputed[1][name]) for name, each in cached[1].items())
    assert cached[1].keys() <= policy.trainable().keys() and len(cached[1]) > 20


def test_what_a_sample_gives_does_not_depend_on_who_is_beside_it(case):
    """The prompts differ in length: padding that was read as tokens would show."""
    policy = case.make()
    encoded = policy.encode(observations(case, policy))
    assert encoded.length[0] != encoded.length[1]
    records = encoded.records(policy.tag)
    x, s = torch.randn(2, *policy.shape), torch.tensor([1.0, 0.25])
    together = policy.velocity(features.batch(records, policy.tag), x, s)
    alone = [
        policy.velocity(features.batch([records[i]], policy.tag), x[i : i + 1], s[i : i + 1])
        for i in range(2)
    ]
    assert torch.allclose(torch.cat(alone), together, atol=2e-6)
    pooled = [policy.pooled(features.batch([record], policy.tag)) for record in records]
    assert torch.allclose(torch.cat(pooled), policy.pooled(encoded), atol=2e-6)


@contextmanager
def counted(case, policy):
    calls = []
    parts = [each for part in case.backbone(policy.policy) for each in part.modules()]
    with ExitStack() as stack:
        for each in parts:
            stack.callback(each.register_forward_hook(lambda *_: calls.append(1)).remove)
        yield calls


def test_the_learner_never_runs_the_backbone_and_leaves_the_cache_as_it_is(case):
    policy = case.make()
    critic = value_head(policy)
    rng = torch.Generator().manual_seed(0)
    episodes = trajectories(
        policy, critic, observations(case, policy), FLOW, rng, reward=lambda a: float(a.sum()), length=2
    )
    kept = copy.deepcopy([chunk.record.tokens for each in episodes for chunk in each.chunks])
    before = {name: p.detach().clone() for name, p in policy.policy.named_parameters()}
    learner = Learner(policy, critic, SETTINGS)
    with counted(case, policy) as calls:
        metrics = learner.iterate(episodes)
    assert calls == [] and abs(metrics["losses/approx_kl"]) < 1
    after = [chunk.record.tokens for each in episodes for chunk in each.chunks]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(kept, after, strict=True) for n in a)
    moved = {n for n, p in policy.policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved and moved <= policy.trainable().keys()


def test_after_an_update_it_samples_as_a_new_model_with_those_weights(case):
    """MolmoAct2's host keeps modulations of older weights for its own inference."""
    policy = case.make()
    learner = Learner(policy, value_head(policy), SETTINGS)
    encoded = policy.encode(observations(case, policy))
    before = sampled(policy, encoded, FLOW).action
    rng = torch.Generator().manual_seed(0)
    learner.iterate(
        trajectories(
            policy, learner.value_head, observations(case, policy), FLOW, rng, reward=lambda a: float(a.sum())
        )
    )
    fresh = case.make()
    fresh.policy.load_state_dict(policy.policy.state_dict())
    after = sampled(policy, encoded, FLOW).action
    assert not torch.equal(after, before)
    assert torch.equal(after, sampled(fresh, fresh.encode(observations(case, fresh)), FLOW).action)


def test_a_backbone_that_changes_or_trains_is_refused(case):
    policy = case.make()
    records = policy.encode(observations(case, policy)).records(policy.tag)
    weight = next(case.backbone(policy.policy)[0].parameters())
    with torch.no_grad():
        weight.add_(1e-3)
    with pytest.raises(ValueError, match="cached features are of backbone"):
        features.batch(records, policy.tag)
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match="can no longer be cached"):
        _ = policy.tag
    with pytest.raises(ValueError, match="cannot be trained from cached features"):
        case.flow(policy.policy)


def test_buckets_are_cut_off_as_the_host_does():
    from somaspeed_patch.rl.groot_flow import _SLACK

    for steps in range(1, 101):
        s = flow_sde.times(steps)
        found = ((1 - s) * 1000 + _SLACK).long().tolist()
        assert found == [int(k / float(steps) * 1000) for k in range(steps)], steps
