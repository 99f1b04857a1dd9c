"""The launches of one clip and one step over a `Plan`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from somaspeed_patch.kernels import adamw
from somaspeed_patch.kernels.device import current
from somaspeed_patch.optim import nonfinite
from somaspeed_patch.optim.options import Options
from somaspeed_patch.optim.plan import Plan


class KernelFailure(Exception):
    """A kernel could not be built or launched; nothing was written."""


@contextlib.contextmanager
def _kernels(device: torch.device) -> Iterator[None]:
    """Launch on `device`; an error becomes a KernelFailure."""
    try:
        with current(device):
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton, its compiler and its launcher share no base class
        raise KernelFailure(f"{type(error).__name__}: {error}") from error


def measure(
    plan: Plan, row: Tensor, groups: Sequence[dict[str, Any]], options: Options, max_norm: float,
    process_group: ProcessGroup | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launches 1 to 3 and the sums over ranks.

    Args:
        row: `plan.gradient_row()`.
        process_group: see `nonfinite.flag`.

    Returns: the norm, [] fp32; and [1] fp32, 1 where it is not finite, or None if `options` do not ask.
    """
    norm = torch.empty((), dtype=torch.float32, device=plan.device)
    with _kernels(plan.device):
        adamw.tile_squares(plan.tables, row)
    plan.sum_squares()
    bad = None
    if options.nonfinite != "propagate":
        bad = nonfinite.flag(plan.tables.squares, process_group)
    write_hyper(plan, groups)
    with _kernels(plan.device):
        adamw.scalars(
            plan.tables, plan.hyper.tensor, plan.steps,
            norm=norm, max_norm=max_norm, divisor=options.grad_divisor, found_inf=bad,
        )  # fmt: skip
    return norm, bad


def update(
    plan: Plan, row: Tensor, groups: Sequence[dict[str, Any]], options: Options, pending: bool,
    grad_scale: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Launch 4, behind launch 3 unless the one of `measure` still holds.

    Args:
        pending: `measure` was called on these gradients.
        grad_scale, found_inf: from a GradScaler.
    """
    changed = write_hyper(plan, groups)
    plan.gather_copies()
    with _kernels(plan.device):
        if changed or not pending or grad_scale is not None or found_inf is not None:
            adamw.scalars(
                plan.tables, plan.hyper.tensor, plan.steps,
                pending=pending, divisor=options.grad_divisor, grad_scale=grad_scale, found_inf=found_inf,
            )  # fmt: skip
        adamw.update(
            plan.tables, plan.pointers, row, plan.steps,
            stochastic_rounding=options.stochastic_rounding, seed=options.rounding_seed,
        )  # fmt: skip
    plan.scatter_copies()


def write_hyper(plan: Plan, groups: Sequence[dict[str, Any]]) -> bool:
    """Bring `plan.hyper` [G, 8] up to date; whether it changed since the last launch 3.

    A captured graph must not hold a copy of today's learning rates, so nothing is uploaded during a capture.
    """
    changed = False
    if not plan.capturing():
        changed = plan.hyper.write([number for group in groups for number in _numbers(group)])
    for row, group in enumerate(groups):
        if isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
            plan.hyper.tensor[row, 0].copy_(group["lr"].reshape(()))
            changed = True
    return changed


def _numbers(group: dict[str, Any]) -> tuple[float, ...]:
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.is_cuda
    sign = -1.0 if group["maximize"] else 1.0
    return (
        0.0 if on_device else float(lr),
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        sign,
        0.0,
        0.0,
    )
