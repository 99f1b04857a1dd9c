"""Run the arms of a recipe as child processes, interleaved, one after the other.

Repeat 1 runs the arms in order, repeat 2 in reverse, and so on (A B B A): a machine that warms up or slows
down does so for both. Every run has its own folder:

    OUT/runs/<arm>-<repeat>/   steps.jsonl  log.txt  run.json  somaspeed_report.json  host/ (its {out})

A run that cannot be started, fails, or takes too long is an outcome in words; its arm is not run again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import steps
from somaspeed_patch.ab.recipe import Arm, Recipe, default_adapters, fill
from somaspeed_patch.features import Value
from somaspeed_patch.sites import write_json

Watch = Callable[[str, int], None]  # called with a run's label and its updates so far

FINISHED, FAILED = "finished", "failed"
_ENDED, _LATE, _STUCK, _CUT = "ended", "late", "stuck", "cut"
_POLL = 0.2  # seconds between two looks at a run
_EXIT = 60.0  # seconds from the last update to the end; gloo with two ranks hangs there in one run of ten
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL


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

    @property
    def steps_file(self) -> Path:
        """Its updates."""
        return Path(self.folder) / "steps.jsonl"

    @property
    def label(self) -> str:
        """`arm-repeat`, which also names its folder."""
        return f"{self.arm}-{self.repeat}"


def run_all(
    recipe: Recipe, out: Path, *, budget: float | None = None, watch: Watch | None = None
) -> list[Run]:
    """Run every arm of the recipe, or take over what an earlier call left finished in `out`.

    Args:
        recipe: what to run.
        out: the folder for all runs.
        budget: seconds after which no further repeat is begun; every arm runs once all the same.
        watch: told the updates of the run under way, a few times a second.
    """
    runs: list[Run] = []
    begun = time.monotonic()
    for repeat, arm in interleaved(recipe):
        spent = time.monotonic() - begun
        if any(run.arm == arm.name and run.status == FAILED for run in runs):
            continue
        if budget is not None and repeat > 1 and spent + _longest(runs) > budget:
            break
        runs.append(_run(recipe, arm, repeat, out, watch or _unwatched))
    return runs


def interleaved(recipe: Recipe) -> Iterator[tuple[int, Arm]]:
    """Repeat and arm in running order: forwards in odd repeats, backwards in even ones."""
    for repeat in range(1, recipe.repeats + 1):
        yield from ((repeat, arm) for arm in (recipe.arms if repeat % 2 else reversed(recipe.arms)))


def command(recipe: Recipe, arm: Arm, folder: Path) -> tuple[str, ...]:
    """The child's command line."""
    names = [adapter.name for adapter in default_adapters()] if arm.targets is None else list(arm.targets)
    targets = [word for name in dict.fromkeys([*names, "step_recorder"]) for word in ("--target", name)]
    settings = [_flag(name, value) for name, value in arm.features.items() if value is not None]
    words = fill((*recipe.arguments, *arm.arguments), out=folder / "host", steps=recipe.steps)
    record = f"--record-steps={folder / 'steps.jsonl'}"
    ours = [sys.executable, "-m", "somaspeed_patch", "run", *targets, record, *settings]
    return (*ours, "--", *shlex.split(recipe.host), *words)


def _flag(name: str, value: Value) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}={value}"


def _longest(runs: list[Run]) -> float:
    return max((run.seconds for run in runs), default=0.0)


def _unwatched(label: str, done: int) -> None:
    """Nobody looks."""


def _run(recipe: Recipe, arm: Arm, repeat: int, out: Path, watch: Watch) -> Run:
    folder = out.resolve() / "runs" / f"{arm.name}-{repeat}"
    words = command(recipe, arm, folder)
    environment = {**recipe.environment, **arm.environment}
    earlier = _earlier(folder, words, environment)
    if earlier is not None:
        watch(earlier.label, recipe.updates(arm))
        return earlier
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    folder.mkdir(parents=True)
    started, begun = time.time(), time.monotonic()
    reason, note = _execute(recipe, recipe.updates(arm), folder, words, environment, watch)
    run = Run(
        arm=arm.name,
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


def _execute(
    recipe: Recipe,
    updates: int,
    folder: Path,
    words: tuple[str, ...],
    environment: Mapping[str, str],
    watch: Watch,
) -> tuple[str, str]:
    """Run to the end; why it failed, or an empty string, and a note on a run that is good all the same."""
    variables = {**os.environ, "SOMASPEED": "0", **environment}  # the arm decides, not the caller

    def all_recorded() -> bool:
        done = steps.count(folder / "steps.jsonl")
        watch(folder.name, done)
        return done >= updates

    with (folder / "log.txt").open("w") as log:
        output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(words, env=variables, start_new_session=True, **output)
        try:
            outcome = _wait(child, recipe.timeout_seconds, all_recorded, cut=updates < recipe.steps)
        finally:
            _kill_group(child)
    if outcome == _CUT:
        return "", f"ended after {updates} updates, as its stop_after says"
    if outcome == _STUCK:
        return "", f"recorded every update but did not exit within {_EXIT:.0f} s, and was stopped"
    if outcome == _LATE:
        seconds = f"{recipe.timeout_seconds:.0f} s"
        return f"stopped after {seconds}, the recipe's timeout_seconds; see {folder / 'log.txt'}", ""
    return _verdict(child.returncode, folder, updates), ""


def _wait(child: subprocess.Popen[bytes], timeout: float, all_recorded: Callable[[], bool], cut: bool) -> str:
    """Look at the child until it has ended, takes too long, or has nothing left to do and stays.

    Args:
        cut: it may be ended as soon as all is recorded.
    """
    deadline, leave = time.monotonic() + timeout, float("inf")
    while time.monotonic() < deadline:
        if all_recorded():
            if cut:
                return _CUT
            leave = min(leave, time.monotonic() + _EXIT)
        try:
            child.wait(_POLL)
        except subprocess.TimeoutExpired:
            if time.monotonic() > leave:
                return _STUCK
            continue
        all_recorded()
        return _ENDED
    return _LATE


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started: asked first, then killed."""
    _signal_group(child, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE)
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all gone
        os.killpg(child.pid, number)


def _verdict(code: int, folder: Path, wanted: int) -> str:
    log, recorded = folder / "log.txt", steps.count(folder / "steps.jsonl")
    if code < 0:
        return f"killed by {signal.Signals(-code).name} after {recorded} of {wanted} updates; see {log}"
    if code > 0:
        return f"exit code {code} after {recorded} of {wanted} updates: {_last_line(log)}; see {log}"
    if recorded != wanted:
        return (
            f"ended well, but recorded {recorded} updates where the recipe's steps says {wanted}; see {log}"
        )
    return ""


def _last_line(log: Path) -> str:
    """The last line that names an exception, else the last with anything on it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return [*lines, *errors][-1].strip()[:300] if lines else "the log is empty"
