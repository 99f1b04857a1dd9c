"""Trajectories as the samples of one PPO iteration: advantages, returns and weights of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from somaspeed_patch.rl import advantages as adv
from somaspeed_patch.rl.stores import Kept
from somaspeed_patch.rl.trajectory import Chunk, Trajectory


@dataclass(frozen=True, kw_only=True)
class Samples:
    """N chunks of all trajectories, one behind the other, on the CPU."""

    records: Sequence[Kept]
    x: Tensor
    """[N, H, A]"""
    x_next: Tensor
    k: Tensor
    """[N] int64"""
    noise_level: Tensor
    """[N] fp32"""
    log_prob: Tensor
    """[N, H, A], of the policy that acted"""
    values: Tensor
    """[N], of the critic that was there"""
    advantages: Tensor
    """[N], not normalised"""
    returns: Tensor
    version: Tensor
    """[N] int64, of the policy that acted"""
    trajectory: Tensor
    """[N] int64, which one each is from"""
    weights: Tensor
    """[N] with mean 1"""

    def __len__(self) -> int:
        return len(self.records)


def collate(
    trajectories: Sequence[Trajectory], *, gamma: float, lam: float, equal_weight: bool = False
) -> Samples:
    """The samples of some trajectories.

    Args:
        gamma, lam: discount and trace decay of a chunk.
        equal_weight: trajectories count alike, not chunks.
    Raises: ValueError: there is none.
    """
    if not trajectories:
        raise ValueError("samples: there is no trajectory")
    chunks = [chunk for trajectory in trajectories for chunk in trajectory.chunks]
    gained = [_advantages(trajectory, gamma, lam) for trajectory in trajectories]
    of = torch.cat([torch.full((len(each),), index) for index, each in enumerate(trajectories)])
    versions = torch.tensor([each.version for each in trajectories])
    return Samples(
        records=[chunk.record for chunk in chunks],
        x=torch.stack([chunk.x for chunk in chunks]),
        x_next=torch.stack([chunk.x_next for chunk in chunks]),
        k=torch.tensor([chunk.k for chunk in chunks]),
        noise_level=torch.tensor([chunk.noise_level for chunk in chunks]),
        log_prob=torch.stack([chunk.log_prob for chunk in chunks]),
        values=torch.tensor([chunk.value for chunk in chunks]),
        advantages=torch.cat([found for found, _ in gained]),
        returns=torch.cat([returns for _, returns in gained]),
        version=versions[of],
        trajectory=of,
        weights=adv.trajectory_weights(of) if equal_weight else torch.ones(len(of)),
    )


def _advantages(trajectory: Trajectory, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T]."""
    chunks = trajectory.chunks
    rewards = torch.stack([_reward(chunk) for chunk in chunks])
    values = torch.tensor([*(chunk.value for chunk in chunks), trajectory.final_value])
    ends = torch.zeros(len(chunks), dtype=torch.bool)
    ends[-1] = trajectory.terminated  # a cut episode goes on in `final_value`
    found, returns = adv.gae(rewards[:, None], values[:, None], ends[:, None], gamma, lam)
    return found[:, 0], returns[:, 0]


def _reward(chunk: Chunk) -> Tensor:
    return adv.chunk_rewards(chunk.rewards, chunk.dones)
