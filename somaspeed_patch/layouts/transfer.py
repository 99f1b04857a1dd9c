"""Hidden states between the ranks of a pipeline, and their gradients back.

Shape: what a rank has before it receives is as large as what it gets, for blocks keep their input's shape.
The dtype, and whether anybody needs a gradient, the ranks tell each other at a link's first use in each mode.
Cost: at a cut one message of the hidden state's size each way; behind a stack a broadcast, and in the
backward a sum where stages after the last block's have parts of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Agreement = tuple[tuple[torch.dtype, bool], ...]
"""of each tensor: its dtype, and whether a gradient comes back"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The ranks of a pipeline that work on the same samples, one a stage."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    """global, by stage"""
    stage: int
    """this rank's"""
    device: torch.device

    @property
    def last(self) -> bool:
        """Whether this rank's loss counts."""
        return self.stage == len(self.ranks) - 1


class Link:
    """One place where hidden states go over: from `source` to the stage behind it, or to all ranks."""

    def __init__(self, line: Line, source: int, *, to_all: bool) -> None:
        self.line, self.source, self.to_all = line, source, to_all
        self._agreed: dict[tuple[bool, int], Agreement] = {}

    def over(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the source has, on the ranks it goes to; the others' own, which nobody reads."""
        agreed = self._agree(tensors)
        if not any(needs for _, needs in agreed):
            return tuple(self.forth(x, dtype) for x, (dtype, _) in zip(tensors, agreed, strict=True))
        needing = [
            x.detach().requires_grad_() if needs and not x.requires_grad else x
            for x, (_, needs) in zip(tensors, agreed, strict=True)
        ]
        return _over(self, agreed, *needing)

    def _agree(self, tensors: tuple[Tensor, ...]) -> Agreement:
        key = torch.is_grad_enabled(), len(tensors)
        if key not in self._agreed:
            self._agreed[key] = self._ask(tensors)
        return self._agreed[key]

    def _ask(self, tensors: tuple[Tensor, ...]) -> Agreement:
        mine = [(tuple(x.shape), x.dtype, x.requires_grad and torch.is_grad_enabled()) for x in tensors]
        told: list[Any] = [None] * len(self.line.ranks)
        dist.all_gather_object(told, mine, group=self.line.group)
        for stage, theirs in enumerate(told):
            shapes = [entry[0] for entry in theirs], [entry[0] for entry in mine]
            if shapes[0] != shapes[1]:
                raise RuntimeError(
                    f"layout: stage {stage} of the pipeline has hidden states {shapes[0]}, stage "
                    f"{self.line.stage} {shapes[1]}: the stages do not work on the same samples"
                )
        return tuple(
            (told[self.source][place][1], any(theirs[place][2] for theirs in told))
            for place in range(len(mine))
        )

    def forth(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The forward's way of one tensor."""
        line, mine = self.line, self.line.stage == self.source
        if self.to_all:
            sent = x.detach().contiguous() if mine else torch.empty_like(x, dtype=dtype).contiguous()
            dist.broadcast(sent, src=line.ranks[self.source], group=line.group)
            return x.view_as(x) if mine else sent
        if mine:
            dist.send(x.detach().contiguous(), line.ranks[self.source + 1], line.group)
        elif line.stage == self.source + 1:
            return self._received(x, dtype, self.source)
        return x.view_as(x)

    def back(self, upstream: Tensor) -> Tensor:
        """The backward's way: this rank's part of the gradient -> that of its input."""
        line, mine = self.line, self.line.stage == self.source
        if self.to_all:
            return self._summed(upstream) if mine else self._given(upstream)
        if mine:
            return self._received(upstream, upstream.dtype, self.source + 1)
        if line.stage == self.source + 1:
            dist.send(upstream.contiguous(), line.ranks[self.source], line.group)
            return torch.zeros_like(upstream)
        return upstream

    def _summed(self, upstream: Tensor) -> Tensor:
        if self._alone:
            return upstream
        total = upstream.clone(memory_format=torch.contiguous_format)
        dist.reduce(total, self.line.ranks[self.source], group=self.line.group)
        return total

    def _given(self, upstream: Tensor) -> Tensor:
        if not self._alone:
            part = upstream.clone(memory_format=torch.contiguous_format)
            dist.reduce(part, self.line.ranks[self.source], group=self.line.group)
        return torch.zeros_like(upstream)

    @property
    def _alone(self) -> bool:
        """Whether the other ranks' parts are zero: they have no block behind it, and their loss is quiet."""
        return self.source == len(self.line.ranks) - 1

    def _received(self, like: Tensor, dtype: torch.dtype, stage: int) -> Tensor:
        received = torch.empty(like.shape, dtype=dtype, device=like.device)
        dist.recv(received, self.line.ranks[stage], self.line.group)
        return received


class _Over(torch.autograd.Function):
    """`Link.over` with gradients."""

    @staticmethod
    def forward(ctx: Any, link: Link, agreed: Agreement, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.agreed, ctx.dtypes = link, agreed, [x.dtype for x in tensors]
        found = tuple(link.forth(x, dtype) for x, (dtype, _) in zip(tensors, agreed, strict=True))
        ctx.mark_non_differentiable(*(x for x, (_, needs) in zip(found, agreed, strict=True) if not needs))
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            ctx.link.back(gradient).to(dtype) if needs else None
            for gradient, (_, needs), dtype in zip(upstream, ctx.agreed, ctx.dtypes, strict=True)
        ]
        return None, None, *found


class _Quiet(torch.autograd.Function):
    """A loss whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return torch.zeros_like(upstream)


class _Tied(torch.autograd.Function):
    """A tensor whose backward comes before another's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, other: Tensor) -> Tensor:
        ctx.like = other.new_empty(()).expand(other.shape)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream, torch.zeros_like(ctx.like)


_over: Callable[..., tuple[Tensor, ...]] = _Over.apply
quiet: Callable[[Tensor], Tensor] = _Quiet.apply
"""The loss of a rank whose loss does not count: all its gradients are zeros."""
tied: Callable[[Tensor, Tensor], Tensor] = _Tied.apply
"""The first tensor; the gradient of the second waits for its."""
