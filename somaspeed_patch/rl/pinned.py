"""Page-locked host memory for what waits between rollout and learner: the GPU copies from it by itself.

Records come in the order of the rollouts and go when their iteration is over, so memory is handed out in
large blocks one behind the other, and a block is used again once nothing in it is alive: a ring whose length
is what the lag between rollout and learner needs. A record takes its bytes and no more; torch's own cache of
page-locked memory rounds up to powers of two, 32 MiB for 2 x 9.9 MiB.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from somaspeed_patch.rl.features import Record

BLOCK = 512 << 20  # bytes: 50 records of pi0.5; locking it takes 0.1 to 0.2 s
_ALIGNED = 256  # bytes, what any copy engine likes


@dataclass
class _Block:
    memory: Tensor
    used: int = 0
    alive: int = 0


class Ring:
    """Copies of records in page-locked blocks."""

    def __init__(self, *, block: int = BLOCK, limit: int | None = None, pin: bool = True) -> None:
        """Begin without memory.

        Args:
            block: bytes of a block, more for a larger record.
            limit: bytes in all; None: as much as the machine gives.
            pin: lock the pages; without a GPU there is nobody to lock them for.
        """
        self._block, self._limit, self._pin = block, limit, pin
        self._blocks: list[_Block] = []
        self._current: _Block | None = None
        self._lock = threading.RLock()  # a record can die while its thread is in here

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(len(block.memory) for block in self._blocks)

    def keep(self, record: Record) -> Record:
        """A copy of a record on any device; one on a GPU is being copied when this returns.

        Raises: MemoryError: it would take more than the limit.
        """
        with self._lock:
            block = self._with_room(record)
            copy = record.copied(lambda values: _placed(block, values))
            block.alive += 1
            weakref.finalize(copy, self._release, block)
        return copy

    def _with_room(self, record: Record) -> _Block:
        parts = (*record.tokens.values(), *record.fixed.values())
        size = sum(_rounded(each.nbytes) for each in parts)
        if self._current is None or self._current.used + size > len(self._current.memory):
            self._current = self._empty(size) or self._new(size)
        return self._current

    def _empty(self, size: int) -> _Block | None:
        free = (block for block in self._blocks if not block.alive and len(block.memory) >= size)
        if (found := next(free, None)) is not None:
            found.used = 0
        return found

    def _new(self, size: int) -> _Block:
        size = max(size, self._block)
        if self._limit is not None and self.bytes + size > self._limit:
            raise MemoryError(
                f"rl: features of {self.bytes / 2**30:.1f} GiB wait for the learner and the limit is "
                f"{self._limit / 2**30:.1f}; play fewer episodes an iteration, or use memory: recompute"
            )
        block = _Block(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin))
        self._blocks.append(block)
        return block

    def _release(self, block: _Block) -> None:
        with self._lock:
            block.alive -= 1


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _placed(block: _Block, values: Tensor) -> Tensor:
    """A copy of values in the block's next bytes."""
    begin = block.used
    block.used += _rounded(values.nbytes)
    flat = block.memory[begin : begin + values.nbytes].view(values.dtype)
    return flat.view(values.shape).copy_(values, non_blocking=True)
