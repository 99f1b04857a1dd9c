"""AdamW over all parameters of an optimizer at once: global norm, clipping and update in four launches.

    partial = squares of every tile          tile_squares
    squares = sums of every parameter        (the same function)
              an all-reduce over shards, if there are any, belongs here
    norm, clip factor, step sizes            scalars
    p, m, v                                  update

Bytes a parameter in fp32: 4 for the norm, 28 for the update (p, g, m, v read, p, m, v written), against 40
for torch's fused AdamW behind its clip, which writes the clipped gradients, and 92 for the foreach one.
The kernels find the tensors through tables of addresses, see `Tables`; `somaspeed_patch.optim` fills those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.kernels.adamw_kernels import (
    _adamw_scalars_kernel,
    _adamw_slot_squares_kernel,
    _adamw_tile_squares_kernel,
    _adamw_update_kernel,
)
from somaspeed_patch.kernels.device import INTERPRETED as INTERPRETED

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# 16 Ki elements a tile; 4 warps, 8 elements a thread: two 16-byte loads in flight. The interpreter takes
# 10 ms a round whatever its size, so there it is one.
BLOCK, ITER = (16384, 1) if INTERPRETED else (1024, 16)
TILE = BLOCK * ITER
UNUSED = -1  # the kind of a slot without a gradient


def kind(param: torch.dtype, grad: torch.dtype, moments: torch.dtype, master: bool) -> int:
    """The dtypes of a slot as one number.

    Raises: KeyError: a dtype other than fp32, bf16 and fp16.
    """
    return CODES[param] + 3 * CODES[grad] + 9 * CODES[moments] + 27 * master


@dataclass(kw_only=True)
class Slot:
    """One parameter, as the tables see it."""

    numel: int
    """Elements of the local shard."""
    kind: int
    """See `kind`; UNUSED without a gradient."""
    group: int
    """Row of `Tables.hyper`."""
    start: int = 0
    """Index of the shard's first element in the whole parameter; only counts the random bits."""
    identity: int = 0
    """Index in the optimizer, the same on every rank; only counts the random bits."""


@dataclass(kw_only=True)
class Tables:
    """Everything the kernels read beside the parameters, on their device. N slots, T tiles, G groups."""

    slots: Sequence[Slot]
    tile_slot: Tensor
    """[T] int32"""
    tile_offset: Tensor
    """[T] int64, elements"""
    slot_first: Tensor
    """[N + 1] int32: a slot's first tile; its tiles follow each other."""
    slot_numel: Tensor
    """[N] int64"""
    slot_kind: Tensor
    """[N] int32"""
    slot_group: Tensor
    """[N] int32"""
    slot_start: Tensor
    """[N] int64"""
    slot_identity: Tensor
    """[N] int32"""
    kinds: int
    """Bit set of the kinds that occur."""
    gradient_codes: int
    """Bit set of the gradients' dtypes, see CODES."""
    partial: Tensor
    """[T] fp32"""
    squares: Tensor
    """[N] fp64: the squared norm of each gradient; an unused slot's is 0."""
    scalars: Tensor
    """[N, 9] fp32: step size, sqrt(1 - beta2**t), 1 - lr*wd, 1 - beta1, beta2, 1 - beta2, eps, sign, t."""
    shared: Tensor
    """[3] fp32: clip factor, factor of the gradients, 1 where the step is skipped."""
    compiled: dict[Any, Any] = field(default_factory=dict)
    """See `_launch`."""


def make_tables(slots: Sequence[Slot], device: torch.device) -> Tables:
    """The tables of `slots`, N >= 1, uploaded to `device`."""
    counts = torch.tensor([_num_tiles(slot) for slot in slots])
    first = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    tile_slot = torch.repeat_interleave(torch.arange(len(slots)), counts)
    tile_offset = (torch.arange(len(tile_slot)) - first[tile_slot]) * TILE
    kinds = {slot.kind for slot in slots} - {UNUSED}

    def column(values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return Tables(
        slots=slots,
        tile_slot=tile_slot.to(device, torch.int32),
        tile_offset=tile_offset.to(device),
        slot_first=first.to(device, torch.int32),
        slot_numel=column([slot.numel for slot in slots], torch.int64),
        slot_kind=column([slot.kind for slot in slots], torch.int32),
        slot_group=column([slot.group for slot in slots], torch.int32),
        slot_start=column([slot.start for slot in slots], torch.int64),
        slot_identity=column([slot.identity for slot in slots], torch.int32),
        kinds=sum(1 << kind for kind in kinds),
        gradient_codes=sum(1 << code for code in {kind // 3 % 3 for kind in kinds}),
        partial=torch.empty(len(tile_slot), dtype=torch.float32, device=device),
        squares=torch.zeros(len(slots), dtype=torch.float64, device=device),
        scalars=torch.zeros(len(slots), 9, dtype=torch.float32, device=device),
        shared=torch.zeros(3, dtype=torch.float32, device=device),
    )


def _num_tiles(slot: Slot) -> int:
    if slot.kind == UNUSED:
        return 0
    return max(1, -(-slot.numel // TILE))  # an empty shard's step is counted, too


def tile_squares(tables: Tables, grads: Tensor) -> None:
    """Launches 1 and 2: fill `tables.squares`.

    Args:
        grads: [N] int64, addresses of the gradients.
    """
    num_tiles = len(tables.tile_slot)
    args: tuple[Any, ...] = (tables.tile_slot, tables.tile_offset, tables.slot_numel, tables.slot_kind, grads)
    if num_tiles:
        meta = {"GRADS": tables.gradient_codes, "BLOCK": BLOCK, "ITER": ITER}
        _launch(tables, _adamw_tile_squares_kernel, num_tiles, (*args, tables.partial), meta, num_warps=4)
    args = (tables.partial, tables.slot_first, tables.squares)
    _launch(tables, _adamw_slot_squares_kernel, len(tables.slots), args, {"BLOCK": 512}, num_warps=4)


def scalars(
    tables: Tables,
    hyper: Tensor,
    steps: Tensor,
    *,
    norm: Tensor | None = None,
    max_norm: float = float("inf"),
    pending: bool = False,
    divisor: float = 1.0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Launch 3: fill `tables.shared` and `tables.scalars`, for the step after `steps`.

    Args:
        hyper: [G, 8] fp64: lr, beta1, beta2, eps, weight decay, sign of the gradient, two unused.
        steps: [N] fp32, steps taken so far.
        norm: [] fp32, receives the global norm of `tables.squares`, divided by `divisor`; the clip factor
            comes from it. None: clip factor and skip are those of the last call if `pending`, else 1 and 0.
        max_norm: in the unit of `norm`.
        divisor: what the gradients are divided by.
        grad_scale: [1] or [], what the gradients were multiplied with; not part of `norm`.
        found_inf: [1] or [], not 0 to skip the step.
    """
    shared = tables.shared
    args = (
        tables.squares, shared if norm is None else norm, tables.slot_group, steps, hyper, tables.scalars,
        shared, shared if grad_scale is None else grad_scale, shared if found_inf is None else found_inf,
        float(max_norm), 1.0 / divisor, len(tables.slots),
    )  # fmt: skip
    meta = {
        "FROM_NORM": norm is not None,
        "PENDING": pending,
        "HAS_SCALE": grad_scale is not None,
        "HAS_INF": found_inf is not None,
        "BLOCK": 256,
    }
    _launch(tables, _adamw_scalars_kernel, 1, args, meta, num_warps=8)


def update(
    tables: Tables,
    pointers: Tensor,
    grads: Tensor,
    steps: Tensor,
    *,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """Launch 4: the update, in place, and `steps` plus one, unless `tables.shared` says to skip.

    Args:
        pointers: [4, N] int64, addresses of parameters, exp_avg, exp_avg_sq and fp32 master weights, each as
            flat as the gradients; 0 where there is none.
        grads: [N] int64, addresses of the gradients.
        steps: [N] fp32, written.
        stochastic_rounding: round bf16 parameters without master weights up or down at random, with the
            bits of `seed`, the step, the parameter and the element.
    """
    num_tiles = len(tables.tile_slot)
    args = (
        tables.tile_slot, tables.tile_offset, tables.slot_numel, tables.slot_kind, tables.slot_start,
        tables.slot_identity, pointers, grads, steps, tables.scalars, tables.shared, seed, len(tables.slots),
    )  # fmt: skip
    meta = {
        "KINDS": tables.kinds,
        "STOCHASTIC": stochastic_rounding,
        "EMULATED": INTERPRETED,
        "BLOCK": BLOCK,
        "ITER": ITER,
    }
    if num_tiles:
        _launch(tables, _adamw_update_kernel, num_tiles, args, meta, num_warps=4)


def _launch(
    tables: Tables, kernel: Any, programs: int, args: tuple[Any, ...], meta: dict[str, Any], num_warps: int
) -> None:
    """Launch by the compiled kernel, once there is one.

    Triton looks at every argument before each launch to find the kernel compiled for it, 25 us; here nothing
    that it depends on changes: the tables are ours and aligned, their numbers are not specialized on.

    Args:
        meta: the kernel's constexprs, all of them, in the order of its signature.
    """
    key = (kernel, *meta.values())
    compiled = tables.compiled.get(key)
    if compiled is None:
        tables.compiled[key] = kernel[(programs,)](*args, **meta, num_warps=num_warps)
    else:
        compiled[(programs, 1, 1)](*args, *meta.values())


def adamw_ref(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW update of one parameter in its own dtype, out of place.

    Args:
        step: number of this update, from 1.
        factor: what the gradient is multiplied with first: the clip factor.
    Returns: the new parameter, exp_avg and exp_avg_sq.
    Source: Loshchilov & Hutter 2019, arXiv:1711.05101; eps as in torch.optim.AdamW.
    """
    grad = grad * factor
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad * grad
    root = (exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps
    param = param * (1 - lr * weight_decay) - lr / (1 - betas[0] ** step) * exp_avg / root
    return param, exp_avg, exp_avg_sq
