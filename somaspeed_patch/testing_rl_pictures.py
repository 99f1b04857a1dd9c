"""A world with two cameras and no simulator, for policies that look; nothing ever solves it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from somaspeed_patch.rl.env_process import EnvSpec, Observation

FACTORY = f"{__name__}:Pictures"


class Pictures:
    """The state is [init_state, steps since the reset, the sum of all actions, 0, ...]; pixels are random."""

    def __init__(self, spec: EnvSpec) -> None:
        self._size = spec.image_size or 0
        self._rng = np.random.default_rng(0)
        self._state: NDArray[np.float32] = np.zeros(8, np.float32)

    def reset(self, init_state: int, seed: int) -> None:
        """Begin with other pixels."""
        self._rng = np.random.default_rng([init_state, seed])
        self._state = np.zeros(8, np.float32)
        self._state[0] = init_state

    def step(self, action: NDArray[np.float32]) -> bool:
        """Count."""
        self._state[1:3] += (1, action.sum())
        return False

    def observe(self) -> Observation:
        """Both images and the state."""
        images = self._rng.integers(0, 256, (2, self._size, self._size, 3), np.uint8)
        return {"image": images[0], "image2": images[1], "state": self._state.copy()}
