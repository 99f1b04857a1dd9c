"""What the host knew on the CPU about a mask, carried along on the tensor so that no device sync is needed.

LeRobot tokenises on the CPU and then moves the mask to the GPU. How long the longest prompt is decides how
many language slots the prefix computes; reading that back from the GPU would be a sync that the native step
does not have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from somaspeed_patch import facts

_FACT = "valid"


class Valid(NamedTuple):
    """Which entries of a boolean mask are True, as far as the host knows."""

    longest: int
    """Most True entries in a row."""
    leading: bool
    """Every row is True up to its count and False after it."""
    every: bool
    """All entries are True."""


def of(mask: Tensor) -> Valid | None:
    """The hint a mask carries; computed where that costs no sync (CPU); None where only the device knows."""
    hint: Valid | None = facts.get(mask, _FACT)
    if hint is None and mask.device.type == "cpu":
        return measure(mask)
    return hint


def measure(mask: Tensor) -> Valid:
    """The hint for `mask` [B] or [B, L], read from its values."""
    rows = mask.bool().reshape(mask.shape[0], -1)
    counts = rows.sum(1)
    longest = int(counts.max()) if counts.numel() else 0
    leading = bool((counts == rows.cumprod(1).sum(1)).all())
    return Valid(longest, leading, bool(rows.all()))


def attach(mask: Tensor, hint: Valid | None) -> None:
    """Put a hint on a mask."""
    if hint is not None:
        facts.attach(mask, _FACT, hint)


class _Recorder(threading.local):
    masks: list[Tensor] | None = None


_recorder = _Recorder()


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Collects the CPU attention masks that the tokenizer returns meanwhile, in this thread."""
    before, _recorder.masks = _recorder.masks, []
    try:
        yield _recorder.masks
    finally:
        _recorder.masks = before


def record(mask: Any) -> None:
    """Remember a mask the tokenizer returned, if somebody is recording."""
    if _recorder.masks is not None and isinstance(mask, Tensor):
        _recorder.masks.append(mask)
