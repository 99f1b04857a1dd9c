"""What the tests of FusedAdamW in its hosts share: the same run with its optimizer in fp64, and the budget.

A host's run is compared with one whose clipping and AdamW are computed in fp64: ours may be twice as far from
it as the host's own. Losses and norms follow from the weights; their own rounding is part of both errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import sites
from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import fused_adamw


class ExactAdamW(torch.optim.AdamW):
    """AdamW behind clipping to a global norm, in fp64; a parameter is rounded once a step, to its dtype."""

    factor = 1.0

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The global norm, [] fp64; the gradients stay, and the next `step` reads them clipped."""
        params = [param for group in self.param_groups for param in group["params"]]
        squares = [param.grad.double().square().sum() for param in params if param.grad is not None]
        norm = torch.stack(squares).sum().sqrt()
        self.factor = min(1.0, max_norm / (float(norm) + 1e-6))
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; a closure is not called."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        self.factor = 1.0

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        entry = self.state[param]
        if not entry:
            entry["step"] = torch.zeros(())
            entry["exp_avg"], entry["exp_avg_sq"] = (torch.zeros_like(param).double() for _ in range(2))
        entry["step"] += 1
        hyper = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        new, entry["exp_avg"], entry["exp_avg_sq"] = adamw.adamw_ref(
            param.double(), grad.double(), entry["exp_avg"].double(), entry["exp_avg_sq"].double(),
            int(entry["step"]), **hyper, factor=self.factor,
        )  # fmt: skip
        param.copy_(new)


def clip_exactly(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    """In place of `Accelerator.clip_grad_norm_`, where the last optimizer prepared is an ExactAdamW."""
    return accelerator._optimizers[-1].optimizer.clip_grad_norm_(max_norm)


@contextmanager
def small_tiles(size: int = 512) -> Iterator[None]:
    """Tiles of `size` elements: one of 16 Ki takes Triton's interpreter 0.1 s."""
    before = adamw.BLOCK, adamw.ITER, adamw.TILE
    adamw.BLOCK, adamw.ITER, adamw.TILE = size, 1, size
    try:
        yield
    finally:
        adamw.BLOCK, adamw.ITER, adamw.TILE = before


def forget_counts() -> None:
    """Start the report afresh; nothing may be patched."""
    sites.clear()
    fused_adamw.CALLS.clear()


def error(values: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest error of any element, in units of the largest element of its tensor's truth; NaN stays."""
    return float(torch.stack([_error(values[name], truth[name]) for name in truth]).max())


def _error(value: Tensor, truth: Tensor) -> Tensor:
    difference = (value.double() - truth.double()).abs().max()
    return difference / truth.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)


def assert_within_budget(
    ours: Mapping[str, Tensor], native: Mapping[str, Tensor], truth: Mapping[str, Tensor], slack: float = 2.0
) -> None:
    """`ours` is at most `slack` times as far from `truth` as `native` is, give or take one rounding.

    Args:
        ours, native, truth: by name, for example the weights, or {"loss": [steps]}; each dtype of `native`
            is compared by itself.

    Raises: AssertionError: says how far off it is.
    """
    _require(ours.keys() == native.keys() == truth.keys(), "the names differ")
    for dtype in {value.dtype for value in native.values()}:
        names = [name for name, value in native.items() if value.dtype == dtype]
        alike = all(ours[name].dtype == dtype and ours[name].shape == native[name].shape for name in names)
        _require(alike, f"{dtype}: dtypes or shapes differ")
        exact = {name: truth[name] for name in names}
        allowed = slack * error(native, exact) + torch.finfo(dtype).eps
        found = error(ours, exact)
        _require(found <= allowed, f"{dtype}: off by {found:.3g}, allowed {allowed:.3g}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
