"""What each feature contributes: from the arm's speed down to its speed without that one feature.

Every row hangs from the full arm's speed and not from the row above: features were switched off one at a
time, so their contributions do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.ablations import Ablation
from somaspeed_patch.ab.cells import speed
from somaspeed_patch.ab.figures import Shown, say
from somaspeed_patch.ab.words import batch_words, contributed
from somaspeed_patch.ab_page.charts import LOSS, OURS, PAGE, TEXT, Chart, Key, Sheet, both, marked
from somaspeed_patch.ab_page.charts_rows import OURS_STYLE, THICK, Row, Rows, lay_out

_GAIN: dict[str, Any] = {"facecolor": PAGE, "edgecolor": OURS, "hatch": "////", "linewidth": 1.2}
_COST: dict[str, Any] = {"facecolor": PAGE, "edgecolor": LOSS, "hatch": "xxxx", "linewidth": 1.2}
_KEYS = (
    Key(words="every feature on", style=OURS_STYLE),
    Key(words="what the feature adds", style=_GAIN),
    Key(words="what it costs", style=_COST),
)


def waterfall(group: Sequence[Ablation], prefix: str) -> Chart:
    """The chart of one arm at one batch.

    Args:
        group: ablations of the same full cell, at least one.
        prefix: of the ids.
    """
    return both(
        lambda width: _draw(group, width),
        prefix=prefix,
        title=f"What each feature contributes to {group[0].full['arm']}, {say(batch_words(_batch(group)))}",
        description="; ".join(_described(one) for one in group) + ".",
    )


def _batch(group: Sequence[Ablation]) -> int | None:
    batch: int | None = group[0].full["batch"]
    return batch


def _described(one: Ablation) -> str:
    speeds = [figures.plain(speed(cell)) for cell in (one.full, one.without)]
    return f"{one.feature}: {speeds[0]} samples/s with it, {speeds[1]} without; {say(contributed(one))}"


def gain(one: Ablation) -> Shown:
    """The contribution in samples/s, with its sign."""
    return Shown(text=f"{one.gain:+.{1 if speed(one.full) >= 10 else 3}f}", value=one.gain, derived=True)


def _draw(group: Sequence[Ablation], width: int) -> Sheet:
    full = speed(group[0].full)
    costs = any(one.gain < 0 for one in group)
    rows = [Row(name=group[0].full["arm"], suffix="", words="", end=figures.plain(full))]
    rows += [Row(name=f"without {one.feature}", suffix="", words="", end=gain(one)) for one in group]
    limit = max(full, *(speed(one.without) for one in group)) * 1.02
    laid = lay_out(rows, width, limit=limit, unit="samples/s", keys=_KEYS if costs else _KEYS[:2])
    laid.axes.barh(laid.middles[0], full, THICK, gid=marked(full), clip_on=False, **OURS_STYLE)
    laid.axes.plot(
        [full, full],
        [laid.middles[0], laid.middles[-1] + THICK],
        "--",
        color=TEXT,
        linewidth=1,
        clip_on=False,
    )
    for one, y in zip(group, laid.middles[1:], strict=True):
        _step(laid, one, full, y)
    return laid.sheet


def _step(laid: Rows, one: Ablation, full: float, y: float) -> None:
    without = speed(one.without)
    left, length = min(full, without), abs(full - without)
    drawn = _GAIN if one.gain >= 0 else _COST
    gid = marked(one.gain, derived=True)
    laid.axes.barh(y, left, 2, color=OURS, clip_on=False)
    laid.axes.barh(y, length, THICK, left, gid=gid, clip_on=False, **drawn)
