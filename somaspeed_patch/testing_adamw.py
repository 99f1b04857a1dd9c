"""What the tests of FusedAdamW itself share: parameters of every kind, their gradients, and the budget.

The budget is that of `assert_no_worse_than_native`: an error against fp64 of at most twice that of
torch.optim.AdamW behind torch's clipping in the same dtypes, plus one eps of the stored dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

SHAPES: list[tuple[int, ...]] = [
    (33,), (257, 65), (0,), (1,), (), (40, 31), (7, 5), (16384 + 3,), (8, 3, 4, 4)
]  # fmt: skip
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(kw_only=True)
class Record:
    """What a run left: the norm of every step, and weights, moments and step counts at the end."""

    norms: list[float] = field(default_factory=list)
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    """fp64, on the CPU."""
    steps: list[float | None] = field(default_factory=list)


def parameters(
    dtypes: Sequence[torch.dtype], device: str = "cpu", shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    """One parameter a shape, dtypes in turn; those with four axes in channels-last order."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, shape in enumerate(shapes):
        value = torch.randn(shape, generator=generator).to(device, dtypes[i % len(dtypes)])
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        made.append(nn.Parameter(value))
    return made


def gradients(params: Sequence[Tensor], step: int) -> Iterator[Tensor | None]:
    """Gradients of one step, fp64, large and small in turn.

    [7, 5] has none before step 2 and [40, 31] none at step 5; every third step the matrices are transposed
    in memory, so that their strides are not the parameter's.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64) * (
            10 if step % 2 else 1e-3
        )
        if (param.shape == (7, 5) and step < 2) or (param.shape == (40, 31) and step == 5):
            yield None
        else:
            yield value.t().contiguous().t() if value.ndim == 2 and step % 3 == 0 else value


def set_gradients(params: Sequence[Tensor], step: int, like: Sequence[Tensor] | None = None) -> None:
    """Give `params` the gradients of `step`, rounded to the dtypes of `like` on the way."""
    for param, model, grad in zip(params, like or params, gradients(params, step), strict=True):
        param.grad = None if grad is None else grad.to(model.dtype).to(param.device, param.dtype)


def run(
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], Tensor],
    params: Sequence[Tensor],
    *,
    num_steps: int = 20,
    first: int = 0,
    max_norm: float = 1.0,
    like: Sequence[Tensor] | None = None,
) -> Record:
    """Steps `first` to `first + num_steps`, with a schedule that halves lr every 5 of them."""
    record = Record()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(first, first + num_steps):
        set_gradients(params, step, like)
        record.norms.append(float(clip(max_norm)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return snapshot(optimizer, params, record)


def snapshot(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], record: Record | None = None
) -> Record:
    """Weights, moments and step counts as they are."""
    record = record or Record()
    states = [optimizer.state.get(param) or {} for param in params]
    record.values["param"] = [param.detach().double().cpu().clone() for param in params]
    for name in ("exp_avg", "exp_avg_sq"):
        record.values[name] = [state[name].double().cpu().clone() for state in states if state]
    record.steps = [float(state["step"]) if state else None for state in states]
    return record


def same_bits(a: Record, b: Record) -> bool:
    """Whether two runs ended in the same bits."""
    pairs = [pair for name in a.values for pair in zip(a.values[name], b.values[name], strict=True)]
    return a.norms == b.norms and a.steps == b.steps and all(torch.equal(x, y) for x, y in pairs)


def assert_within_native(ours: Record, native: Record, truth: Record, eps: Sequence[float]) -> None:
    """Each tensor of `ours` is at most twice as far from `truth` as `native` is, plus eps of its dtype.

    Args:
        eps: in turn, as the dtypes of `parameters`.

    Raises: AssertionError: names the tensor.
    """
    if ours.steps != native.steps:
        raise AssertionError(f"step counts differ: {ours.steps}, expected {native.steps}")
    active = {"param": list(range(len(ours.steps)))}
    for name in ("exp_avg", "exp_avg_sq"):
        active[name] = [i for i, step in enumerate(ours.steps) if step is not None]
    for name, tensors in truth.values.items():
        for i, o, n, t in zip(active[name], ours.values[name], native.values[name], tensors, strict=True):
            if not t.numel():
                continue
            off, allowed = (o - t).abs().max(), 2 * (n - t).abs().max() + eps[i % len(eps)] * t.abs().max()
            if not off <= allowed:
                raise AssertionError(f"{name} {i} {tuple(t.shape)}: off by {off:.3g}, allowed {allowed:.3g}")


def torch_clip(params: Sequence[Tensor]) -> Callable[[float], Tensor]:
    """torch.nn.utils.clip_grad_norm_ of `params`."""
    return lambda max_norm: torch.nn.utils.clip_grad_norm_(list(params), max_norm)
