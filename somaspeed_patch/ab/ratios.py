"""Medians and spreads of a figure, and the ratio of two arms with the interval it lies in.

Repeats are interleaved, so the i-th of one arm stands beside the i-th of the other and shares its weather.
The ratio is the geometric mean of the pairs' ratios, its interval Student's t over their logarithms, 95 %,
two sided: with two repeats it is honest and wide, with one there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z95 = 1.95996


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile with linear interpolation between values, as numpy's default."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, p20, p80 and the values themselves."""
    return {
        "median": statistics.median(values),
        "p20": quantile(values, 0.2),
        "p80": quantile(values, 0.8),
        "repeats": list(values),
    }


def t95(freedom: int) -> float:
    """Student's t that 95 % lie within, on both sides.

    Args:
        freedom: degrees of freedom, from 1; above 30 by the first term of its expansion, within 0.1 %.
    """
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return _Z95 + (_Z95**3 + _Z95) / (4 * freedom)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """How many times as fast `ours` is: ratio, low, high (None with one pair), ratio_by_repeat.

    Args:
        ours: samples a second by repeat, at least one.
        theirs: of the other arm, in the same order; what has no partner is left out.
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=False)]
    logs = [math.log(pair) for pair in pairs]
    middle, low, high = statistics.fmean(logs), None, None
    if len(logs) > 1:
        reach = t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(middle - reach), math.exp(middle + reach)
    return {"ratio": math.exp(middle), "low": low, "high": high, "ratio_by_repeat": pairs}


def within_noise(found: Mapping[str, Any]) -> bool:
    """Whether its interval has room for no difference at all."""
    low, high = found["low"], found["high"]
    return low is not None and high is not None and low <= 1 <= high
