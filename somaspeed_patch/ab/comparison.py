"""What the cells of an A/B come to: ratios at the equal batch, ratios at the best batch, claims withheld.

A cell is one arm at one batch, as plain data (see recipes/README.md). The two kinds of ratio are never mixed:

    equal_batch  at the same batch: a native arm against the baseline, one of ours against the fastest native
                 arm there, one with `against` in the recipe against that
    best_batch   its own fastest cell against the fastest cell of any native arm

A cell with a reason in `withheld` has a speed, perhaps, but stands in no ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from somaspeed_patch.ab.cells import Cell, speed, speeds, stands
from somaspeed_patch.ab.ratios import ratio


def compare(cells: Sequence[Cell], *, baseline: str, references: Mapping[str, str | None]) -> dict[str, Any]:
    """The `comparison` of results.json.

    Args:
        cells: all of them.
        baseline: the first arm.
        references: for every arm the one it is compared with; None for the baseline and for an arm that
            trains on other data.
    """
    same_data = [cell for cell in cells if _on_the_baselines_data(cell["arm"], baseline, references)]
    native = [cell for cell in same_data if cell["native"] and stands(cell)]
    best_native = max(native, key=speed, default=None)
    arms = list(dict.fromkeys(cell["arm"] for cell in cells))
    return {
        "baseline": baseline,
        "best_native": None if best_native is None else _named(best_native),
        "arms": {
            arm: {
                "equal_batch": _equal(arm, references[arm], baseline, cells, native),
                "best_batch": _best(arm, best_native, same_data),
                "withheld": _withheld(arm, cells),
            }
            for arm in arms
        },
    }


def _on_the_baselines_data(arm: str, baseline: str, references: Mapping[str, str | None]) -> bool:
    return arm == baseline or references[arm] == baseline


def _named(cell: Cell) -> dict[str, Any]:
    return {"arm": cell["arm"], "batch": cell["batch"]}


def _equal(
    arm: str, reference: str | None, baseline: str, cells: Sequence[Cell], native: Sequence[Cell]
) -> list[dict[str, Any]]:
    """A ratio for every batch at which there is something to compare with."""
    found = []
    for cell in (cell for cell in cells if cell["arm"] == arm and stands(cell)):
        against_any = reference == baseline and not cell["native"]
        others = native if against_any else [c for c in cells if c["arm"] == reference and stands(c)]
        there = [other for other in others if other["batch"] == cell["batch"]]
        if there:
            other = max(there, key=speed)
            pair = ratio(speeds(cell), speeds(other))
            found.append({"batch": cell["batch"], "against": other["arm"], **pair})
    return found


def _best(arm: str, best_native: Cell | None, cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Its fastest cell against the best native one; None for that one's arm, and where no batch is named."""
    mine = [cell for cell in cells if cell["arm"] == arm and cell["batch"] is not None and stands(cell)]
    if best_native is None or not mine or arm == best_native["arm"]:
        return None
    best = max(mine, key=speed)
    return {
        "batch": best["batch"],
        "against": best_native["arm"],
        "against_batch": best_native["batch"],
        **ratio(speeds(best), speeds(best_native)),
    }


def _withheld(arm: str, cells: Sequence[Cell]) -> list[str]:
    """Why a claim is not made, once each; with the batch where there are several."""
    mine = [cell for cell in cells if cell["arm"] == arm]
    reasons = []
    for cell in mine:
        where = f"batch {cell['batch']}: " if len(mine) > 1 else ""
        said = [cell["failure"]] if cell["failure"] else cell["withheld"]
        reasons += [where + why for why in said]
    return list(dict.fromkeys(reasons))
