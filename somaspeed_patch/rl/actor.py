"""Batched inference of one version of policy and critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.rl import heads as published
from somaspeed_patch.rl import streams
from somaspeed_patch.rl.encoder import MOST, Encoder
from somaspeed_patch.rl.env_process import Observation
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.flow_sde import Draws, Flow, side_by_side
from somaspeed_patch.rl.interface import Interface
from somaspeed_patch.rl.sampler import Sampler
from somaspeed_patch.rl.stores import HostStore, Kept, Store
from somaspeed_patch.rl.trajectory import Chunk
from somaspeed_patch.rl.value_head import ValueHead


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the policy made of one observation; tensors on the CPU."""

    record: Kept
    value: float
    actions: NDArray[np.float32]
    """[C, D], for the environment"""
    x: Tensor
    """[H, A] fp32, as in `flow_sde.Sample`"""
    x_next: Tensor
    k: int
    noise_level: float
    log_prob: Tensor

    def chunk(self, rewards: Tensor, dones: Tensor) -> Chunk:
        """It, and what the environment said: [C] fp32 and [C] bool of each step."""
        return Chunk(
            record=self.record, x=self.x, x_next=self.x_next, k=self.k, noise_level=self.noise_level,
            log_prob=self.log_prob, value=self.value, rewards=rewards, dones=dones,
        )  # fmt: skip


class Acts(Protocol):
    """What a collector needs of an actor."""

    flow: Flow
    version: int

    @property
    def shape(self) -> tuple[int, int]:
        """H and A of the latent action chunk."""

    def act(self, observations: Sequence[Observation], draws: Sequence[Draws]) -> list[Decision]:
        """A decision for each observation, with its own draws."""


class Actor:
    """Encodes each observation once, and keeps what the learner needs of it."""

    def __init__(
        self,
        policy: FlowPolicy,
        value_head: ValueHead,
        interface: Interface,
        *,
        flow: Flow,
        executed: int,
        version: int = 0,
        store: Store | None = None,
        graphs: bool = True,
    ) -> None:
        """Take a policy and critic of one version.

        Args:
            executed: C, steps of a chunk that the environment executes.
            store: where features wait for the learner; None: on the host.
            graphs: replay CUDA graphs of encoding and sampling; nothing on a CPU.
        """
        if not 0 < executed <= policy.shape[0]:
            raise ValueError(f"actor: executed must be 1 to {policy.shape[0]}, but is {executed}")
        self.policy, self.value_head, self.interface = policy, value_head, interface
        self.flow, self.executed, self.version = flow, executed, version
        self.store = store or HostStore(policy)
        self._encoder = Encoder(policy, graphs=graphs)
        self._sampler = Sampler(policy, value_head, flow, graphs=graphs)

    @property
    def shape(self) -> tuple[int, int]:
        """The policy's."""
        return self.policy.shape

    def act(self, observations: Sequence[Observation], draws: Sequence[Draws]) -> list[Decision]:
        """A decision for each observation, with its own draws."""
        size = MOST if self._encoder.graphed else len(observations)
        parts = [slice(i, i + size) for i in range(0, len(observations), size)]
        return [each for part in parts for each in self._act(observations[part], draws[part])]

    def _act(self, observations: Sequence[Observation], draws: Sequence[Draws]) -> list[Decision]:
        encoded = self._encoder(self.interface.batch(observations), len(observations))
        sample, values = self._sampler(encoded, side_by_side(draws))
        actions = self.interface.actions(sample.action[:, : self.executed, : self.policy.action_dim])
        records = self.store.keep(encoded, self.policy.tag, observations)
        there, value = sample.mapped(torch.Tensor.cpu), values.tolist()
        return [
            Decision(
                record=record,
                value=value[i],
                actions=actions[i],
                x=there.x[i],
                x_next=there.x_next[i],
                k=int(there.k[i]),
                noise_level=float(there.noise_level[i]),
                log_prob=there.log_prob[i],
            )
            for i, record in enumerate(records)
        ]

    def load(self, heads: Mapping[str, Tensor], version: int) -> None:
        """Become another version, see `heads.load`."""
        published.load(self.policy, self.value_head, heads)
        streams.wait(self.policy.device)  # whoever published may free them now
        self.version = version
