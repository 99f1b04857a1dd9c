"""PPO iterations: rollout, learner and publication, one behind the other or side by side.

Side by side, rollout number r begins as soon as version r - lag is published, and plays with the newest one
that there is then. The learner takes the rollouts in order and makes version r + 1 of number r: no sample is
ever older than `lag` versions, and each is trained on exactly `update_epoch` times. With a lag of 0 nothing
overlaps, and the result is that of one behind the other, bit for bit.

    learner:  takes rollout r from the queue          waits for: the rollout's thread
              trains, publishes version r + 1
    rollout:  begins number r                         waits for: version r - lag, which the learner frees
              takes over the newest heads, plays, puts its trajectories into the queue
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, Queue

from torch import Tensor

from somaspeed_patch.rl import heads, streams
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.closes import Closes
from somaspeed_patch.rl.collect import Collector, Rollout
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.player import LocalPlayer, Player, device_of

_CLOSING = (
    30.0  # s for the rollout's thread to see that it is to end; an environment that hangs is left to it
)

Waiting = Callable[[], AbstractContextManager[object]]
"""What goes around the main thread's waiting for a rollout: nothing else of an iteration may be interrupted
where several ranks train, for the others would wait for this one."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one PPO iteration did."""

    number: int
    rollout: Rollout
    metrics: Mapping[str, float]
    """by CleanRL's names"""
    seconds: Mapping[str, Mapping[str, float]]
    """by thread of work and phase, since the iteration before"""


def one_behind_the_other(
    learner: Learner, collector: Collector, actor: Actor, *, waiting: Waiting = nullcontext
) -> Iterator[Iteration]:
    """Iterations for as long as they are asked for. Of several ranks each has its own collector and actor.

    Args:
        actor: with its own weights, or the learner's policy and value head themselves.
        waiting: goes around each rollout.
    """
    phases = Phases("run")
    while True:
        _take_over(actor, learner, phases)
        with waiting():
            rollout = collector.collect(actor, phases)
        with phases.of("train"):
            metrics = learner.iterate(rollout.trajectories)
        yield Iteration(
            number=learner.version - 1, rollout=rollout, metrics=metrics, seconds={"run": phases.taken()}
        )
        del rollout  # not kept while the next one is played: two may not fit


def _take_over(actor: Actor, learner: Learner, phases: Phases) -> None:
    with phases.of("sync"):
        if actor.policy is learner.policy:
            actor.version = learner.version
        else:
            actor.load(heads.whole(learner.policy, learner.value_head), learner.version)


def _shared(actor: Actor, learner: Learner) -> bool:
    return actor.policy is learner.policy or actor.value_head is learner.value_head


class SideBySide(Closes):
    """Iterations whose rollouts are played while the learner trains; a context manager."""

    def __init__(
        self,
        learner: Learner,
        player: Player,
        *,
        lag: int = 1,
        stall: float = 600.0,
        waiting: Waiting = nullcontext,
    ) -> None:
        """Begin to play. Of several ranks each has a player of its own, and all do this at once.

        Args:
            player: with weights of its own, see `FlowPolicy.twin`.
            lag: versions that a sample may be behind the policy that is trained on it.
            stall: seconds without a rollout after which the run ends with an error.
            waiting: goes around waiting for a rollout.
        Raises: ValueError: lag is negative, or player and learner share weights.
        """
        if lag < 0:
            raise ValueError(f"rl: lag must be 0 or more, but is {lag}")
        if isinstance(player, LocalPlayer) and _shared(player.actor, learner):
            raise ValueError("rl: rollout and learner need weights of their own to run side by side")
        self._learner, self._player = learner, player
        self._lag, self._stall, self._waiting = lag, stall, waiting
        self._queue: Queue[Rollout | BaseException] = Queue(maxsize=lag + 1)
        self._published = self._staging()
        self._news = threading.Condition()
        self._stopping = False
        self._phases = {who: Phases(who) for who in ("learner", "rollout")}
        self._thread = threading.Thread(target=self._play, name="rollout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the rollout's thread at its next chunk; what it played is dropped."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self._player.stop()
        self._thread.join(timeout=min(_CLOSING, self._stall))

    def __iter__(self) -> Iterator[Iteration]:
        """Iterations for as long as they are asked for.

        Raises: RuntimeError: no rollout came for `stall` seconds, or the rollout failed; says where it is.
        """
        phases = self._phases["learner"]
        while True:
            rollout = self._next(phases)
            with phases.of("train"):
                metrics = self._learner.iterate(rollout.trajectories)
            with phases.of("sync"):
                self._publish()
            yield Iteration(
                number=self._learner.version - 1,
                rollout=rollout,
                metrics={**metrics, "charts/queue": float(self._queue.qsize())},
                seconds={who: each.taken() for who, each in self._phases.items()},
            )
            del rollout  # not kept while the next one is waited for

    def _next(self, phases: Phases) -> Rollout:
        try:
            with self._waiting(), phases.of("wait"):
                found = self._queue.get(timeout=self._stall)
        except Empty:
            where = self._phases["rollout"].doing()
            raise RuntimeError(f"rl: no rollout for {self._stall:g} s; {where}") from None
        if isinstance(found, BaseException):
            raise RuntimeError(f"rl: the rollout failed: {found}") from found
        return found

    def _publish(self) -> None:
        staged = self._staging()
        with self._news:
            self._published = staged
            self._news.notify_all()

    def _staging(self) -> tuple[int, dict[str, Tensor]]:
        """A coherent copy of the weights, under the version that the learner has now."""
        learner = self._learner
        copy = heads.snapshot(learner.policy, learner.value_head, device_of(self._player))
        streams.wait(learner.policy.device)  # the rollout's stream reads them
        return learner.version, copy

    def _play(self) -> None:
        number = self._learner.version
        try:
            with streams.own(device_of(self._player)):
                self._play_from(number)
        except BaseException as error:  # the learner's thread raises it
            if not self._stopping:
                self._queue.put(error)

    def _play_from(self, number: int) -> None:
        while (staged := self._staged(number)) is not None:
            version, weights = staged
            self._queue.put(self._player.play(weights, version, self._phases["rollout"]))
            number += 1

    def _staged(self, number: int) -> tuple[int, dict[str, Tensor]] | None:
        """The newest version, once it is new enough for a rollout; None when the run ends."""
        with self._phases["rollout"].of("wait"), self._news:
            self._news.wait_for(lambda: self._stopping or number <= self._published[0] + self._lag)
            return None if self._stopping else self._published
