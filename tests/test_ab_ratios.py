"""Spreads, ratios and their intervals, and the search for a batch, on hand-made numbers."""

import math
import random

import pytest

from somaspeed_patch.ab import find_batch, ratios


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([3.0], 0.2, 3.0),
        ([1.0, 2.0], 0.2, 1.2),
        ([4, 1, 3, 2, 5, 6], 0.8, 5.0),
        ([0, 10], 0.5, 5.0),
        ([1, 2, 3], 1.0, 3),
    ],
)
def test_quantile(values, q, expected):
    assert ratios.quantile(values, q) == pytest.approx(expected)


def test_spread():
    assert ratios.spread([10.0, 30.0, 20.0]) == {
        "median": 20.0,
        "p20": pytest.approx(14),
        "p80": pytest.approx(26),
        "repeats": [10.0, 30.0, 20.0],
    }


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (4, 2.7764), (30, 2.0423), (60, 2.0003)])
def test_students_t(freedom, expected):
    assert ratios.t95(freedom) == pytest.approx(expected, rel=1e-3)


def test_a_ratio_and_its_interval_by_hand():
    found = ratios.ratio([2.0, 2.2, 1.8], [1.0, 1.0, 1.0])
    logs = [math.log(value) for value in (2.0, 2.2, 1.8)]
    middle = sum(logs) / 3
    reach = 4.303 * math.sqrt(sum((log - middle) ** 2 for log in logs) / 2) / math.sqrt(3)
    assert found["ratio"] == pytest.approx(math.exp(middle))
    assert (found["low"], found["high"]) == pytest.approx(
        (math.exp(middle - reach), math.exp(middle + reach))
    )
    assert found["ratio_by_repeat"] == [2.0, 2.2, 1.8]


def test_one_repeat_has_no_interval():
    found = ratios.ratio([3.0, 4.0], [2.0])
    assert (found["ratio"], found["low"], found["high"]) == (pytest.approx(1.5), None, None)
    assert not ratios.within_noise(found)


def test_a_common_drift_cancels_out():
    """Both arms slow down together, repeat by repeat: the pairs agree, so the interval is narrow."""
    drift = [1.0, 0.8, 0.6]
    found = ratios.ratio([3 * speed for speed in drift], [2 * speed for speed in drift])
    assert found["low"] == pytest.approx(1.5) and found["high"] == pytest.approx(1.5)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_an_arm_against_itself_lies_within_its_interval(repeats):
    """1,000 A/A runs with 3 % noise: the interval has 1.00 in 95 % of them, to within three sigmas."""
    rng = random.Random(repeats)

    def speeds():
        return [100 * math.exp(rng.gauss(0, 0.03)) for _ in range(repeats)]

    inside = sum(ratios.within_noise(ratios.ratio(speeds(), speeds())) for _ in range(1000))
    assert 929 <= inside <= 971


@pytest.mark.parametrize("limit", [1, 3, 8, 13, 40, 100, 320, 1000, 4096, 9999])
def test_the_largest_batch_is_found_within_an_eighth(limit):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= limit

    found = find_batch.largest(fits, 1)
    assert found <= limit and len(set(tried)) == len(tried) <= 18
    assert found > limit / 1.3 - 1 or found == find_batch.MOST
    assert found % 8 == 0 or found <= 16


def test_a_batch_that_never_fits_is_none():
    assert find_batch.largest(lambda batch: False, 4) is None
    assert find_batch.largest(lambda batch: True, 8, most=4) is None


def test_the_upper_bound_is_kept():
    assert find_batch.largest(lambda batch: True, 3, most=50) == 50
