"""What the parity tests share: weights that hide nothing, one training step with all it leaves behind, the
same step in fp64, and what may differ.

    policy = lively(make_policy(cameras=2))
    native = step(policy, batch)
    with somaspeed_patch.patched("molmoact2"):
        assert_same_step(native, step(policy, batch))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LossFn = Callable[[Any, dict[str, Any], str], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a training step without the update leaves behind."""

    loss: Tensor
    """a scalar, or [B] with reduction "none" """
    gradients: Mapping[str, Tensor | None]
    """of every parameter, by name"""
    random_state: Tensor
    """of the generators of the CPU and of the policy's device"""
    shown: Mapping[str, Any]
    """the numbers that the policy returns beside the loss"""


def lively(policy: Any, seed: int = 0) -> Any:
    """The policy with new weights under which activations stay near 1, so that every input reaches the loss.

    With the usual standard deviation of 0.02 a narrow model is mute: at width 32 MolmoAct2's image features
    are 3e-7 beside embeddings of 2e-2, and exchanging all images leaves the loss as it was, bit for bit.
    """
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if parameter.dim() < 2:
                parameter.add_((0.1 * noise).to(parameter))
            else:
                parameter.copy_(_size(name, parameter) * noise)
    return policy


def _size(name: str, matrix: Tensor) -> float:
    """Standard deviation: rows of a table are inputs themselves; LoRA's product adds to a whole weight."""
    if name.endswith(("wte.embedding", "wte.new_embedding")):
        return 1.0
    return float((0.2 if "lora" in name else 1.0) / matrix.shape[-1] ** 0.5)


def remembering(make_batch: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`make_batch(policy, **shape)` that preprocesses once for a configuration and shape, as long as a step.

    Returns: copies, which a test may write into.
    """
    made: dict[str, dict[str, Any]] = {}

    def batch_of(policy: Any, **shape: Any) -> dict[str, Any]:
        key = repr((policy.config, shape))
        if key not in made:
            made[key] = make_batch(policy, **shape)
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in made[key].items()}

    return batch_of


def step(
    policy: Any,
    batch: dict[str, Any],
    *,
    reduction: str = "mean",
    seed: int = 7,
    autocast: bool = False,
    loss_of: LossFn | None = None,
) -> Step:
    """Forward and backward.

    Args:
        policy, batch: from `make_policy` and `make_batch`.
        reduction: mean, or none for a loss a sample; these are weighted with 1, 2, ... before the backward,
            so that a gradient given to the wrong sample shows.
        seed: for noise, times and dropout.
        autocast: run the forward under torch.autocast to bfloat16, as accelerate does when told to.
        loss_of: of policy, batch and reduction; the policy's own forward by default.
    """
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    device = next(policy.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss, shown = (loss_of or type(policy).forward)(policy, batch, reduction)
    weights = torch.arange(1, loss.numel() + 1, device=device, dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    return Step(
        loss=loss.detach(),
        gradients={n: None if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()},
        random_state=_random_state(device),
        shown=shown,
    )


def _random_state(device: torch.device) -> Tensor:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def flow_loss(policy: Any, batch: dict[str, Any], reduction: str) -> tuple[Tensor, dict[str, Any]]:
    """For `loss_of`: MolmoAct2's flow loss with times [B, F] and noise [B, F, T, 32] out of the batch.

    Its own forward draws them, and other numbers in another dtype.
    """
    loss, _ = policy._compute_flow_matching_loss_joint_per_layer(
        batch=batch,
        model_inputs=policy._model_inputs(batch),
        timesteps=batch["times"],
        noise=batch["noise"],
        reduction=reduction,
    )
    return loss, {}


def with_noise(policy: Any, batch: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The batch with times and noise for `flow_loss`; they and the actions are rounded to bf16."""
    samples, horizon, width = batch["action"].shape
    shape, rng = (samples, policy.config.num_flow_timesteps), torch.Generator().manual_seed(seed)
    drawn = {
        "times": torch.rand(shape, generator=rng),
        "noise": torch.randn(*shape, horizon, width, generator=rng),
        "action": batch["action"],
    }
    return {
        **batch,
        **{key: value.to(batch["action"].device, torch.bfloat16) for key, value in drawn.items()},
    }


def in_float64(policy: Any, batch: dict[str, Any], **arguments: Any) -> Step:
    """The host's step with the same weights and random numbers, all of it in fp64: the truth.

    Args:
        policy: in fp32; its gradient checkpointing is left out, it changes no number.
        batch: on the CPU.
        arguments: of `step`.
    """
    exact = copy.deepcopy(policy).double()
    for module in exact.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    exact.config.gradient_checkpointing = False
    with _Float64():
        return step(exact, batch, **arguments)


class _Float64(TorchFunctionMode):
    """Turns the host's casts to fp32 into casts to fp64; draws noise in fp32, as fp64 has other numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.randn:
            return func(*args, **{**given, "dtype": torch.float32}).double()
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_widened, args), **{key: _widened(value) for key, value in given.items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def assert_same_step(native: Step, ours: Step, tolerance: float = 2e-6) -> None:
    """The same loss, gradients and random numbers, up to the order of fp32 sums.

    Args:
        tolerance: of a gradient's norm; half of it for the loss; 0 for the same bits.
    """
    _assert_same_kind(native, ours)
    assert (ours.loss - native.loss).abs().max() <= tolerance / 2 * native.loss.abs().max()
    for key, value in native.shown.items():
        assert math.isclose(ours.shown[key], value, rel_tol=max(tolerance, 1e-12)), key
    for name in _gradients(native):
        assert _error(ours, native, name) <= tolerance * _scale(native, name), name


def assert_as_accurate_as_native(truth: Step, native: Step, ours: Step, each: bool = True) -> None:
    """Loss and gradients are at most twice as far from the truth as native's: as a whole, and in the median.

    Args:
        each: also every parameter's gradient, plus native's worst relative error: what the rounding of this
            model and batch costs where native had no luck. In bf16 luck decides too much: one draw of noise
            in eight had a vision gradient 2.5 times as far, the others 0.8 to 1.2 times.
    """
    _assert_same_kind(native, ours)
    sizes = {name: _scale(truth, name) for name in _gradients(native)}
    mine, theirs = ([_error(found, truth, name) for name in sizes] for found in (ours, native))
    assert math.hypot(*mine) <= 2 * math.hypot(*theirs)
    relative = [[e / s for e, s in zip(found, sizes.values(), strict=True)] for found in (mine, theirs)]
    assert median(relative[0]) <= 2 * median(relative[1])
    worst = max(relative[1])
    for name, our, native_error in zip(sizes if each else (), *relative, strict=False):
        assert our <= 2 * native_error + worst, f"{name}: off by {our:.3g}, native by {native_error:.3g}"
    spread, size = (native.loss - truth.loss).abs().max(), truth.loss.abs().max()
    assert (ours.loss - truth.loss).abs().max() <= 2 * spread + worst * size


def _assert_same_kind(native: Step, ours: Step) -> None:
    assert ours.loss.shape == native.loss.shape and ours.loss.dtype == native.loss.dtype
    assert torch.equal(ours.random_state, native.random_state)
    assert ours.shown.keys() == native.shown.keys()
    assert ours.gradients.keys() == native.gradients.keys()
    mine, theirs = _gradients(ours), _gradients(native)
    assert mine.keys() == theirs.keys()
    assert all(mine[name].dtype == gradient.dtype for name, gradient in theirs.items())


def _gradients(found: Step) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in found.gradients.items() if gradient is not None}


def _error(found: Step, expected: Step, name: str) -> float:
    mine, theirs = _gradients(found)[name], _gradients(expected)[name]
    return float((mine.double() - theirs.double()).norm())


def _scale(found: Step, name: str) -> float:
    """What a gradient's rounding is measured against: its norm.

    The bias of a key projection shifts all scores of a query alike, which changes no softmax: its true
    gradient is zero, and what is computed is the rounding of the weight's.
    """
    if name.endswith(".wk.bias"):
        name = name.removesuffix("bias") + "weight"
    return float(_gradients(found)[name].norm())
