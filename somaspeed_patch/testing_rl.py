"""What the tests of RL share: trajectories of one policy, from observations and a function that rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.rl import flow_sde
from somaspeed_patch.rl.features import Features
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.flow_sde import Flow, Sample
from somaspeed_patch.rl.state_flow import StateFlow, StateNet
from somaspeed_patch.rl.trajectory import Chunk, Trajectory
from somaspeed_patch.rl.value_head import ValueHead

Reward = Callable[[Tensor], float]
"""Of the executed actions [C, D]."""


def state_policy(*, observed: int = 5, horizon: int = 4, actions: int = 3, seed: int = 0) -> StateFlow:
    """A small policy with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return StateFlow(StateNet(observed=observed, horizon=horizon, actions=actions, width=32))


def value_head(policy: FlowPolicy, seed: int = 1) -> ValueHead:
    """A small critic with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ValueHead(policy.value_width, (16,))


def acted(
    policy: FlowPolicy, critic: ValueHead, batch: dict[str, Any], flow: Flow, rng: torch.Generator
) -> tuple[Features, Sample, Tensor]:
    """Features, chunks and values [B] of a batch of observations."""
    encoded = policy.encode(batch)
    count = len(encoded.length)
    sample = policy.sample(encoded, flow, flow_sde.draw(count, policy.shape, flow, rng))
    with torch.no_grad():
        values = critic(policy.pooled(encoded))
    return encoded, sample, values


def trajectories(
    policy: FlowPolicy,
    critic: ValueHead,
    batch: dict[str, Any],
    flow: Flow,
    rng: torch.Generator,
    *,
    reward: Reward = lambda actions: 0.0,
    executed: int = 2,
    length: int = 1,
    version: int = 0,
) -> list[Trajectory]:
    """Episodes of `length` chunks, every `length` samples of the batch one behind the other."""
    encoded, sample, values = acted(policy, critic, batch, flow, rng)
    records = encoded.records(policy.tag)
    chunks = [
        Chunk(
            record=record,
            x=sample.x[i],
            x_next=sample.x_next[i],
            k=int(sample.k[i]),
            noise_level=float(sample.noise_level[i]),
            log_prob=sample.log_prob[i],
            value=float(values[i]),
            rewards=_rewards(reward(sample.action[i, :executed, : policy.action_dim]), executed),
            dones=torch.zeros(executed, dtype=torch.bool),
        )
        for i, record in enumerate(records)
    ]
    return [
        Trajectory(
            env=0, episode=start, version=version, chunks=chunks[start : start + length], terminated=True,
            final_value=0.0,
        )
        for start in range(0, len(chunks), length)
    ]  # fmt: skip


def _rewards(total: float, steps: int) -> Tensor:
    found = torch.zeros(steps)
    found[-1] = total
    return found
