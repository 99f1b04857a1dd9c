"""GR00T's CategorySpecificLinear: a weight a category (embodiment), without a copy of it for every sample.

The host multiplies each sample with its own `W[cat_ids]`, which it keeps for the backward: over the head's
seven layers 10.2 million elements a sample, 13 GB in bf16 at batch 640, and as much again for the gradient.
Here samples of one category share one matmul. Which samples those are is known on the CPU, from where the
batch came; where only the device knows, the host runs, because asking it would wait for all its work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from somaspeed_patch import constants, facts, features, frozen, guarded, sites
from somaspeed_patch.guarded import Declined

_FACT = "samples by category"  # of cat_ids: one batch's seven layers share them


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A batch's samples by category; tensors are on the CPU."""

    groups: tuple[tuple[int, slice], ...]
    """the categories that occur, rising, each with its samples once these are sorted"""
    order: Tensor | None
    """[B] int64, the samples sorted by category; None where they come sorted"""
    back: Tensor | None
    """[B] int64, the inverse of `order`"""


def forward(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CategorySpecificLinear.forward(x [B, T, I], cat_ids [B]), of W [C, I, O] and b [C, O]: [B, T, O]."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    site = sites.site("groot/category_linear")
    off = None if features.value("category_linear") else "category_linear is off"
    why = off or guarded.why_not(module, site.site)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    return guarded.or_hosts(site, module, partial(_linear, module), wrapped, args, kwargs)


def grouping(cat_ids: Tensor) -> Grouping:
    """The samples of each category.

    Args:
        cat_ids: [B] int64 or int32, on the CPU or with a twin there.
    """
    known: Grouping | None = facts.get(cat_ids, _FACT)
    if known is not None:
        return known
    found = _grouping(facts.on_cpu(cat_ids).tolist())
    if not cat_ids.is_inference():  # writes into one are not counted, so its groups could not be told old
        facts.attach(cat_ids, _FACT, found)
    return found


def _grouping(categories: list[int]) -> Grouping:
    order = sorted(range(len(categories)), key=categories.__getitem__)
    groups, first = [], 0
    for category, samples in groupby(order, key=categories.__getitem__):
        last = first + sum(1 for _ in samples)
        groups.append((category, slice(first, last)))
        first = last
    if order == list(range(len(order))):
        return Grouping(groups=tuple(groups), order=None, back=None)
    sorted_samples = torch.tensor(order)
    return Grouping(groups=tuple(groups), order=sorted_samples, back=sorted_samples.argsort())


def _linear(module: Any, x: Tensor, cat_ids: Tensor) -> Tensor:
    _check(module, x, cat_ids)
    weight, bias = module.W, module.b
    found = grouping(cat_ids)
    if found.groups[0][0] < 0 or found.groups[-1][0] >= weight.shape[0]:
        raise Declined(f"a category is not one of 0 to {weight.shape[0] - 1}")
    dtype = _dtype(x, weight)
    if len(found.groups) > 1 or dtype != weight.dtype:
        return _grouped(x.to(dtype), weight, bias, found)
    category = found.groups[0][0]
    product: Tensor = x.flatten(0, 1).mm(weight[category]) + bias[category]
    return product.view(*x.shape[:2], weight.shape[2])


def _check(module: Any, x: Tensor, cat_ids: Tensor) -> None:
    """Raises: Declined: what only the host can serve, or refuse in its own words."""
    if type(module.W) is not nn.Parameter or type(module.b) is not nn.Parameter:
        raise Declined(f"the weight is a {type(module.W).__name__}, not a plain parameter")
    if cat_ids.dtype not in (torch.int64, torch.int32) or cat_ids.dim() != 1 or cat_ids.shape[0] == 0:
        raise Declined(f"the embodiments are {cat_ids.dtype} {list(cat_ids.shape)}, not integers [B]")
    if x.dim() != 3 or x.shape[0] != cat_ids.shape[0] or x.shape[2] != module.W.shape[1]:
        raise Declined(f"the input {list(x.shape)} does not fit {len(cat_ids)} embodiments")
    if not facts.has_twin(cat_ids):
        raise Declined("the embodiments are only on the device")


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What the host's bmm computes in: autocast's dtype, except that autocast leaves fp64 alone."""
    dtype = frozen.autocast_dtype(x.device)
    if dtype is not None and torch.float64 not in (x.dtype, weight.dtype):
        return dtype
    if x.dtype != weight.dtype:
        raise Declined(f"the input is {x.dtype}, the weight {weight.dtype}")
    return x.dtype


class _Grouped(torch.autograd.Function):
    """x [B, T, I] in the matmul's dtype, samples of several categories: one matmul a category.

    Autograd's own way through `W[category]` would fill a whole zeroed W for each category. Weights are cast
    here, piece by piece, so that a category that does not occur costs no cast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, found: Grouping) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.found, ctx.bias_dtype = found, bias.dtype
        rows = _taken(x, found.order)
        dtype = torch.promote_types(x.dtype, bias.dtype)  # the host adds an fp32 bias to autocast's bf16
        result = x.new_empty(*x.shape[:2], weight.shape[2], dtype=dtype)
        for category, samples in found.groups:
            product = rows[samples].flatten(0, 1) @ weight[category].to(x.dtype)
            torch.add(product, bias[category], out=result[samples].flatten(0, 1))
        return _taken(result, found.back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        rows, upstream = _taken(x, ctx.found.order), _taken(upstream, ctx.found.order)
        dx = x.new_empty(x.shape) if need_x else None
        dw = torch.zeros_like(weight) if need_weight else None
        db = weight.new_zeros(weight.shape[0], weight.shape[2], dtype=ctx.bias_dtype) if need_bias else None
        for category, samples in ctx.found.groups:
            dy = upstream[samples].flatten(0, 1)
            product = dy.to(x.dtype)
            if dx is not None:
                torch.mm(product, weight[category].to(x.dtype).t(), out=dx[samples].flatten(0, 1))
            if dw is not None:
                dw[category] = _product(rows[samples].flatten(0, 1).t(), product, dw.dtype)
            if db is not None:
                db[category] = dy.sum(0)
        return None if dx is None else _taken(dx, ctx.found.back), dw, db, None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product in another dtype than its factors', not rounded to theirs before.

    The host rounds every sample's gradient under autocast and adds them up in fp32. One rounding of their sum
    to bf16 would be sqrt(B) times as far off where samples agree.
    """
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


_grouped: Callable[[Tensor, Tensor, Tensor, Grouping], Tensor] = _Grouped.apply


def _taken(samples: Tensor, order: Tensor | None) -> Tensor:
    return samples if order is None else samples.index_select(0, constants.on(samples.device, order))
