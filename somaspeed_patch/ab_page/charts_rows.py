"""A chart of rows, one a cell: its label, its bar or the words in place of one, its figure at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from somaspeed_patch.ab.figures import Shown, say
from somaspeed_patch.ab.words import batch_words, blocked
from somaspeed_patch.ab_page.charts import (
    MUTED,
    NATIVE,
    NATIVE_LINE,
    OURS,
    Key,
    Sheet,
    fitted,
    legend,
    numbers_axis,
    sheet,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = Mapping[str, Any]
THICK = 18  # px of a bar
_AXIS = 48  # px below the rows: tick labels and what they count

NATIVE_STYLE: dict[str, Any] = {
    "facecolor": NATIVE,
    "edgecolor": NATIVE_LINE,
    "hatch": "////",
    "linewidth": 1.0,
}
OURS_STYLE: dict[str, Any] = {"facecolor": OURS, "edgecolor": OURS, "linewidth": 1.0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row before it is drawn."""

    name: str
    """cut where it does not fit"""
    suffix: str
    """never cut"""
    words: str
    """in place of a bar; empty where there is one"""
    end: Shown | str
    """the figure at the right"""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A sheet with its rows laid out."""

    sheet: Sheet
    """all of it"""
    axes: Axes
    """bars: x in the chart's unit, y in px from the top of the first row"""
    middles: Sequence[float]
    """y of each bar's middle"""
    scale: float
    """px of one unit of x"""


def cell_row(cell: Cell, end: Shown | str) -> Row:
    """The row of a cell."""
    batch = say(batch_words(cell["batch"])) if cell["batch"] is not None else ""
    suffix = f", {batch}" if batch else ""
    words = blocked(cell)
    return Row(name=cell["arm"], suffix=suffix, words=words, end="" if words else end)


def style(cell: Cell) -> dict[str, Any]:
    """Native arms are hatched and grey, ours plain and blue."""
    return NATIVE_STYLE if cell["native"] else OURS_STYLE


def lay_out(
    rows: Sequence[Row], width: int, *, limit: float, unit: str, keys: Sequence[Key], end_width: int = 64
) -> Rows:
    """Labels, words, ends and an axis from 0 to `limit`; the bars are the caller's.

    Args:
        rows: from the top.
        width: px.
        limit: the largest x.
        unit: what x counts.
        keys: the legend.
        end_width: px kept for the figures at the right.
    """
    narrow = width < 500
    label, pitch, middle = (0, 52, 33) if narrow else (_label_width(rows), 32, 16)
    top = legend(sheet(width, 100), keys, draw=False) + 6
    body = pitch * len(rows)
    on = sheet(width, top + body + _AXIS)
    legend(on, keys)
    bars = width - label - end_width
    axes = on.axes(label, top, bars, body + 4)
    axes.set_ylim(body + 4, 0)
    axes.set_yticks([])
    numbers_axis(axes, limit, ticks=4 if narrow else 6)
    on.text(label, top + body + 38, unit, color=MUTED, fontsize=12)
    for index, row in enumerate(rows):
        _write(on, row, top + pitch * index, label, middle)
    middles = [pitch * index + middle for index in range(len(rows))]
    return Rows(sheet=on, axes=axes, middles=middles, scale=bars / limit)


def _label_width(rows: Sequence[Row]) -> int:
    """What the longest label needs, up to 300 px: a bar keeps half of the drawing."""
    longest = max((text_width(row.name + row.suffix) for row in rows), default=0.0)
    return int(min(max(longest + 20, 120), 300))


def _write(on: Sheet, row: Row, top: float, label: int, middle: int) -> None:
    """The label before or above the bar, the words in its place, the figure behind it."""
    room = on.width if on.narrow else label - 12
    on.text(0, top + (12 if on.narrow else middle), fitted(row.name, room, end=row.suffix))
    if row.end:
        on.text(on.width, top + middle, row.end, ha="right", weight="bold")
    if not row.words:
        return
    lines = wrapped(row.words, on.width - label - 8, 2)
    for index, line in enumerate(lines):
        above = 0.25 if on.narrow else (len(lines) - 1) / 2  # a narrow row has its label above
        y = top + middle + (index - above) * 15
        on.text(label + 4, y, line, color=MUTED, style="italic", fontsize=12)
