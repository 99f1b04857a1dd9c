"""What a rollout sends: one episode's chunks, all sampled by one version of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from somaspeed_patch.rl.stores import Kept


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One observation, the action chunk it led to, and what the environment said. On the CPU."""

    record: Kept
    """the observation's features"""
    x: Tensor
    """[H, A] fp32, the latent before the stochastic step"""
    x_next: Tensor
    """[H, A] fp32, and after it"""
    k: int
    """which step that was; below 0: none"""
    noise_level: float
    log_prob: Tensor
    """[H, A] fp32, of x_next as the policy gave it"""
    value: float
    """of the observation, by the critic of that version"""
    rewards: Tensor
    """[C] fp32, of each environment step"""
    dones: Tensor
    """[C] bool, True from the step on that ended the episode"""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """An episode, or a part that `final_value` stands behind."""

    env: int
    """the environment's slot"""
    episode: int
    """counted in that slot"""
    version: int
    """of the policy, the same for every chunk"""
    chunks: Sequence[Chunk]
    terminated: bool
    """the episode ended by itself: nothing is worth anything after it"""
    final_value: float
    """of the observation the last chunk ended with; 0 and not read where terminated"""
    success: bool = False

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError(f"trajectory: env {self.env}, episode {self.episode} has no chunk")
        if not all(_finite(chunk) for chunk in self.chunks):
            raise ValueError(f"trajectory: env {self.env}, episode {self.episode} holds NaN or infinity")

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def env_steps(self) -> int:
        """Environment steps up to the end of the episode."""
        return sum(int((~chunk.dones).sum()) + bool(chunk.dones.any()) for chunk in self.chunks)

    @property
    def bytes(self) -> int:
        """What the features take to keep."""
        return sum(chunk.record.bytes for chunk in self.chunks)


def _finite(chunk: Chunk) -> bool:
    numbers = (chunk.x, chunk.x_next, chunk.log_prob, chunk.rewards, torch.tensor(chunk.value))
    return all(bool(each.isfinite().all()) for each in numbers)
