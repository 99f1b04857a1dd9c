"""MolmoAct2 over several steps: what may go stale, what adds up, what must not be asked of the device."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

import somaspeed_patch
from somaspeed_patch import facts, sites, testing_molmoact2
from somaspeed_patch.testing_molmoact2 import make_policy
from somaspeed_patch.testing_parity import assert_same_step, lively, remembering, step

FROZEN = dict(action_mode="continuous", train_action_expert_only=True)
BOTH = dict(action_mode="both")
TASKS = dict(tasks=["pick up the cube", "put the very large red bowl on the plate", "go", "open the drawer"])
make_batch = remembering(testing_molmoact2.make_batch)


@cache
def original(**config):
    return lively(make_policy(**config))


def policy_of(**config):
    """A policy to be trained."""
    return copy.deepcopy(original(**config))


@pytest.fixture(autouse=True)
def fresh_counts():
    sites.clear()


def calls(name):
    return sites.site(f"molmoact2/{name}").calls


def update(policy, seed=0):
    """One optimizer step that moves every trainable weight visibly."""
    optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-3, weight_decay=0.0)
    step(policy, make_batch(policy, **TASKS, seed=seed), seed=seed)
    optimizer.step()


def actions(policy, batch):
    """A chunk from the policy, which is left in training mode."""
    policy.eval()
    torch.manual_seed(0)
    found = policy.predict_action_chunk({key: value for key, value in batch.items() if key != "action"})
    policy.train()
    return found


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("transformer.blocks.0.attn_norm", False),
        ("transformer.blocks.0.attn_norm", True),
        ("transformer.blocks.0.mlp.ff_out", True),
        ("vision_backbone.image_projector.w2", True),
    ],
)
def test_new_frozen_weights_are_seen_at_the_next_step(name, autocast):
    """Under autocast from a copy, which must notice."""
    policy = policy_of(**FROZEN)
    batch = make_batch(policy)
    with somaspeed_patch.patched("molmoact2"):
        before = step(policy, batch, autocast=autocast)
        with torch.no_grad():
            policy._backbone().get_submodule(name).weight.mul_(2)
        ours = step(policy, batch, autocast=autocast)
        assert ours.loss != before.loss
        assert calls("cast_once") == (4 if autocast else 0)  # language model and tower, twice
    with somaspeed_patch.patched("molmoact2"):  # unpatch() has dropped every copy
        assert_same_step(step(policy, batch, autocast=autocast), ours, tolerance=0)


def test_loaded_weights_are_seen_under_autocast():
    policy, other = policy_of(**FROZEN), lively(make_policy(**FROZEN), seed=1)
    batch = make_batch(policy)
    with somaspeed_patch.patched("molmoact2"):
        step(policy, batch, autocast=True)
        policy.load_state_dict(other.state_dict())
        ours = step(policy, batch, autocast=True)
        assert_same_step(step(other, batch, autocast=True), ours, tolerance=0)


def test_state_dict_and_module_tree_stay_the_hosts():
    policy = policy_of(**FROZEN)
    names = [name for name, _ in policy.named_modules()]
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    with somaspeed_patch.patched("molmoact2"):
        step(policy, make_batch(policy), autocast=True)
        assert [name for name, _ in policy.named_modules()] == names
        assert policy.state_dict().keys() == state.keys()
        assert all(torch.equal(policy.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize("config", [FROZEN, BOTH], ids=["frozen", "both"])
def test_actions_between_updates_are_those_of_the_weights_of_the_moment(config):
    policy, batch = policy_of(**config), make_batch(original(**config))
    native = actions(policy_of(**config), batch)
    with somaspeed_patch.patched("molmoact2"):
        assert torch.equal(actions(policy, batch), native)
        update(policy)
        policy.eval()
        with torch.no_grad():
            policy.forward(batch)  # a validation loss leaves nothing behind either
        ours = actions(policy, batch)
    fresh = make_policy(**config)
    fresh.load_state_dict(policy.state_dict())
    assert torch.equal(ours, actions(fresh, batch))
    assert (ours - native).abs().max() > 1e-3


def accumulated(policy, batches):
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    for batch in batches:
        (policy.forward(batch)[0] / len(batches)).backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def test_gradients_of_three_micro_batches_add_up():
    policy = policy_of(**FROZEN)
    batches = [make_batch(policy, **TASKS, seed=i) for i in range(3)]
    native = accumulated(policy, batches)
    with somaspeed_patch.patched("molmoact2"):
        ours = accumulated(policy, batches)
    assert calls("frozen_prefix") == 3
    assert native.keys() == ours.keys()
    for name, gradient in native.items():
        assert (gradient - ours[name]).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.parametrize("config", [FROZEN, BOTH], ids=["frozen", "both"])
def test_the_same_step_twice_is_the_same_bits(config):
    policy = policy_of(**config)
    batch = make_batch(policy, **TASKS)
    with somaspeed_patch.patched("molmoact2"):
        assert_same_step(step(policy, batch), step(policy, batch), tolerance=0)


def test_patched_before_or_after_the_policy_is_built_and_native_again_after_unpatch():
    policy = policy_of(**FROZEN)
    batch = make_batch(policy, **TASKS)
    native = step(policy, batch)
    with somaspeed_patch.patched("molmoact2"):
        before = step(policy, batch)
        after = step(lively(make_policy(**FROZEN)), batch)
        assert calls("frozen_prefix") == 2
    assert_same_step(before, after, tolerance=0)
    assert_same_step(native, before)
    assert_same_step(native, step(policy, batch), tolerance=0)
    assert calls("frozen_prefix") == 2


class Distant(Tensor):
    """A tensor of a device that must not be asked, and so is what is computed from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        asks = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
        by_mask = func is Tensor.__getitem__ and any(
            isinstance(key, Tensor) and key.dtype == torch.bool
            for key in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if func.__name__ in asks or by_mask:
            raise AssertionError(f"{func.__name__} waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_nothing_of_the_batch_is_read_back_where_it_has_twins(monkeypatch):
    """Drawing the times is left out: the host looks at the parameters of its Beta distribution."""
    policy = policy_of(**FROZEN, cameras=2)
    batch = make_batch(policy, **TASKS, valid_actions=[4, 2, 1, 3])
    batch = {k: v.as_subclass(Distant) if isinstance(v, Tensor) else v for k, v in batch.items()}
    times, noise = torch.full((4, 2), 0.3), torch.zeros(4, 2, 4, 32)

    def loss():
        inputs = policy._model_inputs(batch)
        return policy._compute_flow_matching_loss_joint_per_layer(
            batch=batch, model_inputs=inputs, timesteps=times, noise=noise
        )[0]

    with pytest.raises(AssertionError, match="waits for the device"):
        loss()
    monkeypatch.setattr(facts, "on_cpu", lambda tensor: tensor.as_subclass(Tensor))
    monkeypatch.setattr(facts, "has_twin", lambda tensor: True)
    with somaspeed_patch.patched("molmoact2"):
        found = loss()
    assert calls("frozen_prefix") == 1
    assert isinstance(found, Distant)
