"""Find the largest batch that an arm fits: double until it does not, then halve the gap."""

from __future__ import annotations

from collections.abc import Callable

MOST = 4096  # where `find_batch: true` stops
_GAP = 0.125  # ends when the next batch to try is within this part of the largest that fits


def largest(fits: Callable[[int], bool], start: int, most: int = MOST) -> int | None:
    """The largest batch found for which `fits` is true, None when not even `start` does.

    Args:
        fits: tries a batch; called once for each.
        start: the first batch to try.
        most: never above it.
    Returns: a multiple of 8 where it is above 16, as kernels like it, unless it is `start` or `most`.
    """
    if start > most or not fits(start):
        return None
    good, bad = start, most + 1
    while good < most and bad > most:
        tried = min(2 * good, most)
        if fits(tried):
            good = tried
        else:
            bad = tried
    return _between(fits, good, bad)


def _between(fits: Callable[[int], bool], good: int, bad: int) -> int:
    """Halve the gap between a batch that fits and one that does not."""
    while True:
        tried = _round((good + bad) // 2)
        if tried - good <= _GAP * good or tried >= bad:
            return good
        if fits(tried):
            good = tried
        else:
            bad = tried


def _round(batch: int) -> int:
    return batch // 8 * 8 if batch > 16 else batch
