"""Rollouts in Ray actors, on this machine or others: a `RayPlayer` plays what one `LocalPlayer` would.

    driver:  puts the weights into Ray's object store, once, and asks every worker for its share
    worker:  takes them over, plays its slots' episodes in its own environments; the features stay where it
             put them until the learner reads them          (see `ray_worker`)
    driver:  merges the shares by episode and slot

    ray.init()
    with RayPlayer(make_player, 4, options=WorkerOptions(num_cpus=16, num_gpus=1)) as player:
        with SideBySide(learner, player, lag=1) as run: ...

Slots are numbered through all workers, and what is random in an episode depends on seed, slot and number
alone: the episodes are those of one pool with all the slots. One worker's numbers are a local player's bit
for bit, given as many threads (Ray sets OMP_NUM_THREADS to `num_cpus` where it is not set). With several,
sums may round otherwise, as each worker batches its own slots; each films its own first episodes, too.

A worker that is lost, by its process or its machine, has a successor that plays its share again with the same
version: a share depends on weights and states alone, so nothing is played twice and nothing is missing.
"""

from __future__ import annotations

import logging
import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor

from somaspeed_patch.rl.closes import Closes
from somaspeed_patch.rl.collect import Rollout
from somaspeed_patch.rl.env_pool import Failed
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.ray_worker import MakePlayer, Played, Started, Worker, packed, unpacked

log = logging.getLogger(__name__)

_WORKED = ("env", "predict", "sync")  # the phases of a worker


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What Ray gives to each worker."""

    num_cpus: float = 1.0
    """of its machine's, environments included; a number in Ray's books, and the threads of inference"""
    num_gpus: float = 0.0
    """0 hides the machine's GPUs from inference"""
    resources: Mapping[str, float] = field(default_factory=dict)
    """others, by the names that machines were started with"""
    placement: Any = None
    """Ray's `scheduling_strategy`: "SPREAD", or one of a placement group or machine; None: Ray's choice"""
    runtime_env: Mapping[str, Any] | None = None
    """of its process: variables, packages, working directory. somaspeed_patch must be importable in it"""

    def of_ray(self) -> dict[str, Any]:
        """By Ray's names. A lost worker is not Ray's to restart: its successor has to be started by us."""
        return {
            "num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources),
            "scheduling_strategy": self.placement, "max_restarts": 0,
            "runtime_env": None if self.runtime_env is None else dict(self.runtime_env),
        }  # fmt: skip


@dataclass
class _Remote:
    """A worker as the driver knows it."""

    number: int
    handle: Any = None
    first_slot: int = 0
    state: list[int] = field(default_factory=list)
    """of its collector behind the last whole rollout"""
    losses: list[str] = field(default_factory=list)


class RayPlayer(Closes):
    """A `Player` of N workers; a context manager. Its `play` is for one thread at a time."""

    def __init__(
        self,
        make_player: MakePlayer,
        workers: int = 1,
        *,
        options: WorkerOptions | None = None,
        max_restarts: int = 3,
        start_timeout: float = 600.0,
    ) -> None:
        """Start all workers at once and wait until each has its player.

        Args:
            make_player: picklable; called with a worker's number and how many there are, in that worker's
                process. Patches, loads the policy, makes the environments: what is made here is not there.
            workers: N, at least 1.
            max_restarts: of each worker, over the player's life.
            start_timeout: seconds for a worker to get its resources and make its player.
        Raises: ImportError: Ray is not installed. ValueError: a number is out of range. RuntimeError: Ray is
            not initialised, or a worker could not be started; the player is closed then.
        """
        if workers < 1 or max_restarts < 0:
            raise ValueError(
                "rl: RayPlayer needs workers of at least 1 and max_restarts of at least 0, "
                f"but they are {workers} and {max_restarts}"
            )
        self._ray = _initialised()
        self._max_restarts, self._start_timeout = max_restarts, start_timeout
        self._options = options or WorkerOptions()
        self._class = self._ray.remote(Worker).options(**self._options.of_ray())
        self._make_player = self._ray.put(make_player)  # once, for it may hold a policy
        self._workers = [_Remote(number) for number in range(workers)]
        self._lost: list[Failed] = []  # in this rollout
        self._ended: str | None = None
        self._lock = threading.Lock()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every worker, and with it its environments; calling it again is harmless."""
        self._end("closed")

    def stop(self) -> None:
        """See `Player`. Ends the workers: what plays hears nothing, and Ray waits for nothing else."""
        self._end("stopped")

    def resume(self, state: Sequence[int]) -> None:
        """See `Player`; of a rollout with as many slots, however many workers played it."""
        if len(state) != self._slots:
            raise ValueError(f"rollout: a state of {len(state)} slots for {self._slots}")
        for worker in self._workers:
            begin = worker.first_slot
            worker.state = list(state[begin : begin + len(worker.state)])

    def play(self, weights: Mapping[str, Tensor], version: int, phases: Phases) -> Rollout:
        """See `Player`.

        Args:
            phases: gets the workers' mean of env, predict and sync; the rest, until the last worker's share
                is here, is wait.
        Raises: RuntimeError: a worker was lost too often, raised or played another version; `stop` or
            `close` was called. Says which worker and at what.
        """
        self._check_running()
        self._lost = []
        with phases.of("sync"):
            given = self._ray.put(packed(dict(weights)))
        with phases.of("wait"):
            shares = self._shares(given, version)
        _count(phases, [share.seconds for share in shares])
        for worker, share in zip(self._workers, shares, strict=True):
            worker.state = share.rollout.state
        return _merged([share.rollout for share in shares], self._lost)

    @property
    def _slots(self) -> int:
        return sum(len(worker.state) for worker in self._workers)

    def _start(self) -> None:
        asked = [(worker, self._begin(worker)) for worker in self._workers]
        for worker, ref in asked:
            worker.state = self._started(worker, ref).state
        firsts = accumulate((len(worker.state) for worker in self._workers), initial=0)
        for worker, first in zip(self._workers, firsts, strict=False):
            worker.first_slot = first

    def _begin(self, worker: _Remote) -> Any:
        """A process for a worker; what its `start` will answer."""
        with self._lock:  # an actor that `stop` does not see would live on
            self._check_running()
            worker.handle = self._class.remote()
        return worker.handle.start.remote(self._make_player, worker.number, len(self._workers))

    def _started(self, worker: _Remote, ref: Any) -> Started:
        answer: Started | None = None
        while answer is None:
            answer = self._answer(worker, "start", ref, self._start_timeout)
            if answer is None:
                ref = self._begin(worker)
        log.info("%s is process %d with %d slots", self._name(worker), answer.process, len(answer.state))
        return answer

    def _start_again(self, worker: _Remote) -> None:
        slots = len(self._started(worker, self._begin(worker)).state)
        if slots != len(worker.state):
            raise RuntimeError(
                f"rl: {self._name(worker)} had {len(worker.state)} slots before it was lost, but its "
                f"successor has {slots}; make_player must give the same number each time"
            )

    def _shares(self, given: Any, version: int) -> list[Played]:
        """Of all workers, in their order."""
        stage = f"play of version {version}"
        pending = {self._ask(worker, given, version): worker for worker in self._workers}
        shares: dict[int, Played] = {}
        while pending:
            [ref], _ = self._ray.wait(list(pending), num_returns=1)
            worker = pending.pop(ref)
            answer = self._answer(worker, stage, ref)
            if answer is None:
                self._start_again(worker)
                pending[self._ask(worker, given, version)] = worker
            else:
                shares[worker.number] = self._checked(worker, unpacked(answer), version)
        return [shares[worker.number] for worker in self._workers]

    def _ask(self, worker: _Remote, given: Any, version: int) -> Any:
        return worker.handle.play.remote(given, version, worker.state, worker.first_slot)

    def _checked(self, worker: _Remote, share: Played, version: int) -> Played:
        played = sorted({each.version for each in share.rollout.trajectories})
        if played != [version]:
            raise RuntimeError(
                f"rl: {self._name(worker)} was asked to play version {version}, but played {played}"
            )
        return share

    def _answer(self, worker: _Remote, stage: str, ref: Any, timeout: float | None = None) -> Any:
        """What a worker says; None: it is lost, and may have a successor."""
        from ray import exceptions as of_ray

        lost = (of_ray.RayActorError, of_ray.ObjectLostError, of_ray.OutOfMemoryError, of_ray.NodeDiedError)
        try:
            return self._ray.get(ref, timeout=timeout)
        except of_ray.GetTimeoutError:
            raise RuntimeError(self._unstarted(worker)) from None
        except lost as error:
            self._lose(worker, stage, textwrap.shorten(str(error).strip().splitlines()[-1], 240))
        except of_ray.RayError as error:
            cause = getattr(error, "cause", error)
            name = self._name(worker)
            raise RuntimeError(f"rl: {name} failed in {stage}: {type(cause).__name__}: {cause}") from error
        return None

    def _lose(self, worker: _Remote, stage: str, reason: str) -> None:
        """Count a loss. Raises: RuntimeError: there were too many, or it was our own doing."""
        self._check_running()
        self._ray.kill(worker.handle)  # one that is only out of reach would come back and play on
        worker.losses.append(f"{stage}: {reason}")
        name, count = self._name(worker), len(worker.losses)
        log.warning("%s was lost in %s: %s", name, stage, reason)
        if count > self._max_restarts:
            raise RuntimeError(
                f"rl: {name} was lost {count} times, which is too often; " + "; ".join(worker.losses)
            )
        self._lost += [
            Failed(slot=worker.first_slot + slot, stage=stage, reason=f"{name} was lost: {reason}")
            for slot in range(len(worker.state))
        ]

    def _unstarted(self, worker: _Remote) -> str:
        asked = {name: each for name, each in self._options.of_ray().items() if name in _BOOKED and each}
        free = {name: each for name, each in self._ray.available_resources().items() if ":" not in name}
        return (
            f"rl: {self._name(worker)} has not started within {self._start_timeout:g} s; each asks Ray for "
            f"{asked}, and free are now {free}: ask for less, or allow more time if make_player takes longer"
        )

    def _name(self, worker: _Remote) -> str:
        return f"Ray worker {worker.number} of {len(self._workers)}"

    def _check_running(self) -> None:
        if self._ended is not None:
            raise RuntimeError(f"rollout: {self._ended}")

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
            handles = [worker.handle for worker in self._workers if worker.handle is not None]
        if self._ray.is_initialized():  # else they are gone, and asking would start Ray anew
            for handle in handles:
                self._ray.kill(handle)


_BOOKED = ("num_cpus", "num_gpus", "resources")  # options that a machine can be short of


def _initialised() -> Any:
    """The module. Raises: ImportError, RuntimeError: it is not there, or not initialised."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("rl: RayPlayer needs Ray; pip install 'somaspeed-patch[ray]'") from error
    if not ray.is_initialized():
        raise RuntimeError("rl: RayPlayer needs Ray to be initialised; call ray.init() first")
    return ray


def _merged(rollouts: Sequence[Rollout], lost: Sequence[Failed]) -> Rollout:
    """Shares in the workers' order as one rollout, in a collector's order."""
    trajectories = [each for rollout in rollouts for each in rollout.trajectories]
    return Rollout(
        trajectories=sorted(trajectories, key=lambda each: (each.episode, each.env)),
        failures=[*(each for rollout in rollouts for each in rollout.failures), *lost],
        state=[each for rollout in rollouts for each in rollout.state],
        films=[each for rollout in rollouts for each in rollout.films],
    )


def _count(phases: Phases, seconds: Sequence[Mapping[str, float]]) -> None:
    """Add the workers' means, and take them from the wait that they were: the sum stays the time taken."""
    means = {name: sum(each[name] for each in seconds) / len(seconds) for name in _WORKED}
    phases.add({**means, "wait": -sum(means.values())})
