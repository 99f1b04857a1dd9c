"""Lengths of sets of intervals on a line; O(n log n) in the number of intervals.

An interval is (start, end) with start <= end, in any unit; intervals of a set may overlap, touch or be empty.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; those that touch become one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def union_length(intervals: Iterable[Interval]) -> float:
    """Length of what at least one interval covers."""
    return sum(end - start for start, end in merged(intervals))


def length_without(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Length of what `intervals` cover and `others` do not."""
    taken = list(others)
    return union_length([*intervals, *taken]) - union_length(taken)
