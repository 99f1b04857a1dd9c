"""Success and return of episodes, with standard errors, in all and by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from somaspeed_patch.rl.trajectory import Trajectory


def share(outcomes: Sequence[bool]) -> dict[str, float]:
    """Of the episodes that solved their task: `success`, its `standard_error`, `episodes`."""
    found, count = float(np.mean(outcomes)), len(outcomes)
    return {
        "success": found,
        "standard_error": math.sqrt(found * (1 - found) / count),
        "episodes": float(count),
    }


def by_task(trajectories: Sequence[Trajectory], tasks: Sequence[int]) -> Mapping[str, Mapping[str, float]]:
    """`share` of each task.

    Args: tasks: of each slot.
    """
    outcomes: dict[int, list[bool]] = {}
    for each in trajectories:
        outcomes.setdefault(tasks[each.env], []).append(each.success)
    return {str(task): share(outcomes[task]) for task in sorted(outcomes)}


def of(trajectories: Sequence[Trajectory], tasks: Sequence[int]) -> dict[str, Any]:
    """What is said of a set of episodes."""
    return {**share([each.success for each in trajectories]), "tasks": by_task(trajectories, tasks)}


def mean_return(trajectories: Sequence[Trajectory]) -> float:
    """Of the rewards of an episode, without discount."""
    totals = [sum(float(chunk.rewards.sum()) for chunk in each.chunks) for each in trajectories]
    return float(np.mean(totals))
