"""train() of a GR00T policy and its frozen parts' eval(): every module's mode is the host's."""

import pytest
import torch
from torch import nn

import somaspeed_patch
from somaspeed_patch import frozen, sites, train_mode
from somaspeed_patch.sites import site
from somaspeed_patch.testing_groot import loss_and_gradients, make_batch, make_policy


@pytest.fixture(autouse=True)
def counted_anew():
    sites.clear()


def modes(policy):
    return {name: module.training for name, module in policy.named_modules()}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("tuned", [{}, {"tune_llm": True}])
def test_modes_are_the_hosts(mode, tuned):
    policy = make_policy(**tuned)
    batch = make_batch(policy)
    found = []
    for patched in (False, True):
        policy.train(not mode)
        if patched:
            with somaspeed_patch.patched("groot"):
                assert policy.train(mode) is policy
                after_train = modes(policy)
                loss_and_gradients(policy, batch)
        else:
            policy.train(mode)
            after_train = modes(policy)
            loss_and_gradients(policy, batch)
        found.append((after_train, modes(policy)))
    assert found[0] == found[1]
    frozen = [name for name, on in found[0][1].items() if not on]
    assert bool(frozen) and (not mode or len(frozen) < len(found[0][1]))
    assert site("groot/train_mode").calls == 1


def test_a_module_with_a_train_of_its_own_is_asked():
    class Own(nn.Dropout):
        def train(self, mode=True):
            self.asked = mode
            return super().train(mode)

    policy = make_policy()
    policy._groot_model.action_head.own = Own(0.1)
    with somaspeed_patch.patched("groot"):
        policy.eval()
        assert policy._groot_model.action_head.own.asked is False and not policy.training
        found = site("groot/train_mode")
        assert (found.calls, found.native_calls) == (0, 1) and "of its own" in found.reason


def test_the_feature_switches_it_off():
    policy = make_policy()
    with somaspeed_patch.patched("groot", train_mode=False):
        policy.train()
        assert site("groot/train_mode").calls == 0


@pytest.mark.parametrize("mode", [1, None])
def test_what_torch_refuses_is_left_to_torch(mode):
    assert not train_mode.set_directly(nn.Linear(1, 1), mode)


def test_a_working_copy_is_without_the_recorders_of_a_native_forward():
    """transformers leaves them on the layers; there they would break compiled graphs."""
    policy = make_policy()
    layers = policy._groot_model.backbone.language_model.layers
    loss_and_gradients(policy, make_batch(policy))  # natively
    others = [hook for layer in layers for hook in layer._forward_hooks.values()]
    assert others and all(hook.__module__ == "transformers.utils.output_capturing" for hook in others)
    layers[0].register_forward_hook(print)
    copied = frozen.working_copy(policy._groot_model.backbone.language_model, torch.bfloat16)
    assert [list(layer._forward_hooks.values()) for layer in copied.layers] == [[print]] + [[]] * (
        len(layers) - 1
    )
    assert sum(len(layer._forward_hooks) for layer in layers) == len(others) + 1
