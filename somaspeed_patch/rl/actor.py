"""Batched inference of one version of policy and critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.rl import heads as published
from somaspeed_patch.rl import streams
from somaspeed_patch.rl.env_process import Observation
from somaspeed_patch.rl.features import Record
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.flow_sde import Draws, Flow, Sample, side_by_side
from somaspeed_patch.rl.value_head import ValueHead


class Interface(Protocol):
    """Between an environment's numbers and a policy's."""

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """What `FlowPolicy.encode` takes, on the policy's device."""

    def actions(self, chunks: Tensor) -> NDArray[np.float32]:
        """What the environment executes of latent actions [B, C, D]."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the policy made of one observation; tensors on the CPU."""

    record: Record
    value: float
    actions: NDArray[np.float32]
    """[C, D], for the environment"""
    x: Tensor
    """[H, A] fp32, as in `flow_sde.Sample`"""
    x_next: Tensor
    k: int
    noise_level: float
    log_prob: Tensor


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
    ) -> None:
        """Take a policy and critic of one version.

        Args:
            executed: C, steps of a chunk that the environment executes.
        """
        if not 0 < executed <= policy.shape[0]:
            raise ValueError(f"actor: executed must be 1 to {policy.shape[0]}, but is {executed}")
        self.policy, self.value_head, self.interface = policy, value_head, interface
        self.flow, self.executed, self.version = flow, executed, version

    def act(self, observations: Sequence[Observation], draws: Sequence[Draws]) -> list[Decision]:
        """A decision for each observation, with its own draws."""
        encoded = self.policy.encode(self.interface.batch(observations))
        sample = self.policy.sample(encoded, self.flow, side_by_side(draws))
        with torch.no_grad():
            values = self.value_head(self.policy.pooled(encoded)).cpu()
        actions = self.interface.actions(sample.action[:, : self.executed, : self.policy.action_dim])
        records = encoded.records(self.policy.tag)
        there = _on_cpu(sample)
        return [
            Decision(
                record=record,
                value=float(values[i]),
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


def _on_cpu(sample: Sample) -> Sample:
    return Sample(
        action=sample.action.cpu(),
        k=sample.k.cpu(),
        noise_level=sample.noise_level.cpu(),
        x=sample.x.cpu(),
        x_next=sample.x_next.cpu(),
        log_prob=sample.log_prob.cpu(),
    )
