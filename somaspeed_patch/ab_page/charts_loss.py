"""Loss by update, the arms over each other: the baseline broad and pale, the others thin and marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.figures import say
from somaspeed_patch.ab.words import batch_words
from somaspeed_patch.ab_page.charts import (
    MUTED,
    NATIVE_LINE,
    RULE,
    SERIES,
    Chart,
    Key,
    Sheet,
    both,
    finite,
    fitted,
    legend,
    sheet,
)
from somaspeed_patch.ab_page.charts_rows import Cell

_DASHES = ("-", (0, (5, 3)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)), (0, (3, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_COLOURS = (SERIES[5], SERIES[3], SERIES[4], SERIES[1], SERIES[0])


def loss_curves(cells: Sequence[Cell], baseline: str, prefix: str) -> Chart:
    """The chart.

    Args:
        cells: those with losses; the baseline's is drawn below the others.
        baseline: its name.
        prefix: of the ids.
    """
    ordered = sorted(cells, key=lambda cell: cell["arm"] != baseline)
    return both(
        lambda width: _draw(ordered, baseline, width),
        prefix=prefix,
        title="Loss by update",
        description="; ".join(_described(cell) for cell in ordered) + ".",
    )


def _described(cell: Cell) -> str:
    (first, before), (last, after) = cell["loss"][0], cell["loss"][-1]
    ends = f"{figures.loss(before)} at update {first}, {figures.loss(after)} at update {last}"
    return f"{named(cell)}: loss {ends}"


def named(cell: Cell) -> str:
    """Arm, and batch where there is one."""
    return str(cell["arm"]) + (f", {say(batch_words(cell['batch']))}" if cell["batch"] is not None else "")


def _style(index: int) -> dict[str, Any]:
    """Of the index-th line; the first is the baseline's."""
    if index == 0:
        return {"linestyle": "-", "color": NATIVE_LINE, "linewidth": 7.0, "alpha": 0.4}
    color, marker = _COLOURS[(index - 1) % 5], _MARKERS[(index - 1) % 6]
    dash: Any = _DASHES[(index - 1) % 5]
    line = {"linestyle": dash, "color": color, "linewidth": 1.8}
    return {**line, "marker": marker, "markersize": 5, "markerfacecolor": color, "markeredgecolor": color}


def _draw(cells: Sequence[Cell], baseline: str, width: int) -> Sheet:
    styles = [_style(index + (cells[0]["arm"] != baseline)) for index in range(len(cells))]
    keys = [
        Key(words=fitted(named(cell), width - 40), style=style)
        for cell, style in zip(cells, styles, strict=True)
    ]
    top = legend(sheet(width, 100), keys, draw=False) + 22
    on = sheet(width, top + 240 + 44)
    legend(on, keys)
    on.text(0, top - 12, "loss", color=MUTED, fontsize=12)
    axes = on.axes(46, top, width - 54, 240)
    axes.grid(axis="y", color=RULE, linewidth=1)
    for index, (cell, style) in enumerate(zip(cells, styles, strict=True)):
        steps, losses = zip(*cell["loss"], strict=True)
        every = max(len(steps) // 8, 1)
        axes.plot(steps, [float(loss) for loss in losses], markevery=(index % every, every), **style)
    _scales(axes, cells, narrow=on.narrow)
    on.text(width - 8, top + 240 + 34, "update", color=MUTED, fontsize=12, ha="right")
    return on


def _scales(axes: Any, cells: Sequence[Cell], *, narrow: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    every = finite([loss for cell in cells for _, loss in cell["loss"]]) or [0.0]
    reach = (max(every) - min(every)) or abs(max(every)) or 1.0
    axes.set_ylim(min(every) - 0.06 * reach, max(every) + 0.06 * reach)
    for axis, bins in ((axes.xaxis, 5 if narrow else 10), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(nbins=bins, integer=axis is axes.xaxis))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
