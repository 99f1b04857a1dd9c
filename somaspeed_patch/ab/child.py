"""One child process: run it to its end, watch its updates, say in words why it failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import steps

Watch = Callable[[str, int], None]  # called with a run's label and its updates so far

OUT_OF_MEMORY = "out of memory"
_NO_MEMORY = r"OutOfMemoryError|out of memory|MemoryError|not enough memory|can't allocate memory"
_PID = "pid"
_ENDED, _LATE, _STUCK, _CUT = "ended", "late", "stuck", "cut"
_POLL = 0.2  # seconds between two looks at a run
_EXIT = 60.0  # seconds from the last update to the end; gloo with two ranks hangs there in one run of ten
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def execute(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    updates: int,
    cut: bool,
    timeout: float,
    watch: Watch,
) -> tuple[str, str]:
    """Run to the end; why it failed, or an empty string, and a note on a run that is good all the same.

    Args:
        words: the command.
        environment: variables on top of this process's.
        folder: for its log and its updates.
        updates: that it must record.
        cut: whether it is ended as soon as it has.
        timeout: seconds.
        watch: told the folder's name and the updates so far, a few times a second.
    """
    variables = {**os.environ, "SOMASPEED": "0", **environment}  # the arm decides, not the caller

    def all_recorded() -> bool:
        done = steps.count(folder / "steps.jsonl")
        watch(folder.name, done)
        return done >= updates

    with (folder / "log.txt").open("w") as log:
        output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(words, env=variables, start_new_session=True, **output)
        (folder / _PID).write_text(str(child.pid))
        try:
            outcome = _wait(child, timeout, all_recorded, cut)
        finally:
            _kill_group(child)
    if outcome == _CUT:
        return "", f"ended after {updates} updates"
    if outcome == _STUCK:
        return "", f"recorded every update but did not exit within {_EXIT:.0f} s, and was stopped"
    if outcome == _LATE:
        return f"stopped after {timeout:.0f} s, the recipe's timeout_seconds; see {folder / 'log.txt'}", ""
    return _verdict(child.returncode, folder, updates, cut), ""


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


def end_orphan(folder: Path) -> None:
    """End the run in `folder` whose parent was killed and that is still at work; on Linux, which can tell."""
    file = folder / _PID
    if not file.is_file():
        return
    pid = int(file.read_text())
    words = Path(f"/proc/{pid}/cmdline")
    with suppress(OSError):  # it has ended
        if str(folder).encode() in words.read_bytes():  # not another process that was given the number since
            os.killpg(pid, signal.SIGKILL)


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


def _verdict(code: int, folder: Path, wanted: int, cut: bool) -> str:
    log, recorded = folder / "log.txt", steps.count(folder / "steps.jsonl")
    if code < 0:
        name = signal.Signals(-code).name
        perhaps = " (a system that lacks memory does that)" if code == -signal.SIGKILL else ""
        return f"killed by {name}{perhaps} after {recorded} of {wanted} updates; see {log}"
    if code > 0 and (why := _out_of_memory(log)):
        return f"{OUT_OF_MEMORY} after {recorded} of {wanted} updates: {why}; see {log}"
    if code > 0:
        return f"exit code {code} after {recorded} of {wanted} updates: {_last_line(log)}; see {log}"
    if recorded < wanted or (recorded > wanted and not cut):  # a cut run may get further
        return (
            f"ended well, but recorded {recorded} updates where the recipe's steps says {wanted}; see {log}"
        )
    return ""


def _last_line(log: Path) -> str:
    """The last line that names an exception, else the last with anything on it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return [*lines, *errors][-1].strip()[:300] if lines else "the log is empty"


def _out_of_memory(log: Path) -> str:
    """The last line of the log that says so, else an empty string."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line.strip() for line in lines if re.search(_NO_MEMORY, line)]
    return said[-1][:300] if said else ""
