"""An actor that does not look: random actions at once, to see how fast environments are by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from somaspeed_patch.rl.actor import Decision
from somaspeed_patch.rl.env_process import ACTION, Observation
from somaspeed_patch.rl.features import Record, Tag
from somaspeed_patch.rl.flow_sde import Draws, Flow

_NOTHING = Record(tokens={}, fixed={}, tag=Tag(model="nobody", backbone=""))


class Nobody:
    """What `Collector.collect` needs of an actor."""

    shape = (1, 1)

    def __init__(self, executed: int) -> None:
        """Take C, steps of a chunk."""
        self.executed, self.version = executed, 0
        self.flow = Flow(steps=1, noise_level=0.0)
        self._rng = np.random.default_rng(0)

    def act(self, observations: Sequence[Observation], draws: Sequence[Draws]) -> list[Decision]:
        """Uniform actions."""
        actions = self._rng.uniform(-1, 1, (len(observations), self.executed, ACTION)).astype(np.float32)
        nothing = torch.zeros(self.shape)
        return [
            Decision(
                record=_NOTHING, value=0.0, actions=each, x=nothing, x_next=nothing, k=0, noise_level=0.0,
                log_prob=nothing,
            )
            for each in actions
        ]  # fmt: skip
