"""A player whose environments somebody else may have between two rollouts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.collect import Collector, Rollout
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.player import LocalPlayer


class TurnPlayer(LocalPlayer):
    """Evaluations take turns with rollouts: no second set of environments, no rollout is thrown away."""

    def __init__(self, collector: Collector, actor: Actor) -> None:
        super().__init__(collector, actor)
        self._turn = threading.Condition()
        self._wanted = self._playing = self._stopping = False

    def play(self, weights: Mapping[str, Tensor], version: int, phases: Phases) -> Rollout:
        """See `Player`; waits while `paused`."""
        with phases.of("wait"), self._turn:
            self._turn.wait_for(lambda: self._stopping or not self._wanted)
            self._playing = True
        try:
            return super().play(weights, version, phases)
        finally:
            with self._turn:
                self._playing = False
                self._turn.notify_all()

    def stop(self) -> None:
        """See `Player`."""
        super().stop()
        with self._turn:
            self._stopping = True
            self._turn.notify_all()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[None]:
        """Inside, no rollout is played; the one that is being played ends first.

        Args: timeout: seconds for it to end.
        Raises: RuntimeError: it did not.
        """
        try:
            with self._turn:
                self._wanted = True
                if not self._turn.wait_for(lambda: not self._playing, timeout):
                    raise RuntimeError(
                        f"rl: the rollout before an evaluation did not end within {timeout:g} s"
                    )
            yield
        finally:
            with self._turn:
                self._wanted = False
                self._turn.notify_all()
