"""Rewards of chunks, generalised advantage estimation over them, and what each sample weighs.

The unit of time is a chunk of C environment steps. An episode that ends by itself (termination) has no value
after its end; one that is cut (truncation) has that of the state it was cut in. T chunks, B environments.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-5  # as CleanRL and RLinf normalise


def chunk_rewards(rewards: Tensor, dones: Tensor) -> Tensor:
    """[...], the sum of each chunk's rewards up to the step that ends the episode.

    Args:
        rewards: [..., C] fp32.
        dones: [..., C] bool, terminated or truncated at that step.
    """
    ended = dones.cumsum(-1) - dones.long()  # ends before this step
    return torch.where(ended > 0, torch.zeros_like(rewards), rewards).sum(-1)


def gae(rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T, B].

    Args:
        rewards: [T, B].
        values: [T + 1, B], of the observation each chunk began with, and of the last one's end.
        dones: [T, B] bool, whether the episode ended by itself in the chunk; one that is cut goes on in the
            last value.
    """
    alive = (~dones).to(rewards.dtype)
    deltas = rewards + gamma * values[1:] * alive - values[:-1]
    advantages = torch.empty_like(deltas)
    trace = torch.zeros_like(deltas[0]) if len(deltas) else deltas
    for index in reversed(range(len(deltas))):
        trace = deltas[index] + gamma * lam * alive[index] * trace
        advantages[index] = trace
    return advantages, advantages + values[:-1]


def normalised(advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """Zero mean and unit sample deviation (n - 1) over the entries of the mask; 0 outside of it.

    Where fewer than two entries count there is no deviation: they become 0, not NaN.
    """
    counts = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask
    kept = advantages[counts]
    if kept.numel() < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages - kept.mean()) / (kept.std() + _EPSILON)
    return torch.where(counts, scaled, torch.zeros_like(scaled))


def trajectory_weights(trajectory: Tensor) -> Tensor:
    """[N] fp32 with mean 1, by which every trajectory counts alike, however many chunks it has.

    Args:
        trajectory: [N] int64, which trajectory each transition belongs to.
    """
    _, inverse, sizes = torch.unique(trajectory, return_inverse=True, return_counts=True)
    shares: Tensor = sizes[inverse].to(torch.float32).reciprocal()
    return shares * (len(trajectory) / len(sizes))
