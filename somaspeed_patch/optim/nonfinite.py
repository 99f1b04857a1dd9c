"""A gradient norm of inf or NaN: noticed by every rank alike, and named."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


def flag(squares: Tensor, group: ProcessGroup | None) -> Tensor:
    """[1] fp32, 1 if any squared norm on any rank of `group` is not finite; no host synchronization."""
    found = (~torch.isfinite(squares).all()).to(torch.float32).reshape(1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    return found


def first(squares: Tensor, index: list[int]) -> int | None:
    """The slot whose squared norm is not finite, the first in the optimizer's order; synchronizes."""
    bad = torch.nonzero(~torch.isfinite(squares.cpu())).flatten().tolist()
    return min(bad, key=lambda slot: index[slot], default=None)


class SkippedSteps:
    """Counts the steps that were skipped and says so, without ever waiting for the device."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[tuple[Tensor, Tensor, torch.cuda.Event | None, Callable[[Tensor], str]]] = []

    def note(self, found: Tensor, squares: Tensor, name: Callable[[Tensor], str]) -> None:
        """Remember a step's flag and squared norms; `name` turns the latter into the parameter's name."""
        event = None
        if found.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copies = [_copy(found), _copy(squares)]
        if event is not None:
            event.record()
        self._waiting.append((copies[0], copies[1], event, name))

    def poll(self, wait: bool = False) -> None:
        """Report what has arrived on the host; `wait` for all of it."""
        while self._waiting:
            found, squares, event, name = self._waiting[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait:
                    return
                event.synchronize()
            self._waiting.pop(0)
            if found.item():
                self.count += 1
                log.warning("FusedAdamW: step skipped, non-finite gradient, first in %s", name(squares))


def _copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
