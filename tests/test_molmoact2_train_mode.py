"""MolmoAct2Policy.train at every step: the modes are the host's, and are set only where one differs."""

import gc
import weakref

import pytest
import torch
from torch import nn

import somaspeed_patch
from somaspeed_patch.sites import site
from somaspeed_patch.testing_molmoact2 import make_policy

EXPERT = dict(action_mode="continuous", train_action_expert_only=True)
FULL = dict(action_mode="continuous", train_action_expert_only=False)


def looked():
    return site("molmoact2/train_mode").calls


def modes(policy):
    return {name: module.training for name, module in policy.named_modules()}


def flip_a_module(policy):
    policy._backbone().transformer.blocks[0].train()


def flip_the_root(policy):
    policy.training = False


def replace_a_module(policy):
    policy._action_expert().action_embed = nn.Linear(32, 32).eval()


def add_a_module(policy):
    policy._backbone().transformer.blocks[1].extra = nn.Dropout(0.5)


def add_to_the_root(policy):
    policy.extra = nn.Dropout(0.5).eval()


def unfreeze(policy):
    policy.config.train_action_expert_only = False


def nothing(policy):
    pass


@pytest.mark.parametrize(
    "change",
    [nothing, flip_a_module, flip_the_root, replace_a_module, add_a_module, add_to_the_root, unfreeze],
)
def test_modes_after_a_change_are_the_hosts(change):
    policy, native = make_policy(**EXPERT), make_policy(**EXPERT)
    with somaspeed_patch.patched("molmoact2"):
        assert policy.train() is policy and policy.train() is policy
        change(policy)
        assert policy.train() is policy
    native.train()
    change(native)
    native.train()
    assert modes(policy) == modes(native)


@pytest.mark.parametrize("settings", [EXPERT, FULL])
def test_training_and_evaluation_in_turn(settings):
    policy, native = make_policy(**settings), make_policy(**settings)
    with somaspeed_patch.patched("molmoact2"):
        for mode in (True, True, False, False, True, True):
            policy.train(mode)
            native.train(mode)
            assert modes(policy) == modes(native)


def test_a_mode_that_is_set_already_is_only_looked_at(monkeypatch):
    policy = make_policy(**EXPERT)
    with somaspeed_patch.patched("molmoact2"):
        policy.train()
        walks, before = [], looked()
        monkeypatch.setattr(nn.Module, "train", lambda self, mode=True: walks.append(self))
        policy.train()
        assert not walks and looked() == before + 1
    policy.train()
    assert walks


def test_switched_off_the_host_walks():
    policy = make_policy(**EXPERT)
    with somaspeed_patch.patched("molmoact2", train_mode=False):
        before = looked()
        policy.train()
        policy._backbone().transformer.blocks[0].train()
        policy.train()
        assert modes(policy) == modes(make_policy(**EXPERT).train())
        assert looked() == before


def test_inference_graphs_are_switched_with_the_mode():
    policy = make_policy(**EXPERT)
    manager = policy._backbone().action_cuda_graph_manager
    with somaspeed_patch.patched("molmoact2"):
        policy.train()
        manager.set_enabled(True)
        policy.train()
        assert not manager.enabled


def test_a_policy_is_not_kept_alive():
    policy = make_policy(**EXPERT)
    with somaspeed_patch.patched("molmoact2"):
        policy.train()
        policy.train()
        gone = weakref.ref(policy)
        del policy
        gc.collect()
        assert gone() is None


def test_the_mode_must_still_be_a_boolean():
    policy = make_policy(**EXPERT)
    with somaspeed_patch.patched("molmoact2"):
        policy.train()
        with pytest.raises(ValueError, match="boolean"):
            policy.train("yes")
        assert modes(policy) == modes(make_policy(**EXPERT).train())
        assert torch.is_grad_enabled()
