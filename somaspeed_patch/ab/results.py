"""The results of an A/B of real training runs, as plain data; recipes/README.md names every field.

    samples_per_second = global batches / the slowest rank's seconds, without the first updates
    ratio              = geometric mean over interleaved repeats of the arm over the one it is compared with

A red gate leaves an arm without any speed. All speeds include the loader and the optimizer.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from somaspeed_patch._version import __version__
from somaspeed_patch.ab import cell_runs, machine, published, withheld
from somaspeed_patch.ab.arms import settings
from somaspeed_patch.ab.cell_runs import CellRuns
from somaspeed_patch.ab.cells import SCHEMA
from somaspeed_patch.ab.comparison import compare
from somaspeed_patch.ab.gate import Verdict
from somaspeed_patch.ab.peaks import peak_tflops
from somaspeed_patch.ab.ratios import spread
from somaspeed_patch.ab.recipe import Recipe, fill
from somaspeed_patch.ab.runner import Run
from somaspeed_patch.ab.verdicts import cells_of, verdicts


def build(recipe: Recipe, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything there is to say about these runs."""
    measured = cells_of(recipe, runs)
    gate = verdicts(recipe, measured)
    cells = [_cell(recipe, cell, gate.get(cell.arm.name)) for cell in measured.values()]
    _add_loaders(recipe, cells)
    for cell in cells:
        _add_withheld(cell, gate.get(cell["arm"]))
    references = {arm.name: recipe.reference(arm) for arm in recipe.arms}
    found: dict[str, Any] = {
        **head("trainer"),
        "machine": {**machine.processor(), **machine.accelerators(), "devices": _devices(measured.values())},
        "recipe": _recipe(recipe),
        "gate": {name: asdict(verdict) for name, verdict in gate.items()},
        "cells": cells,
        "comparison": compare(cells, baseline=recipe.baseline.name, references=references),
        "published": published.entries(cells, baseline=recipe.baseline.name, target_steps=recipe.steps),
    }
    shown: dict[str, Any] = plain(found, _short_paths(recipe, runs))
    return shown


def head(kind: str) -> dict[str, Any]:
    """What every results.json begins with."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "somaspeed": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": machine.command_line(),
        "commit": machine.commit(),
        "versions": machine.versions(),
    }


def plain(value: Any, short: Mapping[str, str]) -> Any:
    """The same data as it may be shown and committed.

    nan and inf become words, for which JSON has no numbers; paths of this machine what `short` says.
    """
    if isinstance(value, Mapping):
        return {key: plain(item, short) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, short) for item in value]
    if isinstance(value, str):
        return functools.reduce(lambda text, path: text.replace(path, short[path]), short, value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short_paths(recipe: Recipe, runs: Sequence[Run]) -> dict[str, str]:
    """The longest first, so that none hides within another."""
    folders = {str(Path(run.folder).parents[1]): "OUT" for run in runs}
    known = {
        **folders,
        sys.executable: "python",
        fill(("{assets}",))[0]: "{assets}",
        f"{recipe.path.parent}/": "",
        str(Path.home()): "~",
    }
    return dict(sorted(known.items(), key=lambda pair: -len(pair[0])))


def exit_code(results: Mapping[str, Any]) -> int:
    """0: all gates are green; 1: an arm failed; 3: a gate is red."""
    if any(not verdict["green"] for verdict in results["gate"].values()):
        return 3
    return 1 if any(cell["failure"] for cell in results["cells"]) else 0


def work(
    tflop_per_sample: float | None, samples_per_second: float | None, devices: Sequence[str], ranks: int
) -> dict[str, float | None]:
    """Necessary TFLOP a sample, TFLOP/s of one device, and its share of the datasheet's peak."""
    rate = None
    if tflop_per_sample is not None and samples_per_second is not None:
        rate = tflop_per_sample * samples_per_second / ranks
    peak = peak_tflops(devices[0]) if len(devices) == 1 else None
    mfu = None if rate is None or peak is None else rate / peak
    return {"tflop_per_sample": tflop_per_sample, "tflops": rate, "mfu": mfu}


def _cell(recipe: Recipe, cell: CellRuns, verdict: Verdict | None) -> dict[str, Any]:
    """One arm at one batch: runs, memory, sites; and when they may be shown, speed and phases."""
    shown = cell.ran and (verdict is None or verdict.green)
    fast = cell_runs.speeds(cell) if shown else {}
    first = cell.series[0].updates()[:1] if cell.series else []
    ranks = len(cell.series[0].ranks) if cell.series else 1
    speed = fast["samples_per_second"]["median"] if shown else None
    return {
        "arm": cell.arm.name,
        "batch": cell.batch,
        "native": cell.arm.native,
        "failure": cell.failure,
        "notes": [f"run {run.repeat}: {run.note}" for run in cell.runs if run.note],
        "repeats": len(cell.runs),
        "world_size": ranks,
        "global_batch": first[0].samples if first else None,
        "completed_steps": min((series.completed for series in cell.series), default=0),
        "updates": cell.updates,
        "discarded": cell.discard,
        "setup_seconds": spread(cell_runs.setups(cell)) if cell.ran else None,
        **cell_runs.memory(cell),
        **fast,
        **_profile(cell, fast, ranks),
        **work(recipe.necessary_tflop_per_sample, speed, _devices([cell]), ranks),
        "loader": None,
        "loss": cell_runs.losses(cell),
        "sites": cell_runs.sites(cell),
        "runs": [asdict(run) for run in cell.runs],
    }


def _profile(cell: CellRuns, fast: Mapping[str, Any], ranks: int) -> dict[str, float | None]:
    """The profiled update's kernels against a step that nobody watched; one rank has nobody to talk to."""
    found = cell_runs.profile(cell) if fast else {}
    busy = found.get("busy_seconds")
    talk = found if ranks > 1 else {}
    return {
        "busy_share": None if busy is None else min(1.0, busy / fast["step_seconds"]["median"]),
        "communication_seconds": talk.get("communication_seconds"),
        "exposed_communication_seconds": talk.get("exposed_communication_seconds"),
    }


def _add_loaders(recipe: Recipe, cells: Sequence[dict[str, Any]]) -> None:
    """For each cell whose arm has a twin on cached batches: both speeds, and what bounds it."""
    speeds = {
        (cell["arm"], cell["batch"]): cell["samples_per_second"]["median"]
        for cell in cells
        if "samples_per_second" in cell
    }
    for cell in cells:
        mine, twin = (cell["arm"], cell["batch"]), recipe.loader.get(cell["arm"])
        cached = speeds.get((twin, cell["batch"])) if twin else None
        if mine in speeds and cached is not None:
            slow = cached > (1 + withheld.LOADER_COST) * speeds[mine]
            cell["loader"] = {
                "cached": twin,
                "samples_per_second": speeds[mine],
                "samples_per_second_cached": cached,
                "bound": "loader" if slow else "compute",
            }


def _add_withheld(cell: dict[str, Any], verdict: Verdict | None) -> None:
    cell["withheld"] = withheld.reasons(
        native=cell["native"],
        verdict=None if verdict is None else asdict(verdict),
        losses=[loss for _, loss in cell["loss"]],
        sites=cell["sites"],
        phases=cell.get("phase_seconds", {}),
        loader=cell["loader"],
    )


def _recipe(recipe: Recipe) -> dict[str, Any]:
    keys = (
        "name", "description", "host", "steps", "discard", "repeats", "batches", "find_batch", "gradients",
        "cool_seconds", "necessary_tflop_per_sample",
    )  # fmt: skip
    return {
        **{key: getattr(recipe, key) for key in keys},
        "path": recipe.path.name,
        "tolerance": asdict(recipe.tolerance),
        "baseline": recipe.baseline.name,
        "ablations": ablations(recipe.arms),
        "arms": {arm.name: settings(arm) for arm in recipe.arms},
    }


def ablations(arms: Sequence[Any]) -> dict[str, str]:
    """The arms that are another one, their `like`, without a feature: which feature."""
    return {arm.name: arm.ablates for arm in arms if arm.ablates}


def _devices(cells: Any) -> list[str]:
    """Names of the devices trained on."""
    return sorted({step.device for cell in cells for step in cell.steps()})
