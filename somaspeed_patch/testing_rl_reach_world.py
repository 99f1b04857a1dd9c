"""A world that a small policy learns in seconds: move a point to a goal, nothing else.

The state is the point and the goal [4]; an action's first two numbers, at most 1, move the point by 0.2 each.
It is solved within 0.25 of the goal. In processes like the real one, see `env_process`; without torch, whose
import would take each of them three seconds.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from somaspeed_patch.rl.env_process import EnvSpec, Observation

FACTORY = f"{__name__}:ReachWorld"
MORTAL = f"{__name__}:MortalWorld"
SPEC = EnvSpec(suite="reach", horizon=6, factory=FACTORY)


class ReachWorld:
    """See the module."""

    def __init__(self, _: EnvSpec) -> None:
        self._point: NDArray[np.float64] = np.zeros(2)
        self._goal: NDArray[np.float64] = np.zeros(2)

    def reset(self, init_state: int, seed: int) -> None:
        """Point and goal by the initial state's number."""
        rng = np.random.default_rng([init_state, seed])
        self._point, self._goal = rng.uniform(-0.5, 0.5, 2), rng.uniform(-0.5, 0.5, 2)

    def step(self, action: NDArray[np.float32]) -> bool:
        """Move."""
        self._point = self._point + 0.2 * np.clip(action[:2], -1, 1)
        return bool(np.linalg.norm(self._point - self._goal) < 0.25)

    def observe(self) -> Observation:
        """The state."""
        return {"state": np.concatenate([self._point, self._goal]).astype(np.float32)}


class MortalWorld(ReachWorld):
    """Never solved; its process ends at the eighth step of every life, of several ranks that of rank 1."""

    _steps = 0

    def step(self, action: NDArray[np.float32]) -> bool:
        """Move, or end."""
        self._steps += 1
        if self._steps == 8 and os.environ.get("RANK", "1") == "1":
            os._exit(7)
        super().step(action)
        return False
