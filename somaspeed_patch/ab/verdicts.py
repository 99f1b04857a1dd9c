"""The parity gate of a recipe's arms: updates by gate.py, and every gradient of one update.

An arm is judged at every batch that it has in common with the arm it is compared with; all must be green. A
batch of its own is other data, so there only what can be said of a run by itself is.

Gradients are large, so a comparison is kept beside the run as `gradients.json`; their files go at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from somaspeed_patch.ab.cell_runs import CellRuns, gradients
from somaspeed_patch.ab.gate import Verdict, judge
from somaspeed_patch.ab.gradients import FILE, compare
from somaspeed_patch.ab.recipe import Recipe
from somaspeed_patch.ab.runner import Run
from somaspeed_patch.sites import write_json

Cells = Mapping[tuple[str, int | None], CellRuns]


def cells_of(recipe: Recipe, runs: Sequence[Run]) -> dict[tuple[str, int | None], CellRuns]:
    """The runs by arm and batch, in the recipe's order."""
    return {(arm.name, batch): CellRuns.of(recipe, arm, batch, runs) for arm, batch in recipe.cells}


def verdicts(recipe: Recipe, cells: Cells) -> dict[str, Verdict]:
    """For every arm that is compared with one: the verdict; none where either failed at every batch."""
    found = {}
    for arm in recipe.arms:
        other = recipe.reference(arm)
        if other is None:
            continue
        pairs = [
            (cells[other, batch], cells[arm.name, batch])
            for batch in recipe.batches_of(arm) or (None,)
            if (other, batch) in cells
        ]
        ran = [(theirs, mine) for theirs, mine in pairs if theirs.ran and mine.ran]
        if ran:
            found[arm.name] = _together([_judged(recipe, *pair) for pair in ran])
        elif not pairs:
            found[arm.name] = _unlike(arm.name, other)
    return found


def red_arms(recipe: Recipe, runs: Sequence[Run]) -> set[str]:
    """The arms whose runs so far say that they need not run again."""
    return {name for name, verdict in verdicts(recipe, cells_of(recipe, runs)).items() if not verdict.green}


def forget_gradients(recipe: Recipe, runs: Sequence[Run]) -> None:
    """Remove the gradients' files, gigabytes each, but of arms that a later one can be compared with."""
    kept = {recipe.baseline.name, *(recipe.reference(arm) for arm in recipe.arms)}
    for run in runs:
        if run.arm not in kept:
            (Path(run.folder) / FILE).unlink(missing_ok=True)


def _unlike(name: str, other: str) -> Verdict:
    why = f"{name} has no batch in common with {other}; give both one, so that their losses can be compared"
    return Verdict(green=False, reasons=(why,), worst={}, noise={})


def _judged(recipe: Recipe, theirs: CellRuns, mine: CellRuns) -> Verdict:
    """Over the updates that both have."""
    common = min(theirs.updates, mine.updates)
    verdict = judge(
        [series.first(common) for series in theirs.series],
        [series.first(common) for series in mine.series],
        steps=common,
        tolerance=recipe.tolerance,
        names=(theirs.arm.name, mine.arm.name),
    )
    return verdict if recipe.gradients is None else _with_gradients(recipe, verdict, theirs, mine)


def _together(found: Sequence[Verdict]) -> Verdict:
    """One verdict of those at several batches: the first one, red where any is."""
    first = next((verdict for verdict in found if not verdict.green), found[0])
    reasons = tuple(why for verdict in found for why in verdict.reasons)
    return replace(first, green=all(verdict.green for verdict in found), reasons=reasons)


def _with_gradients(recipe: Recipe, verdict: Verdict, theirs: CellRuns, mine: CellRuns) -> Verdict:
    compared = _compared(gradients(theirs), gradients(mine), recipe.tolerance.gradient)
    if "note" in compared:
        return replace(verdict, notes=(*verdict.notes, compared["note"]))
    reasons = [_gradient_reason(compared, recipe)] if compared["share"] > 1 else []
    if compared["missing"]:
        reasons.append(f"only one of the arms has a gradient for {', '.join(compared['missing'][:5])}")
    green = verdict.green and not reasons
    return replace(verdict, green=green, reasons=(*verdict.reasons, *reasons), gradient=compared)


def _gradient_reason(compared: Mapping[str, Any], recipe: Recipe) -> str:
    return (
        f"at update {recipe.gradients} the gradient of {compared['name']} is {compared['error']:.3g} away, "
        f"in norm, where {compared['allowed']:.3g} is allowed"
    )


def _compared(theirs: Path | None, mine: Path | None, tolerance: float) -> dict[str, Any]:
    """The comparison as plain data, or a note on why there is none."""
    if theirs is None or mine is None:
        return {"note": "no run, so no gradients"}
    kept = mine.with_suffix(".json")
    if kept.is_file() and (known := json.loads(kept.read_text()))["tolerance"] == tolerance:
        return {**known, "share": float(known["share"])}
    if not (theirs.is_file() and mine.is_file()):
        return {"note": "no gradients were recorded for both arms, so they were not compared one by one"}
    try:
        found = {**asdict(compare(theirs, mine, tolerance)), "tolerance": tolerance}
    except ValueError as error:
        return {"note": str(error)}
    write_json(kept, {**found, "share": repr(found["share"])})  # inf has no number in JSON
    return found
