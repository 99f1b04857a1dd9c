"""Lengths of unions and differences of intervals, against numbers worked out by hand."""

import pytest

from somaspeed_patch.ab.intervals import length_without, merged, union_length


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(1, 4)], [(1, 4)]),
        ([(5, 6), (1, 2)], [(1, 2), (5, 6)]),
        ([(1, 3), (2, 5)], [(1, 5)]),
        ([(1, 3), (3, 5)], [(1, 5)]),
        ([(1, 9), (2, 3), (4, 5)], [(1, 9)]),
        ([(1, 9), (2, 3), (8, 11)], [(1, 11)]),
        ([(2, 3), (2, 3), (2, 7)], [(2, 7)]),
    ],
    ids=["none", "one", "apart", "overlap", "touch", "inside", "inside, then over the end", "same start"],
)
def test_merged(intervals, expected):
    assert merged(intervals) == expected
    assert merged(iter(intervals)) == expected


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(3, 3)], 0),
        ([(3, 3), (1, 5)], 4),
        ([(0, 2), (1, 3), (10, 14)], 7),
        ([(0, 2), (2, 3)], 3),
        ([(-4, -1), (-2, 0)], 4),
        ([(0.5, 0.75), (0.625, 1.0)], 0.5),
    ],
)
def test_union_length(intervals, length):
    assert union_length(intervals) == length


@pytest.mark.parametrize(
    ("intervals", "others", "length"),
    [
        ([(0, 4)], [], 4),
        ([], [(0, 4)], 0),
        ([(0, 4)], [(4, 6)], 4),
        ([(0, 4)], [(3, 6)], 3),
        ([(0, 4)], [(-1, 9)], 0),
        ([(0, 4)], [(0, 4)], 0),
        ([(0, 10)], [(1, 2), (4, 6)], 7),
        ([(0, 4), (2, 6)], [(3, 5)], 4),
        ([(0, 2), (8, 9)], [(1, 8.5)], 1.5),
    ],
    ids=["no others", "nothing", "touch", "end", "covered", "equal", "holes", "own overlap", "two ends"],
)
def test_length_without(intervals, others, length):
    assert length_without(intervals, others) == length
    assert length_without(iter(intervals), iter(others)) == length
