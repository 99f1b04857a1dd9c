"""What the tests of RL share: trajectories of one policy, from observations and a function that rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.rl import flow_sde, scores
from somaspeed_patch.rl.features import Features
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.flow_sde import Draws, Flow, Sample
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


def drawn(policy: FlowPolicy, count: int, flow: Flow, seed: int = 0) -> Draws:
    """What `count` chunks of the policy need."""
    return flow_sde.draw(count, policy.shape, flow, torch.Generator().manual_seed(seed))


def sampled(policy: FlowPolicy, encoded: Features, flow: Flow, k: int | None = None) -> Sample:
    """Each sample with another stochastic step, or all with step k; k below 0: without."""
    draws = drawn(policy, len(encoded.length), flow)
    chosen = (torch.arange(len(draws.k)) + 1) % flow.steps if k is None else torch.full_like(draws.k, k)
    return policy.sample(encoded, flow, replace(draws, k=chosen))


def replayed(
    policy: FlowPolicy, encoded: Features, sample: Sample, flow: Flow, rows: slice = slice(None)
) -> Tensor:
    """Log-probabilities of the sample's rows, which `encoded` is of."""
    x, x_next, k, level = (each[rows] for each in (sample.x, sample.x_next, sample.k, sample.noise_level))
    return flow_sde.replay(partial(policy.velocity, encoded), x, x_next, k, level, flow)


def gradients(
    policy: FlowPolicy, encoded: Features, sample: Sample, flow: Flow
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of a replay's log-probabilities, and every gradient of it."""
    policy.policy.zero_grad(set_to_none=True)
    score = scores.reduced(replayed(policy, encoded, sample, flow), (2, policy.action_dim))
    loss = score.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {n: p.grad for n, p in policy.policy.named_parameters() if p.grad is not None}


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
