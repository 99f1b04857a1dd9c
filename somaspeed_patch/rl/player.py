"""Who plays the rollouts: a collector and an actor of this process, or the same roles somewhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.collect import Collector, Rollout
from somaspeed_patch.rl.phases import Phases


class Player(Protocol):
    """Plays one rollout after the other, each with one version of the weights."""

    def play(self, weights: Mapping[str, Tensor], version: int, phases: Phases) -> Rollout:
        """Take over published weights, then play a rollout with them.

        Args:
            weights: see `heads.snapshot`; not changed by anybody.
            phases: where the time is counted.
        Raises: RuntimeError: an environment was lost too often, or `stop` was called.
        """

    def stop(self) -> None:
        """Let `play`, in another thread, end with an error soon."""

    def resume(self, state: Sequence[int]) -> None:
        """Go on behind the rollout whose `state` this is."""


class LocalPlayer:
    """A collector and an actor with weights of its own."""

    def __init__(self, collector: Collector, actor: Actor) -> None:
        self.collector, self.actor = collector, actor

    def play(self, weights: Mapping[str, Tensor], version: int, phases: Phases) -> Rollout:
        """See `Player`."""
        with phases.of("sync"):
            self.actor.load(weights, version)
        return self.collector.collect(self.actor, phases)

    def stop(self) -> None:
        """See `Player`."""
        self.collector.stop()

    def resume(self, state: Sequence[int]) -> None:
        """See `Player`."""
        self.collector.resume(state)


def device_of(player: Player) -> torch.device:
    """Where published weights are read: staged there, taking them over costs no transfer."""
    return player.actor.policy.device if isinstance(player, LocalPlayer) else torch.device("cpu")
