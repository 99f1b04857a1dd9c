"""Where a step goes: ms by phase and cell, stacked in the order in which they happen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.cells import PHASES, phases_of
from somaspeed_patch.ab.figures import say
from somaspeed_patch.ab.words import batch_words, blocked
from somaspeed_patch.ab_page.charts import PAGE, SERIES, Chart, Key, Sheet, both, marked, text_width, write
from somaspeed_patch.ab_page.charts_rows import THICK, Cell, Rows, cell_row, lay_out

_HATCHES = ("\\\\\\", "xxx", "", "///", "|||", "---")


def _style(phase: str) -> dict[str, Any]:
    index = PHASES.index(phase)
    return {"facecolor": SERIES[index], "edgecolor": PAGE, "hatch": _HATCHES[index], "linewidth": 1.2}


def drawn(cell: Cell) -> bool:
    """Whether the cell has a bar here."""
    return not blocked(cell) and bool(cell.get("phase_seconds"))


def phase_stacks(cells: Sequence[Cell], prefix: str) -> Chart:
    """The chart of the cells that have phases."""
    return both(
        lambda width: _draw(cells, width),
        prefix=prefix,
        title="Milliseconds of a step by phase",
        description="; ".join(_described(cell) for cell in cells) + ".",
    )


def _described(cell: Cell) -> str:
    seconds = cell["phase_seconds"]
    parts = [f"{phase} {figures.milliseconds(seconds[phase])} ms" for phase in PHASES if phase in seconds]
    return f"{cell['arm']}, {say(batch_words(cell['batch']))}: " + ", ".join(parts)


def _draw(cells: Sequence[Cell], width: int) -> Sheet:
    keys = [Key(words=phase, style=_style(phase)) for phase in phases_of(cells)]
    rows = [cell_row(cell, figures.milliseconds(cell["step_seconds"]["median"])) for cell in cells]
    limit = max(sum(cell["phase_seconds"].get(phase, 0.0) for phase in PHASES) for cell in cells) * 1e3
    laid = lay_out(rows, width, limit=limit, unit="ms by phase; at the right the whole step", keys=keys)
    for cell, y in zip(cells, laid.middles, strict=True):
        _stack(laid, cell, y)
    return laid.sheet


def _stack(laid: Rows, cell: Cell, y: float) -> None:
    left = 0.0
    for phase in PHASES:
        seconds = cell["phase_seconds"].get(phase, 0.0)
        if seconds:
            length = seconds * 1e3
            laid.axes.barh(y, length, THICK, left, gid=marked(seconds), clip_on=False, **_style(phase))
            _number(laid, seconds, left + length / 2, y)
            left += length


def _number(laid: Rows, seconds: float, x: float, y: float) -> None:
    """The segment's ms inside it, on the page's colour, where it has room."""
    words = figures.milliseconds(seconds)
    if text_width(words.text, 11) + 14 > seconds * 1e3 * laid.scale:
        return
    patch = {"facecolor": PAGE, "edgecolor": "none", "pad": 1.0}
    write(laid.axes, x, y, words, ha="center", fontsize=11, bbox=patch)
