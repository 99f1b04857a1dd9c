"""The compile feature with dynamo and AOTAutograd for real; Inductor, 50 s here, is left to the GPU."""

import pytest
import torch
from torch._dynamo.utils import counters

import somaspeed_patch
from somaspeed_patch import compiled
from somaspeed_patch.testing_pi05 import loss_and_gradients as step
from somaspeed_patch.testing_pi05 import make_batch, make_policy


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def site():
    return next(s for s in somaspeed_patch.report().sites if s.site == "pi05/compile")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_equals_native(checkpointing):
    policy = make_policy(train_expert_only=True, cameras=2, gradient_checkpointing=checkpointing)
    batch = make_batch(policy, language_lengths=[48, 7, 1, 20])
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05", compile=True):
        before = site().calls
        ours = step(policy, batch)
        assert site().calls > before
    assert torch.allclose(native[0], ours[0], rtol=1e-6)
    assert native[1].keys() == ours[1].keys()
    for name, gradient in native[1].items():
        assert (gradient - ours[1][name]).norm() <= 2e-6 * gradient.norm() + 1e-12, name


def test_one_graph_serves_all_layers_without_breaks():
    policy = make_policy(train_expert_only=True, cameras=2)
    batch = make_batch(policy)
    with somaspeed_patch.patched("pi05", compile=True):
        step(policy, batch)
        step(policy, batch)
    assert counters["stats"]["unique_graphs"] == 3  # SigLIP layer, prefix layer, expert layer
    assert not counters["graph_break"]


def test_a_compiler_that_fails_leaves_the_layer_eager_and_is_reported(monkeypatch):
    policy = make_policy(train_expert_only=True)
    batch = make_batch(policy)
    native = step(policy, batch)

    def no_compiler(graph, inputs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(compiled, "BACKEND", no_compiler)
    with somaspeed_patch.patched("pi05", compile=True):
        before = site().fallbacks
        ours = step(policy, batch)
        found = site()
    assert found.fallbacks > before
    assert "no C compiler" in found.last_fallback
    assert torch.allclose(native[0], ours[0], rtol=1e-6)


def test_more_shapes_than_graphs_run_eagerly_and_are_reported(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_SHAPES", 1)
    policy = make_policy(train_expert_only=True)
    with somaspeed_patch.patched("pi05", compile=True):
        step(policy, make_batch(policy, batch_size=2))
        batch = make_batch(policy, batch_size=3)
        ours = step(policy, batch)
        assert "met more than 1 shapes" in site().reason
    assert torch.allclose(step(policy, batch)[0], ours[0], rtol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_hosts_own_compile_model_turns_it_on(checkpointing):
    """LeRobot's compile_model hides the class attribute behind a compiled one."""
    policy = make_policy(
        train_expert_only=True, cameras=2, compile_model=True, compile_mode="default",
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    hosts_own = vars(policy.model)["forward"]
    plain = make_policy(train_expert_only=True, cameras=2, gradient_checkpointing=checkpointing)
    batch = make_batch(policy)
    native = step(plain, batch)
    with somaspeed_patch.patched("pi05"):
        before = site().calls
        ours = step(policy, batch)
        assert site().calls > before
    assert vars(policy.model)["forward"] is hosts_own
    assert torch.allclose(native[0], ours[0], rtol=1e-6)


def test_under_mixed_precision_the_hosts_compiled_forward_steps_aside_too():
    """There accelerate calls PI05Policy.forward through what it found under `policy.forward.__func__`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def never(*args, **kwargs):
        raise RuntimeError("the host's compiled forward ran")

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with somaspeed_patch.patched("pi05"):
            policy = Accelerator(cpu=True, mixed_precision="bf16").prepare(
                make_policy(train_expert_only=True)
            )
            vars(policy.model)["forward"] = never
            loss, _ = policy.forward(make_batch(policy))
        assert loss.isfinite() and vars(policy.model)["forward"] is never
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_backward_that_does_not_compile_is_found_in_the_forward(monkeypatch):
    """torch compiles it lazily, inside the user's loss.backward(), where nobody could fall back."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def no_backward(graph, inputs):
        raise RuntimeError("no backward compiler")

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=no_backward
    )
    monkeypatch.setattr(compiled, "BACKEND", backend)
    policy = make_policy(train_expert_only=True)
    batch = make_batch(policy)
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05", compile=True):
        before = site().fallbacks
        ours = step(policy, batch)
        assert site().fallbacks > before and "no backward compiler" in site().last_fallback
    assert native[1].keys() == ours[1].keys()
    for name, gradient in native[1].items():
        assert (gradient - ours[1][name]).norm() <= 2e-6 * gradient.norm() + 1e-12, name
