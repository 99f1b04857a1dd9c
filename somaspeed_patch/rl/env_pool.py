"""Environment processes side by side: each slot runs its own episode, and none waits for another.

    with EnvPool([EnvSpec(task=0, horizon=240)] * 8) as pool:
        for slot in range(8):
            pool.submit_reset(slot, init_state=slot)
        while ...:
            for slot, result in pool.ready():
                ...  # an Observation, a Chunk or a Failed; then submit_step or submit_reset for this slot

A worker that dies, raises or does not answer in time is killed and built anew in the background, and its
slot's result is a `Failed` that says what happened: simulators do hang (MuJoCo's EGL read-back with many
renderers) and abort, and a rollout should lose one episode by that, not the run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from somaspeed_patch.rl.closes import Closes
from somaspeed_patch.rl.env_process import Chunk, EnvSpec, Observation, check_actions, main

log = logging.getLogger(__name__)

_GRACE = 1.0  # s for a worker to end by itself when the pool closes; one that builds its scene is killed


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The result of a slot whose worker was lost; a new one is on its way, so reset the slot and go on."""

    slot: int
    stage: str
    """What it was doing: "start", "reset" or "step"."""
    reason: str
    """The signal that killed it, the exit code, the time it did not answer in, or its traceback."""


Result = Observation | Chunk | Failed


@dataclass
class _Worker:
    """One slot: its process, and what was asked of it."""

    slot: int
    spec: EnvSpec
    process: SpawnProcess | None = None
    pipe: Connection | None = None
    stage: str = "start"
    deadline: float = float("inf")
    request: tuple[Any, ...] | None = None  # waits for the start, or is being answered
    episode: bool = False  # whether a reset was answered, so that steps make sense
    failures: list[str] = field(default_factory=list)

    @property
    def starting(self) -> bool:
        return self.stage == "start"


class EnvPool(Closes):
    """One process a slot. Not for use by several threads at once; create it in a thread that outlives it."""

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        *,
        step_timeout: float = 120.0,
        start_timeout: float = 300.0,
        max_respawns: int = 3,
    ) -> None:
        """Start all workers at once and wait until each has built its scene.

        Args:
            specs: one a slot.
            step_timeout: seconds for an answer to a reset or a chunk.
            start_timeout: seconds for a worker to build its scene: 10 s alone, several times that when many
                start together on few cores.
            max_respawns: of each slot, over the pool's life.
        Raises: RuntimeError: a worker could not be started; the pool is closed then.
        """
        if not specs:
            raise ValueError("EnvPool: needs at least one spec")
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._max_respawns = max_respawns
        self._context = multiprocessing.get_context("spawn")
        self._workers = [_Worker(slot, spec) for slot, spec in enumerate(specs)]
        self._close = weakref.finalize(self, _stop, self._workers)  # runs at the interpreter's end, too
        try:
            for worker in self._workers:
                self._start(worker)
            self._wait_for_starts()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._workers)

    def close(self) -> None:
        """End every worker; calling it again is harmless."""
        self._close()

    def submit_reset(self, slot: int, init_state: int, seed: int = 0, *, filmed: bool = False) -> None:
        """Ask a slot for a new episode; the result is an `Observation`.

        Args:
            init_state: index into the task's initial states.
            seed: places what an initial state does not contain, see `Simulator.reset`.
            filmed: render every step of the episode, see `Chunk.pictures`.
        Raises: ValueError: the slot still owes a result. RuntimeError: the pool is closed.
        """
        worker = self._idle(slot)
        worker.episode = False
        self._request(worker, ("reset", init_state, seed, filmed))

    def submit_step(self, slot: int, actions: ArrayLike) -> None:
        """Ask a slot to execute an action chunk; the result is a `Chunk`.

        Args: actions: [C, 7] in [-1, 1], any C; copied.
        Raises: ValueError: the slot still owes a result, or has no episode, or the actions are no finite
            [C, 7]. RuntimeError: the pool is closed.
        """
        worker, chunk = self._idle(slot), np.array(actions, np.float32)
        check_actions(chunk)
        if not worker.episode:
            raise ValueError(f"EnvPool: slot {slot} has no episode; call submit_reset first")
        self._request(worker, ("step", chunk))

    def ready(self, timeout: float | None = None) -> list[tuple[int, Result]]:
        """The results that have come in since the last call, at least one unless the time is up.

        Args: timeout: seconds; None waits as long as the workers may take.
        Returns: (slot, result), each slot at most once; [] after `timeout`, and where no slot owes a result.
        Raises: RuntimeError: a slot's worker was lost more than `max_respawns` times. Its reasons are named.
        """
        self._check_open()
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        results: list[tuple[int, Result]] = []
        while not results and self.owed:
            self._wait(until)
            for worker in self._workers:
                result = self._collect(worker)
                if result is not None:
                    results.append((worker.slot, result))
            if time.monotonic() >= until:
                break
        return results

    @property
    def owed(self) -> tuple[int, ...]:
        """The slots whose result is still to come."""
        return tuple(worker.slot for worker in self._workers if worker.request is not None)

    def _idle(self, slot: int) -> _Worker:
        self._check_open()
        worker = self._workers[slot]
        if worker.request is not None:
            raise ValueError(f"EnvPool: slot {slot} still owes the result of its last {worker.request[0]}")
        return worker

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError("EnvPool: is closed")

    def _start(self, worker: _Worker) -> None:
        worker.pipe, theirs = self._context.Pipe()
        by_kernel = (
            threading.current_thread() is threading.main_thread()
        )  # else it would end with this thread
        worker.process = self._context.Process(
            target=main,
            args=(theirs, worker.spec, os.getpid()),
            kwargs={"die_with_parent": by_kernel},
            name=f"env-{worker.slot}",
            daemon=True,
        )
        worker.process.start()
        theirs.close()  # the child has its own, so that its death ends the pipe
        worker.stage, worker.deadline = "start", time.monotonic() + self._start_timeout

    def _wait_for_starts(self) -> None:
        while any(worker.starting for worker in self._workers):
            self._wait(float("inf"))
            for worker in self._workers:
                self._collect(worker)

    def _request(self, worker: _Worker, request: tuple[Any, ...]) -> None:
        worker.request = request
        if not worker.starting:
            self._send(worker)

    def _send(self, worker: _Worker) -> None:
        """Hand over the request; one that arrives at a dead worker is found out by `_collect`."""
        if worker.request is None or worker.pipe is None:
            return
        worker.stage, worker.deadline = worker.request[0], time.monotonic() + self._step_timeout
        try:
            worker.pipe.send(worker.request)
        except (BrokenPipeError, ConnectionResetError):
            log.debug("env %d is gone before its %s", worker.slot, worker.stage)

    def _wait(self, until: float) -> None:
        """Sleep until a busy worker says something or dies, one is out of time, or `until`."""
        busy = [worker for worker in self._workers if worker.starting or worker.request is not None]
        until = min([until, *(worker.deadline for worker in busy)])
        pipes = [worker.pipe for worker in busy if worker.pipe is not None]
        deaths = [worker.process.sentinel for worker in busy if worker.process is not None]
        wait([*pipes, *deaths], None if until == float("inf") else max(0.0, until - time.monotonic()))

    def _collect(self, worker: _Worker) -> Result | None:
        """What this worker has to say by now, if anything."""
        if worker.pipe is None or not (worker.starting or worker.request is not None):
            return None
        if not worker.pipe.poll():
            reason = self._silence(worker)
            return self._lose(worker, reason) if reason else None
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._lose(worker, _how_it_ended(worker))
        if kind == "failed":
            return self._lose(worker, content)
        return self._answered(worker, content)

    def _answered(self, worker: _Worker, content: Any) -> Result | None:
        if worker.starting:
            worker.stage, worker.deadline = "idle", float("inf")
            self._send(worker)
            return None
        worker.stage, worker.request, worker.deadline = "idle", None, float("inf")
        worker.episode = not (isinstance(content, Chunk) and content.done)
        result: Result = content
        return result

    def _silence(self, worker: _Worker) -> str | None:
        """Why this worker will say nothing, None while it still may."""
        if worker.process is not None and worker.process.exitcode is not None:
            return _how_it_ended(worker)
        if time.monotonic() < worker.deadline:
            return None
        allowed = self._start_timeout if worker.starting else self._step_timeout
        return f"did not answer within {allowed:g} s; killed"

    def _lose(self, worker: _Worker, reason: str) -> Failed | None:
        """Kill a worker and start its successor; the slot's result is a failure if a request was under way.

        A request that a worker did not live to receive stays for the successor.
        """
        stage = worker.stage
        _kill(worker)
        worker.failures.append(f"{stage}: {reason}")
        log.warning("env %d lost in %s: %s", worker.slot, stage, reason)
        if len(worker.failures) > self._max_respawns:
            raise RuntimeError(_given_up(worker))
        self._start(worker)
        if stage == "start":
            return None
        worker.request, worker.episode = None, False
        return Failed(slot=worker.slot, stage=stage, reason=reason)


def _given_up(worker: _Worker) -> str:
    spec, count = worker.spec, len(worker.failures)
    which = f"env {worker.slot} ({spec.suite} task {spec.task})"
    return f"EnvPool: {which} was lost {count} times, which is too often; " + "; ".join(worker.failures)


def _how_it_ended(worker: _Worker) -> str:
    """Words for the exit of a process whose pipe has ended."""
    if worker.process is None:
        return "never started"
    worker.process.join(_GRACE)
    code = worker.process.exitcode
    if code is None:
        return "closed its pipe"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _kill(worker: _Worker) -> None:
    if worker.pipe is not None:
        worker.pipe.close()
    if worker.process is not None:
        worker.process.kill()
        worker.process.join()
        worker.process.close()
    worker.pipe = worker.process = None


def _stop(workers: Sequence[_Worker]) -> None:
    """Let every worker see the end of its pipe, and kill those that go on."""
    for worker in workers:
        if worker.pipe is not None:
            worker.pipe.close()
    until = time.monotonic() + _GRACE
    for worker in workers:
        if worker.process is not None:
            worker.process.join(max(0.0, until - time.monotonic()))
        _kill(worker)
        worker.request = None
