"""A small flow policy over states, for tests and for learning without a GPU: no images, no language.

Its frozen part standardises the observation, its trainable part is three layers. It has the interface of the
large policies, so that what trains it is what trains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from somaspeed_patch.rl.features import Features
from somaspeed_patch.rl.flow_policy import FlowPolicy


class StateNet(nn.Module):
    """[B, H * A] velocity of a latent, a noise time and a standardised observation."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, *, observed: int, horizon: int, actions: int, width: int = 256, times: int = 8
    ) -> None:
        """Take sizes: numbers of an observation, actions of a chunk, numbers of an action."""
        super().__init__()
        self.horizon, self.actions, self.times = horizon, actions, times
        self.register_buffer("mean", torch.zeros(observed))
        self.register_buffer("std", torch.ones(observed))
        flat = horizon * actions
        self.layers = nn.Sequential(
            nn.Linear(observed + flat + 2 * times, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, flat),
        )  # fmt: skip

    def forward(self, observed: Tensor, x: Tensor, s: Tensor) -> Tensor:
        """[B, H, A] for observed [B, O], x [B, H, A] and s [B]."""
        waves = s[:, None] * (2.0 ** torch.arange(self.times, device=s.device) * math.pi / 8)
        inputs = torch.cat([observed, x.flatten(1), waves.sin(), waves.cos()], dim=1)
        found: Tensor = self.layers(inputs)
        return found.view(-1, self.horizon, self.actions)


class StateFlow(FlowPolicy):
    """`StateNet` as a FlowPolicy; batches are {"observation": [B, O] fp32}."""

    name: ClassVar[str] = "state"
    needs_patch: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, int]:
        """As the network has them."""
        return self._net.horizon, self._net.actions

    @property
    def action_dim(self) -> int:
        """Nothing is padded."""
        return self._net.actions

    @property
    def value_width(self) -> int:
        """The observation's."""
        return len(self._net.mean)

    @property
    def _net(self) -> StateNet:
        if not isinstance(self.policy, StateNet):
            raise TypeError(f"StateFlow: expected a StateNet, got {type(self.policy).__name__}")
        return self.policy

    def _refusal(self) -> str | None:
        return None

    def _layout(self) -> str:
        return f"{self.value_width} numbers"

    def _encode(self, batch: Mapping[str, Any]) -> Features:
        observed: Tensor = (batch["observation"] - self._net.mean) / self._net.std
        length = torch.zeros(len(observed), dtype=torch.int32, device=observed.device)
        return Features(tokens={}, length=length, fixed={"pooled": observed})

    def _velocity(self, encoded: Features, x: Tensor, s: Tensor) -> Tensor:
        found: Tensor = self._net(encoded.fixed["pooled"], x, s)
        return found
