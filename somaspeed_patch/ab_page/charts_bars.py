"""Samples a second by cell: a bar for the median, a line from p20 to p80, a dot for each repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.figures import say
from somaspeed_patch.ab.words import batch_words, blocked
from somaspeed_patch.ab_page.charts import PAGE, TEXT, Chart, Key, Sheet, both, marked
from somaspeed_patch.ab_page.charts_rows import (
    NATIVE_STYLE,
    OURS_STYLE,
    THICK,
    Cell,
    Rows,
    cell_row,
    lay_out,
    style,
)

_DOT: dict[str, Any] = {
    "marker": "o",
    "markersize": 4.5,
    "markerfacecolor": PAGE,
    "markeredgecolor": TEXT,
    "markeredgewidth": 1.2,
}
_LINE: dict[str, Any] = {"linestyle": "-", "color": TEXT, "linewidth": 1.5}
_WHISKER: dict[str, Any] = {**_LINE, "marker": "|", "markersize": 13, "markeredgewidth": 1.5}
_SAMPLE = {**_LINE, "marker": "|", "markersize": 10, "markeredgewidth": 1.5}
_KEYS = (
    Key(words="native", style=NATIVE_STYLE),
    Key(words="somaspeed", style=OURS_STYLE),
    Key(words="one repeat", style={"linestyle": "none", **_DOT}),
    Key(words="p20 to p80", style=_SAMPLE),
)


def speed_bars(cells: Sequence[Cell], prefix: str) -> Chart:
    """The chart of every cell, failed and withheld ones in words."""
    return both(
        lambda width: _draw(cells, width),
        prefix=prefix,
        title="Samples a second by arm and batch",
        description="; ".join(described(cell) for cell in cells) + ".",
    )


def described(cell: Cell) -> str:
    """The row in words."""
    name = f"{cell['arm']}, {say(batch_words(cell['batch']))}"
    if blocked(cell):
        return f"{name}: {blocked(cell)}"
    speed = cell["samples_per_second"]
    median, low, high = (figures.plain(speed[key]) for key in ("median", "p20", "p80"))
    return f"{name}: {median} samples/s, p20 {low}, p80 {high}"


def _draw(cells: Sequence[Cell], width: int) -> Sheet:
    shown = [cell["samples_per_second"] for cell in cells if not blocked(cell)]
    highest = max((max(speed["median"], *speed["repeats"]) for speed in shown), default=1.0)
    rows = [
        cell_row(cell, "" if blocked(cell) else figures.plain(cell["samples_per_second"]["median"]))
        for cell in cells
    ]
    laid = lay_out(rows, width, limit=highest * 1.04, unit="samples/s", keys=_KEYS)
    for cell, y in zip(cells, laid.middles, strict=True):
        if not blocked(cell):
            _bar(laid, cell, y)
    return laid.sheet


def _bar(laid: Rows, cell: Cell, y: float) -> None:
    speed: Mapping[str, Any] = cell["samples_per_second"]
    axes = laid.axes
    axes.barh(y, speed["median"], THICK, gid=marked(speed["median"]), clip_on=False, **style(cell))
    axes.plot([speed["p20"], speed["p80"]], [y, y], clip_on=False, **_WHISKER)
    for repeat in speed["repeats"]:
        axes.plot([repeat], [y], linestyle="none", gid=marked(repeat), clip_on=False, **_DOT)
