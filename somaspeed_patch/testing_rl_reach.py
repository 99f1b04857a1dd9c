"""`ReachWorld` for a policy: what it sees, and what its actions are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.rl.env_process import ACTION, Observation

OBSERVED, ACTIONS = 4, 2


class ReachInterface:
    """States for `StateFlow`, and its two actions as the environment's seven."""

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """{"observation": [B, 4]}."""
        return {"observation": torch.from_numpy(np.stack([each["state"] for each in observations]))}

    def actions(self, chunks: Tensor) -> NDArray[np.float32]:
        """[B, C, 7] of [B, C, 2]."""
        found = np.zeros((*chunks.shape[:2], ACTION), np.float32)
        found[..., :2] = chunks.numpy()
        return found
