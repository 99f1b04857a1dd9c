"""The runs of one cell: one arm at one batch, and what they come to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from somaspeed_patch.ab.arms import Arm
from somaspeed_patch.ab.gradients import FILE
from somaspeed_patch.ab.ratios import spread
from somaspeed_patch.ab.recipe import Recipe
from somaspeed_patch.ab.runner import FINISHED, Run
from somaspeed_patch.ab.steps import PHASES, Series, Step, Update, read

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class CellRuns:
    """The finished runs of one arm at one batch, in order of repeat."""

    arm: Arm
    """whose runs they are"""
    batch: int | None
    """its {batch}"""
    runs: tuple[Run, ...]
    """the finished ones"""
    series: tuple[Series, ...]
    """their updates"""
    failure: str
    """why one of its runs failed, else an empty string"""
    updates: int
    """of each run"""
    discard: int
    """first updates left out of the figures"""

    @classmethod
    def of(cls, recipe: Recipe, arm: Arm, batch: int | None, runs: Sequence[Run]) -> CellRuns:
        """Read the steps of its runs."""
        mine = sorted(
            (run for run in runs if (run.arm, run.batch) == (arm.name, batch)), key=lambda run: run.repeat
        )
        finished = tuple(run for run in mine if run.status == FINISHED)
        failures = [f"run {run.repeat}: {run.reason}" for run in mine if run.status != FINISHED]
        return cls(
            arm=arm,
            batch=batch,
            runs=finished,
            # a run that is cut may have recorded one more
            series=tuple(read(run.steps_file).first(recipe.updates(arm)) for run in finished),
            failure="; ".join(failures),
            updates=recipe.updates(arm),
            discard=recipe.discarded(arm),
        )

    @property
    def ran(self) -> bool:
        """Whether there is anything to say about its speed."""
        return bool(self.series) and not self.failure

    def steps(self) -> list[Step]:
        """All updates of all ranks and repeats."""
        return [step for series in self.series for step in series.every()]


def speeds(cell: CellRuns) -> dict[str, Any]:
    """Samples a second by repeat; median seconds of the step and of its phases over all repeats."""
    steady = [update for series in cell.series for update in series.updates()[cell.discard :]]
    return {
        "samples_per_second": spread(
            [samples_per_second(series.updates(), cell.discard) for series in cell.series]
        ),
        "step_seconds": spread([_median_step(series, cell.discard) for series in cell.series]),
        "phase_seconds": {
            phase: statistics.median(update.seconds[phase] for update in steady) for phase in PHASES
        },
        "slowest_rank_seconds": [
            sum(update.seconds["total"] for update in series.updates()[cell.discard :])
            for series in cell.series
        ],
        "measured_samples": [
            sum(update.samples for update in series.updates()[cell.discard :]) for series in cell.series
        ],
    }


def samples_per_second(updates: Sequence[Update], discard: int) -> float:
    """Samples over seconds of the updates after the first `discard`."""
    steady = updates[discard:]
    seconds = sum(update.seconds["total"] for update in steady)
    return sum(update.samples for update in steady) / seconds


def _median_step(series: Series, discard: int) -> float:
    return statistics.median(update.seconds["total"] for update in series.updates()[discard:])


def memory(cell: CellRuns) -> dict[str, Any]:
    """The largest peak of any rank, GiB, and what it counts."""
    steps = cell.steps()
    return {
        "peak_allocated_gib": max(step.peak_bytes for step in steps) / GIB if steps else None,
        "peak_counts": steps[0].peak_kind if steps else "",
    }


def setups(cell: CellRuns) -> list[float]:
    """Seconds from the start of each process to its first update."""
    firsts = [min(step.at for step in series.every()) for series in cell.series]
    return [first - run.started for first, run in zip(firsts, cell.runs, strict=True)]


def losses(cell: CellRuns) -> list[tuple[int, float]]:
    """Of the first run, its first rank: update and loss."""
    if not cell.series or not cell.series[0].ranks:
        return []
    first = next(iter(cell.series[0].ranks.values()))
    return [(step.step, step.loss) for step in first]


def profile(cell: CellRuns) -> Mapping[str, float | None]:
    """The profiled update of the first run, of the rank that communicates most; empty without one."""
    found = [step.profile for series in cell.series[:1] for step in series.every() if step.profile]
    return max(found, key=lambda one: one.get("communication_seconds") or 0.0, default={})


def sites(cell: CellRuns) -> list[dict[str, Any]]:
    """What the last run's report says was patched, ran, and fell back."""
    file = cell.runs[-1].steps_file.with_name("somaspeed_report.json") if cell.runs else None
    if file is None or not file.is_file():
        return []
    found: list[dict[str, Any]] = json.loads(file.read_text())["sites"]
    return found


def gradients(cell: CellRuns) -> Path | None:
    """The file of its first run's gradients, whether it is there or not; None without a run."""
    return Path(cell.runs[0].folder) / FILE if cell.runs else None
