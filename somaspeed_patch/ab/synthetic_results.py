"""The results of `--synthetic` as plain data, in the schema of results.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from somaspeed_patch.ab import flops, machine, published, withheld
from somaspeed_patch.ab.comparison import compare
from somaspeed_patch.ab.ratios import spread
from somaspeed_patch.ab.results import ablations, head, plain, work
from somaspeed_patch.ab.synthetic_recipe import Synthetic, SyntheticArm
from somaspeed_patch.ab.synthetic_subject import PHASES

Repeats = Mapping[tuple[SyntheticArm, int], Sequence[Mapping[str, Any]]]


def build(recipe: Synthetic, device: str, gates: Mapping[str, Any], repeats: Repeats) -> dict[str, Any]:
    """Everything there is to say about these repeats.

    Args:
        device: its name.
        gates: a verdict for each patched arm.
        repeats: of every cell, in order; one that failed is the last.
    """
    tflop = flops.necessary(recipe) / 1e12
    measured = {(arm.name, batch): (arm, runs) for (arm, batch), runs in repeats.items() if runs}
    cells = [_cell(recipe, arm, batch, runs, tflop, device) for (_, batch), (arm, runs) in measured.items()]
    cells += [_red(arm, gates[arm.name]) for arm in recipe.arms if not _green(gates, arm.name)]
    for cell in cells:
        cell["withheld"] = _withheld(cell, gates.get(cell["arm"]))
    baseline = recipe.arms[0].name
    references = {arm.name: None if arm.name == baseline else baseline for arm in recipe.arms}
    found = {
        **head("step"),
        "machine": {**machine.processor(), **machine.accelerators(), "devices": [device]},
        "recipe": _recipe(recipe),
        "model": _model(recipe),
        "gate": gates,
        "cells": cells,
        "comparison": compare(cells, baseline=baseline, references=references),
        "published": published.entries(cells, baseline=baseline, target_steps=recipe.steps),
    }
    shown: dict[str, Any] = plain(found, {})
    return shown


def color(verdict: Mapping[str, Any]) -> str:
    """Green, or RED and why."""
    return "green" if verdict["green"] else f"RED: {verdict['reasons'][0]}"


def median_step(run: Mapping[str, Any]) -> float:
    """Seconds."""
    return float(statistics.median(update["total"] for update in run["updates"]))


def _green(gates: Mapping[str, Any], name: str) -> bool:
    return name not in gates or bool(gates[name]["green"])


def _recipe(recipe: Synthetic) -> dict[str, Any]:
    keys = ("name", "description", "warmup", "steps", "repeats")
    return {
        **{key: getattr(recipe, key) for key in keys},
        "discard": recipe.warmup,
        "baseline": recipe.arms[0].name,
        "ablations": ablations(recipe.arms),
        "arms": {arm.name: _settings(arm) for arm in recipe.arms},
    }


def _model(recipe: Synthetic) -> dict[str, Any]:
    return {
        "name": recipe.model,
        "size": recipe.size,
        "dtype": recipe.dtype,
        "cameras": recipe.cameras,
        "language_slots": recipe.slots,
        "language_tokens": recipe.tokens,
        "chunk": recipe.chunk,
        "embodiments": recipe.embodiments,
    }


def _settings(arm: SyntheticArm) -> dict[str, Any]:
    return {
        "patched": arm.patched,
        "features": dict(arm.features),
        "policy": dict(arm.policy),
        "padding": arm.padding,
        "ablates": arm.ablates,
        "like": arm.like,
    }


def _named(arm: SyntheticArm, batch: int | None) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "batch": batch,
        "native": not arm.patched,
        "failure": "",
        "notes": [],
        "repeats": 0,
        "world_size": 1,
        "global_batch": batch,
        "completed_steps": 0,
        "discarded": 0,
        "loader": None,
        "loss": [],
        "sites": [],
    }


def _red(arm: SyntheticArm, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """An arm that was not measured, because its gate is red."""
    return {**_named(arm, None), **work(None, None, (), 1), "peak_allocated_gib": None}


def _cell(
    recipe: Synthetic,
    arm: SyntheticArm,
    batch: int,
    runs: Sequence[Mapping[str, Any]],
    tflop: float,
    device: str,
) -> dict[str, Any]:
    """The figures of one arm at one batch, over its repeats."""
    named = _named(arm, batch)
    finished = [run for run in runs if "failure" not in run]
    if len(finished) < len(runs):
        empty = {**work(tflop, None, (device,), 1), "peak_allocated_gib": None}
        return {**named, **empty, "failure": runs[-1]["failure"]}
    times = [[update["total"] for update in run["updates"]] for run in finished]
    speed = spread([batch * len(seconds) / sum(seconds) for seconds in times])
    every = [update for run in finished for update in run["updates"]]
    return {
        **named,
        "repeats": len(finished),
        "completed_steps": len(times[0]),
        "samples_per_second": speed,
        "step_seconds": spread([statistics.median(seconds) for seconds in times]),
        "setup_seconds": spread([run["warmup_seconds"] for run in finished]),
        "phase_seconds": {phase: statistics.median(update[phase] for update in every) for phase in PHASES},
        "slowest_rank_seconds": [sum(seconds) for seconds in times],
        "measured_samples": [batch * len(seconds) for seconds in times],
        "peak_allocated_gib": max((run["peak_gib"] for run in finished if run["peak_gib"]), default=None),
        "peak_counts": "CUDA allocated" if device != "cpu" else "not counted on a CPU",
        **_profile(finished[0].get("profile")),
        **work(tflop, speed["median"], (device,), 1),
        "loss": [[number, update["loss"]] for number, update in enumerate(finished[0]["updates"], 1)],
        "sites": finished[-1]["sites"],
    }


def _profile(profile: Mapping[str, Any] | None) -> dict[str, Any]:
    idle = None if profile is None else profile["idle_share"]
    return {"busy_share": None if idle is None else 1 - idle, "profile": profile}


def _withheld(cell: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> list[str]:
    losses = [loss for _, loss in cell["loss"]]
    measured = "samples_per_second" in cell
    return withheld.reasons(
        native=cell["native"] or not measured,
        verdict=verdict,
        losses=losses,
        sites=cell["sites"],
        phases={},
        loader=None,
    )
