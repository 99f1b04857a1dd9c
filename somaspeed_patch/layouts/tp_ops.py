"""What a rank computes for its own heads where torch's parallel linears do not fit.

`part` is a rank's place and how many ranks there are. Shapes: B samples, N tokens, H heads, D a head's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank among those that share the heads."""

    group: ProcessGroup
    index: int
    """from 0"""
    size: int
    """how many ranks"""

    def of(self, width: int) -> slice:
        """Its part of `width` things."""
        each = width // self.size
        return slice(self.index * each, (self.index + 1) * each)


class _Summed(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Own(torch.autograd.Function):
    """A part of one dimension, of something that every rank has whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, place: Place) -> Tensor:
        ctx.dim, ctx.place = dim, place
        mine = place.of(tensor.shape[dim])
        return tensor.narrow(dim, mine.start, mine.stop - mine.start)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        mine = upstream.contiguous()
        parts = [torch.empty_like(mine) for _ in range(ctx.place.size)]
        dist.all_gather(parts, mine, group=ctx.place.group)
        return torch.cat(parts, ctx.dim), None, None


def summed(tensor: Tensor, place: Place) -> Tensor:
    """The tensor itself, the same on every rank; its gradient is the sum of what the ranks' heads ask for."""
    return cast(Tensor, _Summed.apply(tensor, place.group))  # type: ignore[no-untyped-call]


def own(tensor: Tensor, dim: int, place: Place) -> Tensor:
    """The rank's part of `dim` of a tensor that is the same on every rank; the gradient is whole again."""
    return cast(Tensor, _Own.apply(tensor, dim, place))  # type: ignore[no-untyped-call]


def fused_rows(module: nn.Linear, place: Place, x: Tensor) -> Tensor:
    """q, k and v of the rank's own heads: x [B, N, W] -> [B, N, 3 * H / ranks * D].

    The weight [3 * H * D, W] stays whole: FSDP2 over it shards rows in order, which the rows of one rank's
    heads are not. So its gradient is gathered instead, once a step.
    """
    outputs, inputs = module.weight.shape
    weight = own(module.weight.view(3, -1, inputs), 1, place).reshape(outputs // place.size, inputs)
    bias = None if module.bias is None else own(module.bias.view(3, -1), 1, place).flatten()
    return F.linear(summed(x, place), weight, bias)


def part_of_dropout(module: nn.Dropout, place: Place, x: Tensor) -> Tensor:
    """Dropout of the rank's part x [..., width / ranks], with the random numbers of the whole width."""
    if not module.training or module.p == 0:
        return x
    width = x.shape[-1] * place.size
    drawn = F.dropout(x.new_ones((*x.shape[:-1], width)), module.p)[..., place.of(width)]
    scale = 1 / (1 - module.p) if module.p < 1 else 0.0
    return torch.where(drawn != 0, x * scale, 0.0)
