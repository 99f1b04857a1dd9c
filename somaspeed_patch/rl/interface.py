"""Between an environment's numbers and a policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.rl.env_process import Observation


class Interface(Protocol):
    """What an actor needs to speak to environments."""

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """What `FlowPolicy.encode` takes, on the policy's device."""

    def actions(self, chunks: Tensor) -> NDArray[np.float32]:
        """What the environment executes of latent actions [B, C, D], those of the last `batch`."""
