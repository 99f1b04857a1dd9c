"""`somaspeed ab RECIPE --synthetic`: the training step alone, all arms in one process on one device.

Arms and batch sizes are run in ABBA order, each with its own warm-up; the gate comes first, and an arm that
fails it has no figures. An arm that runs out of memory, or fails, is a result in words.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import patched, report
from somaspeed_patch.ab import (
    machine,
    synthetic_gate,
    synthetic_groot,
    synthetic_molmoact2,
    synthetic_pi05,
    synthetic_profile,
)
from somaspeed_patch.ab.results import spread
from somaspeed_patch.ab.synthetic_recipe import Synthetic, SyntheticArm
from somaspeed_patch.ab.synthetic_subject import PHASES, Subject

Cell = tuple[SyntheticArm, int]
SUBJECTS: Mapping[str, type[Subject]] = {  # by model and adapter
    "groot": synthetic_groot.Subject,
    "molmoact2": synthetic_molmoact2.Subject,
    "pi05": synthetic_pi05.Subject,
}
TARGETS = ("accelerate_clip", "lerobot_optimizer")  # what else touches the step that is measured


@contextmanager
def _graphs_of_one_run() -> Iterator[None]:
    """torch.compile as in a training run, which has one batch size: static graphs, and no more than fit.

    Here arms and batch sizes share a process. Without this the second size that a block meets would make its
    graph a dynamic one, slower than any run's, and after eight graphs of a block it would run eagerly.
    """
    from torch._dynamo import config

    with config.patch(automatic_dynamic_shapes=False, recompile_limit=256):
        yield


@_graphs_of_one_run()
def run(
    recipe: Synthetic,
    *,
    device: torch.device,
    say: Callable[[str], None],
    budget: float | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """Gate, then measure; plain data out.

    Args:
        say: told each line of progress.
        budget: seconds after which no further repeat is begun.
        profiled: add each cell's largest kernels, from one more update after its first repeat.
    """
    started = time.monotonic()
    subject = SUBJECTS[recipe.model](recipe, device)
    say(f"model built, {time.monotonic() - started:.0f} s")
    gates = _gates(recipe, subject)
    for name, verdict in gates.items():
        say(f"gate {name}: {_color(verdict)}, worst {verdict.get('worst_parameter')}")
    red = {name for name, verdict in gates.items() if not verdict["green"]}
    cells = [(arm, batch) for arm in recipe.arms if arm.name not in red for batch in arm.batches]
    repeats: dict[Cell, list[Any]] = {cell: [] for cell in cells}
    for index in range(recipe.repeats):
        for cell in cells if index % 2 == 0 else reversed(cells):
            late = budget is not None and time.monotonic() - started > budget
            if not late and not _failed(repeats[cell]):
                found = _measure(recipe, subject, *cell, first=index == 0, profiled=profiled)
                repeats[cell].append(found)
                say(_line(cell, found))
    return _results(recipe, device, gates, repeats)


def _gates(recipe: Synthetic, subject: Subject) -> dict[str, Any]:
    """A verdict for each patched arm.

    The exact and native gradients are computed once for each padding and for each choice of the options that
    change what is computed.
    """
    native: dict[Any, tuple[Any, Any]] = {}
    verdicts = {}
    for arm in recipe.arms:
        if arm.patched:
            batch = subject.batch(subject.gate_samples, padding=arm.padding)
            options = {name: arm.policy[name] for name in sorted(subject.changes_results & arm.policy.keys())}
            key = arm.padding, *options.items()
            if key not in native:
                with subject.switched(options):
                    native[key] = synthetic_gate.truth(subject, batch), subject.loss_and_gradients(batch)
            with _arranged(subject, arm):
                verdicts[arm.name] = _verdict(subject, batch, *native[key])
    return verdicts


def _verdict(subject: Subject, batch: dict[str, Tensor], exact: Any, native: Any) -> dict[str, Any]:
    """Of the arm that is switched on; one that fails is red."""
    try:
        ours = subject.loss_and_gradients(batch)
    except Exception as error:
        return {"green": False, "failure": _failure(error)}
    return synthetic_gate.judge(exact, native, ours)


def _failure(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"failed: {type(error).__name__}: {error}"[:400]


def _color(verdict: dict[str, Any]) -> str:
    return "green" if verdict["green"] else f"RED {verdict.get('failure', '')}".rstrip()


def _arranged(subject: Subject, arm: SyntheticArm) -> ExitStack:
    """The arm's patches and the host's switches, for a with block."""
    with ExitStack() as stack:
        if arm.patched:
            stack.enter_context(patched(subject.recipe.model, *TARGETS, **arm.features))
        stack.enter_context(subject.switched(arm.policy))
        return stack.pop_all()


def _measure(
    recipe: Synthetic, subject: Subject, arm: SyntheticArm, batch: int, *, first: bool, profiled: bool
) -> dict[str, Any]:
    """One repeat of one cell: its updates' seconds, peak memory and sites; or why there is none."""
    _clean(subject.device)
    before = _counts()
    try:
        with _arranged(subject, arm), subject.optimized():
            data, begun = subject.batch(batch, padding=arm.padding), time.perf_counter()
            for _ in range(recipe.warmup if first else 1):
                subject.update(data)
            warm = time.perf_counter() - begun
            updates = [subject.update(data) for _ in range(recipe.steps)]
            found = {"sites": _ran_since(before), "peak_gib": _peak(subject.device)}
            if first and profiled:
                step = statistics.median(update["total"] for update in updates)
                found["profile"] = synthetic_profile.largest(subject, data, step)
    except Exception as error:  # an arm that fails is a result; the others still run
        return {"failure": _failure(error)}
    return {"updates": updates, "warmup_seconds": warm, **found}


def _counts() -> dict[str, tuple[int, int, int]]:
    return {s.site: (s.calls, s.native_calls, s.fallbacks) for s in report().sites}


def _ran_since(before: dict[str, tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Per site: calls through our code, calls left to the host, fallbacks, since `before`."""
    ran = []
    for name, counts in _counts().items():
        calls, native, fallbacks = (
            now - then for now, then in zip(counts, before.get(name, (0, 0, 0)), strict=True)
        )
        if calls or native or fallbacks:
            ran.append({"site": name, "calls": calls, "native_calls": native, "fallbacks": fallbacks})
    return ran


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def _failed(runs: list[Any]) -> bool:
    return bool(runs) and "failure" in runs[-1]


def _line(cell: Cell, found: dict[str, Any]) -> str:
    arm, batch = cell
    if "failure" in found:
        return f"{arm.name:24s} batch {batch:4d}  {found['failure']}"
    step = statistics.median(update["total"] for update in found["updates"])
    return (
        f"{arm.name:24s} batch {batch:4d}  {batch / step:7.1f} samples/s  {step * 1e3:7.1f} ms  "
        f"{found['peak_gib']:5.1f} GiB  warm-up {found['warmup_seconds']:.0f} s"
    )


def _results(
    recipe: Synthetic, device: torch.device, gates: dict[str, Any], repeats: dict[Cell, list[Any]]
) -> dict[str, Any]:
    cells = [_cell(arm, batch, runs) for (arm, batch), runs in repeats.items() if runs]
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": machine.command_line(),
        "commit": machine.commit(),
        "versions": machine.versions(),
        "machine": {**machine.processor(), "device": _device_name(device)},
        "model": {"name": recipe.model, "size": recipe.size, "dtype": recipe.dtype, "cameras": recipe.cameras,
                  "language_slots": recipe.slots, "language_tokens": recipe.tokens, "chunk": recipe.chunk,
                  "embodiments": recipe.embodiments},
        "gate": gates,
        "cells": cells,
        "comparison": _comparison(recipe, cells),
    }  # fmt: skip


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _cell(arm: SyntheticArm, batch: int, runs: list[Any]) -> dict[str, Any]:
    """The figures of one arm at one batch, over its repeats."""
    name = {"arm": arm.name, "batch": batch}
    finished = [run for run in runs if "failure" not in run]
    if not finished:
        return {**name, "failure": runs[-1]["failure"]}
    steps = [[update["total"] for update in run["updates"]] for run in finished]
    every = [update for run in finished for update in run["updates"]]
    return {
        **name,
        "samples_per_second": spread([batch * len(times) / sum(times) for times in steps]),
        "step_seconds": spread([statistics.median(times) for times in steps]),
        "phase_seconds": {phase: statistics.median(update[phase] for update in every) for phase in PHASES},
        "peak_allocated_gib": max(run["peak_gib"] for run in finished),
        "first_warmup_seconds": finished[0]["warmup_seconds"],
        "sites": finished[-1]["sites"],
        "profile": finished[0].get("profile"),
    }


def _comparison(recipe: Synthetic, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios at the equal batch and at each arm's best batch; the best native arm is the reference."""
    ran = [cell for cell in cells if "failure" not in cell]
    native_names = {arm.name for arm in recipe.arms if not arm.patched}
    native = [cell for cell in ran if cell["arm"] in native_names]
    if not native:
        return {}
    best_native = max(native, key=_speed)
    found: dict[str, Any] = {"best_native": {key: best_native[key] for key in ("arm", "batch")}}
    for arm in recipe.arms:
        mine = [cell for cell in ran if cell["arm"] == arm.name]
        if mine:
            best = max(mine, key=_speed)
            found[arm.name] = {
                "best_batch": best["batch"],
                "samples_per_second_steady": _speed(best),
                "peak_allocated_gib": best["peak_allocated_gib"],
                "ratio_to_best_native": _speed(best) / _speed(best_native),
                "ratio_at_equal_batch": _equal_batch(mine, native),
            }
    return found


def table(found: dict[str, Any]) -> str:
    """One line an arm and batch, then what they come to."""
    lines = [f"{'arm':20} {'batch':>5} {'samples/s':>10} {'p20-p80':>15} {'ms':>8} {'GiB':>6}"]
    for cell in found["cells"]:
        head = f"{cell['arm']:20} {cell['batch']:5d}"
        if "failure" in cell:
            lines.append(f"{head} {cell['failure']}")
            continue
        speed, step = cell["samples_per_second"], cell["step_seconds"]["median"]
        spread_text = f"{speed['p20']:.1f}-{speed['p80']:.1f}"
        peak = cell["peak_allocated_gib"]
        lines.append(f"{head} {speed['median']:10.1f} {spread_text:>15} {step * 1e3:8.1f} {peak:6.1f}")
    for name, verdict in found["gate"].items():
        lines.append(f"gate {name}: {_color(verdict)}{'' if verdict['green'] else ', no figures'}")
    for name, figures in found["comparison"].items():
        if name != "best_native":
            equal = ", ".join(f"{r:.2f}x at {b}" for b, r in figures["ratio_at_equal_batch"].items())
            lines.append(f"{name}: {figures['ratio_to_best_native']:.2f}x the best native arm; {equal}")
    return "\n".join(lines)


def _equal_batch(mine: list[dict[str, Any]], native: list[dict[str, Any]]) -> dict[str, float]:
    """Per batch size that a native arm ran too: this arm over the fastest native one there."""
    ratios = {}
    for cell in mine:
        there = [other for other in native if other["batch"] == cell["batch"]]
        if there:
            ratios[str(cell["batch"])] = _speed(cell) / max(map(_speed, there))
    return ratios


def _speed(cell: dict[str, Any]) -> float:
    return float(cell["samples_per_second"]["median"])
