"""`somaspeed ab RECIPE --synthetic`: the training step alone, all arms in one process on one device.

Arms and batch sizes are run in ABBA order, each with its own warm-up; the gate comes first, and an arm that
fails it has no figures. An arm that runs out of memory, or fails, is a result in words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.ab import (
    find_batch,
    synthetic_gate,
    synthetic_groot,
    synthetic_measure,
    synthetic_molmoact2,
    synthetic_pi05,
    synthetic_results,
)
from somaspeed_patch.ab.synthetic_recipe import Synthetic, SyntheticArm
from somaspeed_patch.ab.synthetic_store import Store
from somaspeed_patch.ab.synthetic_subject import Subject

Cell = tuple[SyntheticArm, int]
Say = Callable[[str], None]
SUBJECTS: Mapping[str, type[Subject]] = {  # by model and adapter
    "groot": synthetic_groot.Subject,
    "molmoact2": synthetic_molmoact2.Subject,
    "pi05": synthetic_pi05.Subject,
}


@contextmanager
def graphs_of_one_run() -> Iterator[None]:
    """torch.compile as in a training run, which has one batch size: static graphs, and no more than fit.

    Here arms and batch sizes share a process. Without this the second size that a block meets would make its
    graph a dynamic one, slower than any run's, and after eight graphs of a block it would run eagerly.
    """
    from torch._dynamo import config

    with config.patch(automatic_dynamic_shapes=False, recompile_limit=256):
        yield


@graphs_of_one_run()
def run(
    recipe: Synthetic,
    *,
    device: torch.device,
    say: Say,
    budget: float | None = None,
    profiled: bool = False,
    out: Path | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Gate, then measure; plain data out.

    Args:
        say: told each line of progress.
        budget: seconds after which no further repeat is begun; every cell is begun once all the same.
        profiled: add each cell's largest kernels, from one more update after its first repeat.
        out: folder for what is finished; what an earlier call left there is taken over.
        advance: told how many repeats of cells are done, and of how many.
    """
    started = time.monotonic()
    store = Store(out, recipe, _name(device))
    subject = SUBJECTS[recipe.model](recipe, device)
    say(f"model built, {time.monotonic() - started:.0f} s")
    gates = _gates(recipe, subject, store, say)
    red = {name for name, verdict in gates.items() if not verdict["green"]}
    recipe = _with_found_batches(recipe, subject, store, say, red)
    cells = [(arm, batch) for arm in recipe.arms if arm.name not in red for batch in arm.batches]
    plan = list(_interleaved(recipe.repeats, cells))
    repeats: dict[Cell, list[Any]] = {cell: [] for cell in cells}
    warm: set[Cell] = set()
    for done, (index, cell) in enumerate(plan):
        late = budget is not None and index > 0 and time.monotonic() - started > budget
        if not _failed(repeats[cell]) and (not late or store.has(_label(cell, index))):
            repeats[cell].append(_repeat(recipe, subject, cell, index, store, profiled, warm))
            say(_line(cell, repeats[cell][-1]))
        if advance is not None:
            advance(done + 1, len(plan))
    return synthetic_results.build(recipe, _name(device), gates, repeats)


def _interleaved(repeats: int, cells: Sequence[Cell]) -> Iterator[tuple[int, Cell]]:
    for index in range(repeats):
        yield from ((index, cell) for cell in (cells if index % 2 == 0 else reversed(cells)))


def _label(cell: Cell, index: int) -> str:
    return f"{cell[0].name}-b{cell[1]}-{index + 1}"


def _repeat(
    recipe: Synthetic,
    subject: Subject,
    cell: Cell,
    index: int,
    store: Store,
    profiled: bool,
    warm: set[Cell],
) -> dict[str, Any]:
    """Taken over, or measured now: warmed up in full where this process has not run the cell before."""

    def measured() -> dict[str, Any]:
        warmup = 1 if cell in warm else recipe.warmup
        warm.add(cell)
        return synthetic_measure.measure(
            subject, *cell, warmup=warmup, steps=recipe.steps, profiled=profiled and index == 0
        )

    found: dict[str, Any] = store.get(_label(cell, index), measured)
    return found


def _gates(recipe: Synthetic, subject: Subject, store: Store, say: Say) -> dict[str, Any]:
    """A verdict for each patched arm.

    The exact and native gradients are computed once for each padding and for each choice of the options that
    change what is computed.
    """
    native: dict[Any, tuple[Any, Any]] = {}
    verdicts = {}
    for arm in (arm for arm in recipe.arms if arm.patched):
        verdicts[arm.name] = store.get(f"gate-{arm.name}", partial(_gate, subject, arm, native))
        say(f"gate {arm.name}: {synthetic_results.color(verdicts[arm.name])}")
    return verdicts


def _gate(subject: Subject, arm: SyntheticArm, native: dict[Any, tuple[Any, Any]]) -> dict[str, Any]:
    batch = subject.batch(subject.gate_samples, padding=arm.padding)
    options = {name: arm.policy[name] for name in sorted(subject.changes_results & arm.policy.keys())}
    key = arm.padding, *options.items()
    if key not in native:
        try:
            with subject.switched(options):
                native[key] = synthetic_gate.truth(subject, batch), subject.loss_and_gradients(batch)
        except Exception as error:  # every arm that needs it says so, and the native ones are measured
            return {"green": False, "reasons": [f"native failed: {synthetic_measure.failure(error)}"]}
    with synthetic_measure.arranged(subject, arm):
        return _verdict(subject, batch, *native[key])


def _verdict(subject: Subject, batch: dict[str, Tensor], exact: Any, native: Any) -> dict[str, Any]:
    """Of the arm that is switched on; one that fails is red."""
    try:
        ours = subject.loss_and_gradients(batch)
    except Exception as error:
        return {"green": False, "reasons": [f"it failed: {synthetic_measure.failure(error)}"]}
    return synthetic_gate.judge(exact, native, ours)


def _with_found_batches(
    recipe: Synthetic, subject: Subject, store: Store, say: Say, red: set[str]
) -> Synthetic:
    """The recipe with the largest batch of each arm that asks for it."""

    def found(arm: SyntheticArm) -> SyntheticArm:
        if not arm.find_batch or arm.name in red:
            return arm
        best = store.get(f"batch-{arm.name}", lambda: _largest(subject, arm) or 0)
        say(f"largest batch of {arm.name}: {best or 'none that was tried'}")
        return replace(arm, batches=tuple(dict.fromkeys([*arm.batches, *([best] if best else [])])))

    return replace(recipe, arms=tuple(found(arm) for arm in recipe.arms))


def _largest(subject: Subject, arm: SyntheticArm) -> int | None:
    return find_batch.largest(lambda batch: synthetic_measure.fits(subject, arm, batch), max(arm.batches))


def _failed(runs: list[Any]) -> bool:
    return bool(runs) and "failure" in runs[-1]


def _line(cell: Cell, found: dict[str, Any]) -> str:
    arm, batch = cell
    if "failure" in found:
        return f"{arm.name:24s} batch {batch:4d}  {found['failure']}"
    step = synthetic_results.median_step(found)
    return (
        f"{arm.name:24s} batch {batch:4d}  {batch / step:7.1f} samples/s  {step * 1e3:7.1f} ms  "
        f"{found['peak_gib'] or 0:5.1f} GiB  warm-up {found['warmup_seconds']:.0f} s"
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
