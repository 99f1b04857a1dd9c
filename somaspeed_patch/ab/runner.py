"""Run the arms of a recipe as child processes, interleaved, one after the other.

Repeat 1 runs the cells (arm and batch) in order, repeat 2 in reverse, and so on (A B B A): a machine that
warms up or slows down does so for all. Every run has its own folder:

    OUT/runs/<arm>[-b<batch>]-<repeat>/   steps.jsonl  log.txt  run.json  somaspeed_report.json
                                          gradients.safetensors (until the end)  host/ (its {out})

A run that cannot be started, fails, or takes too long is an outcome in words; its cell is not run again, and
neither is an arm that fails the gate after repeat 1. Finished runs are taken over from an earlier call.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from somaspeed_patch.ab import find_batch
from somaspeed_patch.ab.arms import Arm
from somaspeed_patch.ab.child import Watch, end_orphan, execute
from somaspeed_patch.ab.recipe import Recipe, default_adapters, fill
from somaspeed_patch.features import Value
from somaspeed_patch.sites import write_json

FINISHED, FAILED = "finished", "failed"
_PROBE_UPDATES = 2  # the first update allocates the optimizer's state, the second one runs beside it


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one arm, ended."""

    arm: str
    """its name"""
    repeat: int
    """from 1"""
    folder: str
    """where its files are"""
    status: str
    """finished or failed"""
    reason: str
    """why it failed, in words"""
    started: float
    """Unix time"""
    seconds: float
    """wall time of the whole process"""
    command: tuple[str, ...]
    """what was run"""
    environment: Mapping[str, str]
    """the variables that the recipe set"""
    note: str = ""
    """what was odd about a finished run"""
    batch: int | None = None
    """its {batch}"""

    @property
    def steps_file(self) -> Path:
        """Its updates."""
        return Path(self.folder) / "steps.jsonl"

    @property
    def label(self) -> str:
        """The folder's name."""
        return Path(self.folder).name


def run_all(
    recipe: Recipe,
    out: Path,
    *,
    budget: float | None = None,
    watch: Watch | None = None,
    leave_out: Callable[[Sequence[Run]], set[str]] | None = None,
) -> list[Run]:
    """Run every cell of the recipe, or take over what an earlier call left finished in `out`.

    Args:
        recipe: what to run.
        out: the folder for all runs.
        budget: seconds after which no further repeat is begun; every cell runs once all the same.
        watch: told the updates of the run under way, a few times a second.
        leave_out: asked once, after repeat 1, for the arms that need not run again: the parity gate.
    """
    runs: list[Run] = []
    begun, left_out = time.monotonic(), set[str]()
    for repeat, arm, batch in interleaved(recipe):
        if repeat == 2 and not left_out and leave_out is not None:
            left_out, leave_out = leave_out(runs), None
        if arm.name in left_out or any(_same(run, arm, batch) and run.status == FAILED for run in runs):
            continue
        spent = time.monotonic() - begun
        if budget is not None and repeat > 1 and spent + _longest(runs) > budget:
            break
        runs.append(_run(recipe, arm, batch, repeat, out / "runs", watch or _unwatched))
    return runs


def interleaved(recipe: Recipe) -> Iterator[tuple[int, Arm, int | None]]:
    """Repeat, arm and batch in running order: forwards in odd repeats, backwards in even ones."""
    for repeat in range(1, recipe.repeats + 1):
        cells = recipe.cells if repeat % 2 else reversed(recipe.cells)
        yield from ((repeat, arm, batch) for arm, batch in cells)


def with_found_batches(recipe: Recipe, out: Path, say: Callable[[str], None]) -> Recipe:
    """The recipe with the largest batch of each arm that asks for it, found by short runs in OUT/probes.

    Args:
        say: told each batch that was tried.
    """

    def found(arm: Arm) -> Arm:
        own = recipe.batches_of(arm)
        if not recipe.finds_batch(arm):
            return arm
        best = find_batch.largest(lambda batch: _fits(recipe, arm, batch, out, say), max(own))
        return replace(arm, batches=own if best is None or best in own else (*own, best))

    return replace(recipe, arms=tuple(found(arm) for arm in recipe.arms))


def _fits(recipe: Recipe, arm: Arm, batch: int, out: Path, say: Callable[[str], None]) -> bool:
    short = replace(arm, stop_after=_PROBE_UPDATES)
    run = _run(recipe, short, batch, 0, out / "probes", _unwatched)
    say(f"{arm.name} at batch {batch}: {run.reason or 'fits'}")
    return run.status == FINISHED


def command(recipe: Recipe, arm: Arm, batch: int | None, repeat: int, folder: Path) -> tuple[str, ...]:
    """The child's command line."""
    names = [adapter.name for adapter in default_adapters()] if arm.targets is None else list(arm.targets)
    targets = [word for name in dict.fromkeys([*names, "step_recorder"]) for word in ("--target", name)]
    settings = [_flag(name, value) for name, value in arm.features.items() if value is not None]
    words = fill((*recipe.arguments, *arm.arguments), out=folder / "host", steps=recipe.steps, batch=batch)
    record = [f"--record-steps={folder / 'steps.jsonl'}", *(_looks(recipe, arm) if repeat == 1 else ())]
    ours = [sys.executable, "-m", "somaspeed_patch", "run", *targets, *record, *settings]
    return (*ours, "--", *shlex.split(recipe.host), *words)


def _looks(recipe: Recipe, arm: Arm) -> Iterator[str]:
    """In repeat 1: which update's gradients to keep, and which one to profile, the last of the warm-up."""
    if recipe.gradients is not None:
        yield f"--record-gradients={recipe.gradients}"
    if recipe.discarded(arm) > 0:
        yield f"--record-profile={recipe.discarded(arm)}"


def _flag(name: str, value: Value) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}={value}"


def _same(run: Run, arm: Arm, batch: int | None) -> bool:
    return run.arm == arm.name and run.batch == batch


def _longest(runs: list[Run]) -> float:
    return max((run.seconds for run in runs), default=0.0)


def _unwatched(label: str, done: int) -> None:
    """Nobody looks."""


def _run(recipe: Recipe, arm: Arm, batch: int | None, repeat: int, parent: Path, watch: Watch) -> Run:
    at = "" if batch is None else f"-b{batch}"
    folder = parent.resolve() / f"{arm.name}{at}-{repeat}"
    words = command(recipe, arm, batch, repeat, folder)
    environment = {**recipe.environment, **arm.environment}
    earlier = _earlier(folder, words, environment)
    if earlier is not None:
        watch(earlier.label, recipe.updates(arm))
        return earlier
    end_orphan(folder)
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    folder.mkdir(parents=True)
    time.sleep(recipe.cool_seconds)
    started, begun, updates = time.time(), time.monotonic(), recipe.updates(arm)
    reason, note = execute(
        words,
        environment,
        folder,
        updates=updates,
        cut=updates < recipe.steps,
        timeout=recipe.timeout_seconds,
        watch=watch,
    )
    run = Run(
        arm=arm.name,
        batch=batch,
        repeat=repeat,
        folder=str(folder),
        status=FAILED if reason else FINISHED,
        reason=reason,
        started=started,
        seconds=time.monotonic() - begun,
        command=words,
        environment=environment,
        note=note,
    )
    write_json(folder / "run.json", asdict(run))
    return run


def _earlier(folder: Path, words: tuple[str, ...], environment: Mapping[str, str]) -> Run | None:
    """The finished run of the same command that lies in `folder` already."""
    file = folder / "run.json"
    if not file.is_file():
        return None
    data = json.loads(file.read_text())
    run = Run(**{**data, "command": tuple(data["command"])})
    same = run.command == words and run.environment == environment
    return run if same and run.status == FINISHED else None
