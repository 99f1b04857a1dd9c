"""Figures of an A/B, over repeats.

    samples_per_second_steady = global batches / the slowest rank's seconds, without the first updates
    ratio                     = median of the arm over repeats / median of the baseline

A red gate withholds every speed figure of that arm. All speeds include the loader and the optimizer.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from somaspeed_patch._version import __version__
from somaspeed_patch.ab import machine
from somaspeed_patch.ab.gate import Verdict, judge
from somaspeed_patch.ab.recipe import Recipe
from somaspeed_patch.ab.runner import FINISHED, Run
from somaspeed_patch.ab.steps import Series, Update, read

PHASES = ("data", "preprocess", "forward", "backward", "optimizer")
GIB = 2.0**30
_LOADER_SHARE = 0.5  # data and preprocess above this part of the step: the loader decides the speed


@dataclass(frozen=True, kw_only=True)
class ArmRuns:
    """The finished runs of one arm, in order of repeat."""

    name: str
    runs: tuple[Run, ...]
    series: tuple[Series, ...]
    failure: str

    @classmethod
    def of(cls, name: str, runs: Sequence[Run]) -> ArmRuns:
        """Read the steps of the runs of arm `name`."""
        mine = sorted((run for run in runs if run.arm == name), key=lambda run: run.repeat)
        finished = tuple(run for run in mine if run.status == FINISHED)
        failures = [f"run {run.repeat}: {run.reason}" for run in mine if run.status != FINISHED]
        series = tuple(read(run.steps_file) for run in finished)
        return cls(name=name, runs=finished, series=series, failure="; ".join(failures))


def build(recipe: Recipe, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything there is to say about these runs, as plain data; see recipes/README.md for the fields."""
    arms = {arm.name: ArmRuns.of(arm.name, runs) for arm in recipe.arms}
    baseline = arms[recipe.baseline.name]
    judged = {} if baseline.failure else {name: arm for name, arm in arms.items() if not arm.failure}
    verdicts = {name: _judge(recipe, baseline, arm) for name, arm in judged.items() if arm is not baseline}
    shown = [
        arm for name, arm in arms.items() if arm is baseline or name in verdicts and verdicts[name].green
    ]
    found = {
        "somaspeed": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": machine.command_line(),
        "recipe": _recipe(recipe),
        "versions": machine.versions(),
        "machine": {**machine.processor(), "devices": _devices(arms.values())},
        "commit": machine.commit(),
        "gate": {name: asdict(verdict) for name, verdict in verdicts.items()},
        "arms": {name: _arm(arm, recipe.discard, speed=arm in shown) for name, arm in arms.items()},
        "comparison": {
            name: _compared(arm, baseline, recipe.discard, speed=arm in shown) for name, arm in arms.items()
        },
    }
    plain: dict[str, Any] = _strict(found)
    return plain


def _strict(value: Any) -> Any:
    """The same data with nan and inf as words: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def exit_code(results: Mapping[str, Any]) -> int:
    """0: all gates are green; 1: an arm failed; 3: a gate is red."""
    if any(not verdict["green"] for verdict in results["gate"].values()):
        return 3
    return 1 if any(arm["failure"] for arm in results["arms"].values()) else 0


def samples_per_second(updates: Sequence[Update], discard: int) -> float:
    """Samples over seconds of the updates after the first `discard`."""
    steady = updates[discard:]
    seconds = sum(update.seconds["total"] for update in steady)
    return sum(update.samples for update in steady) / seconds


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile with linear interpolation between values, as numpy's default."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, p20, p80 and the values themselves."""
    return {
        "median": statistics.median(values),
        "p20": quantile(values, 0.2),
        "p80": quantile(values, 0.8),
        "repeats": list(values),
    }


def loader_bound(phases: Mapping[str, float], total: float) -> str | None:
    """A sentence when waiting for data and preprocessing is most of the step, else None."""
    waiting = phases["data"] + phases["preprocess"]
    if waiting <= _LOADER_SHARE * total:
        return None
    return (
        f"loader-bound: data and preprocessing take {waiting / total:.0%} of the step, so the ratio says "
        "little about the model's speed; try more workers"
    )


def _judge(recipe: Recipe, baseline: ArmRuns, arm: ArmRuns) -> Verdict:
    return judge(
        baseline.series,
        arm.series,
        steps=recipe.steps,
        tolerance=recipe.tolerance,
        names=(baseline.name, arm.name),
    )


def _recipe(recipe: Recipe) -> dict[str, Any]:
    keys = ("name", "description", "host", "steps", "discard", "repeats")
    return {
        **{key: getattr(recipe, key) for key in keys},
        "path": str(recipe.path),
        "tolerance": asdict(recipe.tolerance),
        "baseline": recipe.baseline.name,
    }


def _devices(arms: Any) -> list[str]:
    """Names of the devices trained on."""
    return sorted({step.device for arm in arms for series in arm.series for step in series.every()})


def _arm(arm: ArmRuns, discard: int, *, speed: bool) -> dict[str, Any]:
    """Runs, memory, sites; and when they may be shown, speed and phases."""
    steps = [step for series in arm.series for step in series.every()]
    figures = _speeds(arm, discard) if speed and arm.series else {}
    return {
        "failure": arm.failure,
        "runs": [asdict(run) for run in arm.runs],
        "setup_seconds": spread(_setups(arm)) if arm.series else None,
        "peak_allocated_gib": max(step.peak_bytes for step in steps) / GIB if steps else None,
        "peak_counts": steps[0].peak_kind if steps else "",
        "sites": _sites(arm),
        **figures,
    }


def _speeds(arm: ArmRuns, discard: int) -> dict[str, Any]:
    """Samples a second by repeat; median seconds of the step and of its phases over all repeats."""
    steady = [update for series in arm.series for update in series.updates()[discard:]]
    medians = {
        phase: statistics.median(update.seconds[phase] for update in steady) for phase in (*PHASES, "total")
    }
    return {
        "samples_per_second": spread(
            [samples_per_second(series.updates(), discard) for series in arm.series]
        ),
        "step_seconds": spread([_median_step(series, discard) for series in arm.series]),
        "phase_seconds": medians,
        "loader_bound": loader_bound(medians, medians["total"]),
    }


def _median_step(series: Series, discard: int) -> float:
    return statistics.median(update.seconds["total"] for update in series.updates()[discard:])


def _setups(arm: ArmRuns) -> list[float]:
    """Seconds from the start of each process to its first update."""
    firsts = [min(step.at for step in series.every()) for series in arm.series]
    return [first - run.started for first, run in zip(firsts, arm.runs, strict=True)]


def _sites(arm: ArmRuns) -> list[Any]:
    """What the last run's report says was patched, ran, and fell back."""
    file = arm.runs[-1].steps_file.with_name("somaspeed_report.json") if arm.runs else None
    if file is None or not file.is_file():
        return []
    sites: list[Any] = json.loads(file.read_text())["sites"]
    return sites


def _compared(arm: ArmRuns, baseline: ArmRuns, discard: int, *, speed: bool) -> dict[str, Any]:
    """The fields under which such results are published, one arm."""
    if not arm.series:
        return {"completed_steps": 0, "failure": arm.failure or "no run was finished"}
    first = next(iter(arm.series[0].ranks.values()))
    fields = {
        "completed_steps": min(series.completed for series in arm.series),
        "setup_seconds": statistics.median(_setups(arm)),
        "peak_allocated_gib": max(step.peak_bytes for series in arm.series for step in series.every()) / GIB,
        "loss_first": first[0].loss,
        "loss_last": first[-1].loss,
    }
    return {**fields, **_compared_speed(arm, baseline, discard)} if speed else fields


def _compared_speed(arm: ArmRuns, baseline: ArmRuns, discard: int) -> dict[str, Any]:
    speeds = _speeds(arm, discard)
    fields = {
        "samples_per_second_steady": speeds["samples_per_second"]["median"],
        "median_step_seconds": speeds["phase_seconds"]["total"],
    }
    if arm is baseline or not baseline.series:
        return fields
    base = _speeds(baseline, discard)["samples_per_second"]
    pairs = zip(speeds["samples_per_second"]["repeats"], base["repeats"], strict=False)
    return {
        **fields,
        "ratio": fields["samples_per_second_steady"] / base["median"],
        "ratio_by_repeat": [ours / theirs for ours, theirs in pairs],
    }
