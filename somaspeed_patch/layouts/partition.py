"""Which stage computes which block: successive blocks to each, the stages as equal as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def split(weights: Sequence[int], stages: int, what: str) -> list[int]:
    """The stage of each block, rising, each at least once; the stages' squared weights sum to the least.

    Of equal choices the one with the fewest blocks in front: the first stages wait least, and embed.

    Args:
        weights: of the blocks, in the order of their calls.
        stages: how many.
        what: the blocks' name, for the error.

    Raises: ValueError: there are more stages than blocks.
    Cost: len(weights)^2 * stages steps.
    """
    count = len(weights)
    if stages > count:
        raise ValueError(
            f"layout: pp={stages} stages, but {what} are {count} blocks and each stage needs one; "
            f"use pp <= {count}"
        )
    sums = [sum(weights[:end]) for end in range(count + 1)]

    @cache
    def best(start: int, left: int) -> tuple[int, int]:
        """The least sum of squares from `start` on with `left` stages, and where their first one ends."""
        if left == 1:
            return (sums[count] - sums[start]) ** 2, count
        ends = range(start + 1, count - left + 2)
        return min(((sums[end] - sums[start]) ** 2 + best(end, left - 1)[0], end) for end in ends)

    found: list[int] = []
    start = 0
    for stage in range(stages):
        end = best(start, stages - stage)[1]
        found += [stage] * (end - start)
        start = end
    return found
