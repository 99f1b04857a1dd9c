"""How a figure of results.json is written, in one place for the terminal, Markdown and the page. No cost.

A `Shown` keeps the value beside its text, so that whoever shows it can also say what it was before rounding.
Samples a second, milliseconds and GiB have one decimal from 10 on, two from 1 on and three significant digits
below, which is finer than the spread of any run so far (0.1 % at best).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = float | int | str
"""a number of the JSON; `nan`, `inf` and `-inf` are strings there"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One figure as a reader sees it."""

    text: str
    """rounded, with its unit where no heading has it"""
    value: Value
    """as in the JSON, in the JSON's unit"""
    derived: bool = False
    """computed from figures of the JSON, and not in it"""

    def __str__(self) -> str:
        return self.text


Sentence: TypeAlias = tuple["str | Shown", ...]
"""words and figures in order; `say` joins them"""


def say(sentence: Sentence) -> str:
    """The sentence as plain text."""
    return "".join(str(part) for part in sentence)


def plain(value: Value, *, scale: float = 1.0, derived: bool = False) -> Shown:
    """Samples a second, GiB, TFLOP: rounded as the module says.

    Args:
        value: as in the JSON.
        scale: what it is multiplied with to be shown, 1e3 for seconds in ms.
        derived: whether it is not in the JSON itself.
    """
    return Shown(text=_rounded(float(value) * scale), value=value, derived=derived)


def milliseconds(seconds: Value) -> Shown:
    """Seconds, shown in ms without the unit."""
    return plain(seconds, scale=1e3)


def percent(share: Value) -> Shown:
    """A share of 1, shown in %."""
    return Shown(text=f"{float(share) * 100:.1f} %", value=share)


def count(value: int) -> Shown:
    """A whole number."""
    return Shown(text=str(value), value=value)


def loss(value: Value) -> Shown:
    """A loss: five significant digits."""
    return Shown(text=f"{float(value):.5g}", value=value)


def relative(value: Value) -> Shown:
    """A relative difference: two significant digits."""
    return Shown(text=f"{float(value):.2g}", value=value)


def ratio(value: float, *, unit: str = "x", derived: bool = False) -> Shown:
    """How many times as fast: two decimals, and more where these would hide on which side of 1 it is."""
    digits = 2
    while digits < 5 and value != 1 and float(f"{value:.{digits}f}") == 1:
        digits += 1
    return Shown(text=f"{value:.{digits}f}{unit}", value=value, derived=derived)


def _rounded(value: float) -> str:
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = 1 if size >= 10 else 2 if size >= 1 else 2 - math.floor(math.log10(size))
    return f"{value:.{decimals}f}"
