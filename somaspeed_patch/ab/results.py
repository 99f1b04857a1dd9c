"""Figures of an A/B, over repeats.

    samples_per_second_steady = global batches / the slowest rank's seconds, without the first updates
    ratio                     = median of the arm over repeats / median of the baseline

A red gate withholds every speed figure of that arm. All speeds include the loader and the optimizer. An arm
that trains on other data has `against` in the recipe: it is compared with that arm, or with none.
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
from somaspeed_patch.ab.recipe import Arm, Recipe
from somaspeed_patch.ab.runner import FINISHED, Run
from somaspeed_patch.ab.steps import Series, Update, read

PHASES = ("data", "preprocess", "forward", "backward", "optimizer")
GIB = 2.0**30
_LOADER_COST = 0.1  # an arm that is faster by more than this part on cached batches is loader-bound
_LOADER_SHARE = 0.5  # data and preprocess above this part of the step: the loader decides the speed


@dataclass(frozen=True, kw_only=True)
class ArmRuns:
    """The finished runs of one arm, in order of repeat."""

    name: str
    runs: tuple[Run, ...]
    series: tuple[Series, ...]
    failure: str
    updates: int
    """of each run"""
    discard: int
    """first updates left out of the figures"""

    @classmethod
    def of(cls, recipe: Recipe, arm: Arm, runs: Sequence[Run]) -> ArmRuns:
        """Read the steps of the runs of `arm`."""
        mine = sorted((run for run in runs if run.arm == arm.name), key=lambda run: run.repeat)
        finished = tuple(run for run in mine if run.status == FINISHED)
        failures = [f"run {run.repeat}: {run.reason}" for run in mine if run.status != FINISHED]
        return cls(
            name=arm.name,
            runs=finished,
            # a run that is cut may have recorded one more
            series=tuple(read(run.steps_file).first(recipe.updates(arm)) for run in finished),
            failure="; ".join(failures),
            updates=recipe.updates(arm),
            discard=recipe.discarded(arm),
        )


def build(recipe: Recipe, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything there is to say about these runs, as plain data; see recipes/README.md for the fields."""
    arms = {arm.name: ArmRuns.of(recipe, arm, runs) for arm in recipe.arms}
    compared = {arm.name: arms[other] for arm in recipe.arms if (other := recipe.reference(arm))}
    verdicts = {
        name: _judge(recipe, other, arms[name])
        for name, other in compared.items()
        if not (other.failure or arms[name].failure)
    }
    shown = [
        arm for name, arm in arms.items() if name not in compared or name in verdicts and verdicts[name].green
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
        "arms": {name: _arm(arm, speed=arm in shown) for name, arm in arms.items()},
        "comparison": _comparison(recipe, arms, shown),
        "loader": _loader(recipe, shown),
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


def _loader(recipe: Recipe, shown: Sequence[ArmRuns]) -> dict[str, Any]:
    """For each arm with a twin on cached batches: both speeds, and what bounds the arm."""
    speeds = {arm.name: _speeds(arm)["samples_per_second"]["median"] for arm in shown if arm.series}
    pairs = {name: twin for name, twin in recipe.loader.items() if name in speeds and twin in speeds}
    return {
        name: {
            "cached": twin,
            "samples_per_second": speeds[name],
            "samples_per_second_cached": speeds[twin],
            "bound": "loader" if speeds[twin] > (1 + _LOADER_COST) * speeds[name] else "compute",
        }
        for name, twin in pairs.items()
    }


def _judge(recipe: Recipe, baseline: ArmRuns, arm: ArmRuns) -> Verdict:
    """Over the updates that both have."""
    common = min(baseline.updates, arm.updates)
    return judge(
        [series.first(common) for series in baseline.series],
        [series.first(common) for series in arm.series],
        steps=common,
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


def _arm(arm: ArmRuns, *, speed: bool) -> dict[str, Any]:
    """Runs, memory, sites; and when they may be shown, speed and phases."""
    steps = [step for series in arm.series for step in series.every()]
    figures = _speeds(arm) if speed and arm.series else {}
    return {
        "failure": arm.failure,
        "runs": [asdict(run) for run in arm.runs],
        "setup_seconds": spread(_setups(arm)) if arm.series else None,
        "peak_allocated_gib": max(step.peak_bytes for step in steps) / GIB if steps else None,
        "peak_counts": steps[0].peak_kind if steps else "",
        "sites": _sites(arm),
        "updates": arm.updates,
        "discarded": arm.discard,
        **figures,
    }


def _speeds(arm: ArmRuns) -> dict[str, Any]:
    """Samples a second by repeat; median seconds of the step and of its phases over all repeats."""
    steady = [update for series in arm.series for update in series.updates()[arm.discard :]]
    medians = {
        phase: statistics.median(update.seconds[phase] for update in steady) for phase in (*PHASES, "total")
    }
    return {
        "samples_per_second": spread(
            [samples_per_second(series.updates(), arm.discard) for series in arm.series]
        ),
        "step_seconds": spread([_median_step(series, arm.discard) for series in arm.series]),
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


def _comparison(recipe: Recipe, arms: Mapping[str, ArmRuns], shown: Sequence[ArmRuns]) -> dict[str, Any]:
    """What is published of each arm; with `against` where that is not the baseline: another arm, or None."""
    fields, baseline = {}, recipe.baseline
    for arm in recipe.arms:
        runs, other = arms[arm.name], recipe.reference(arm)
        reference = None if other is None else arms[other]
        usual = arm is baseline or other == baseline.name or arm.against is None
        said = {} if usual else {"against": other}
        fields[arm.name] = {**_compared(runs, reference, speed=runs in shown), **said}
    return fields


def _compared(arm: ArmRuns, baseline: ArmRuns | None, *, speed: bool) -> dict[str, Any]:
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
    return {**fields, **_compared_speed(arm, baseline)} if speed else fields


def _compared_speed(arm: ArmRuns, baseline: ArmRuns | None) -> dict[str, Any]:
    speeds = _speeds(arm)
    fields = {
        "samples_per_second_steady": speeds["samples_per_second"]["median"],
        "median_step_seconds": speeds["phase_seconds"]["total"],
    }
    if baseline is None or not baseline.series:
        return fields
    base = _speeds(baseline)["samples_per_second"]
    pairs = zip(speeds["samples_per_second"]["repeats"], base["repeats"], strict=False)
    return {
        **fields,
        "ratio": fields["samples_per_second_steady"] / base["median"],
        "ratio_by_repeat": [ours / theirs for ours, theirs in pairs],
    }
