"""MolmoAct2's actions after a weight changed: not with modulations that were cached before."""

from types import SimpleNamespace

import pytest
import torch

import somaspeed_patch
from somaspeed_patch.molmoact2 import modulations
from somaspeed_patch.testing_molmoact2 import make_batch, make_policy

EXPERT = dict(action_mode="continuous", train_action_expert_only=True)


@pytest.fixture(scope="module")
def policy():
    return make_policy(**EXPERT)


def actions(policy, batch):
    policy.eval()
    inputs = {key: value for key, value in batch.items() if key not in ("action", "labels")}
    generator = torch.Generator().manual_seed(5)
    return policy.predict_action_chunk(inputs, generator=generator)


def change(policy, amount=0.1):
    policy.train()
    with torch.no_grad():
        for block in policy._action_expert().blocks:
            block.modulation.linear.weight.add_(amount)


def fresh(policy, batch):
    copy = make_policy(**EXPERT)
    copy.load_state_dict(policy.state_dict())
    return actions(copy, batch)


def test_natively_the_second_evaluation_sees_the_first_ones_modulations(policy):
    """What is fixed here; when the host fixes it, this feature can go."""
    batch = make_batch(policy)
    actions(policy, batch)
    change(policy)
    assert not torch.equal(actions(policy, batch), fresh(policy, batch))


@pytest.mark.parametrize("how", ["in place", "loaded", "replaced"])
def test_patched_every_evaluation_sees_the_weights(policy, how):
    batch = make_batch(policy)
    with somaspeed_patch.patched("molmoact2"):
        before = actions(policy, batch)
        if how == "in place":
            change(policy)
        elif how == "loaded":
            state = {k: v + 0.05 if "modulation" in k else v for k, v in policy.state_dict().items()}
            policy.load_state_dict(state)
        else:
            linear = policy._action_expert().blocks[0].modulation.linear
            linear.weight = torch.nn.Parameter(linear.weight.detach() * 1.5)
        after = actions(policy, batch)
    assert torch.equal(after, fresh(policy, batch))
    assert not torch.equal(before, after)


def test_the_cache_still_serves_unchanged_weights(policy):
    batch = make_batch(policy)
    with somaspeed_patch.patched("molmoact2"):
        actions(policy, batch)
        kept = policy._action_expert()._modulation_cache_value
        actions(policy, batch)
        assert policy._action_expert()._modulation_cache_value is kept
    with somaspeed_patch.patched("molmoact2", fresh_modulations=False):
        change(policy)
        actions(policy, batch)
        assert policy._action_expert()._modulation_cache_value is kept


def test_a_captured_graph_is_dropped_when_a_weight_changes(policy):
    """The graph itself needs a GPU; what decides is whether the manager still has one when it is asked."""
    manager = SimpleNamespace(model=policy._backbone(), action_flow_graph=None)
    manager = type("Manager", (), vars(manager))()
    seen = []

    def run():
        seen.append(manager.action_flow_graph)
        manager.action_flow_graph = "captured"

    with somaspeed_patch.patched("molmoact2"):
        for _ in range(2):
            modulations.replay(run, manager, (), {})
        change(policy)
        modulations.replay(run, manager, (), {})
    assert seen == [None, "captured", None]
