"""Success and return of episodes, with standard errors, in all and by task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from somaspeed_patch.rl.collect import Rollout
from somaspeed_patch.rl.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of an episode."""

    slot: int
    episode: int
    success: bool
    total: float
    """of its rewards, without discount"""
    env_steps: int


@dataclass(frozen=True, kw_only=True)
class Played:
    """What is said of a rollout, of one rank's share or of all."""

    outcomes: Sequence[Outcome]
    lost: int
    """environments"""
    state: tuple[int, ...]
    """of the collector, by slot"""

    @property
    def env_steps(self) -> int:
        """Of all episodes."""
        return sum(each.env_steps for each in self.outcomes)


def played(rollout: Rollout) -> Played:
    """What is said of a rollout."""
    return Played(
        outcomes=[_outcome(each) for each in rollout.trajectories],
        lost=len(rollout.failures),
        state=tuple(rollout.state),
    )


def together(shares: Iterable[Played]) -> Played:
    """The ranks' shares, in their order, as if one process had played all slots."""
    every = list(shares)
    outcomes = [outcome for each in every for outcome in each.outcomes]
    return Played(
        outcomes=sorted(outcomes, key=lambda each: (each.episode, each.slot)),
        lost=sum(each.lost for each in every),
        state=tuple(begun for each in every for begun in each.state),
    )


def _outcome(trajectory: Trajectory) -> Outcome:
    return Outcome(
        slot=trajectory.env,
        episode=trajectory.episode,
        success=trajectory.success,
        total=sum(float(chunk.rewards.sum()) for chunk in trajectory.chunks),
        env_steps=trajectory.env_steps,
    )


def share(outcomes: Sequence[bool]) -> dict[str, float]:
    """Of the episodes that solved their task: `success`, its `standard_error`, `episodes`."""
    found, count = float(np.mean(outcomes)), len(outcomes)
    return {
        "success": found,
        "standard_error": math.sqrt(found * (1 - found) / count),
        "episodes": float(count),
    }


def by_task(found: Sequence[Outcome], tasks: Sequence[int]) -> Mapping[str, Mapping[str, float]]:
    """`share` of each task.

    Args: tasks: of each slot.
    """
    outcomes: dict[int, list[bool]] = {}
    for each in found:
        outcomes.setdefault(tasks[each.slot], []).append(each.success)
    return {str(task): share(outcomes[task]) for task in sorted(outcomes)}


def of(found: Sequence[Outcome], tasks: Sequence[int]) -> dict[str, Any]:
    """What is said of a set of episodes."""
    return {**share([each.success for each in found]), "tasks": by_task(found, tasks)}


def mean_return(found: Sequence[Outcome]) -> float:
    """Of the rewards of an episode, without discount."""
    return float(np.mean([each.total for each in found]))
