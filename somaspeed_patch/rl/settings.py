"""PPO's settings; the defaults are the published ones of pi0.5 on LIBERO-Spatial."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.ppo import Clips
from somaspeed_patch.rl.scores import Level, Scope


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a learner; times are in chunks."""

    flow: Flow = field(default_factory=lambda: Flow(steps=3, noise_level=0.5))
    clips: Clips = field(default_factory=Clips)
    executed: int = 5
    """C, environment steps of a chunk"""
    level: Level = "chunk"
    scope: Scope = "executed"
    gamma: float = 0.99
    lam: float = 0.95
    update_epoch: int = 1
    """how often each chunk is trained on"""
    global_batch: int = 2048
    """chunks of an optimizer step"""
    micro_batch: int = 128
    """chunks of a forward and backward"""
    actor_lr: float = 5e-6
    critic_lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    """not 1e-5: with clipping to 1 over 430 M parameters an entry's gradient is below 4.8e-5"""
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    value_coefficient: float = 1.0
    normalise_advantages: bool = True
    equal_weight: bool = False
    """trajectories count alike, not chunks"""
    schedule: Literal["constant", "cosine"] = "constant"
    """of both learning rates, by iterations: `cosine` falls to `schedule_floor` of them"""
    schedule_iterations: int = 1000
    """after which it has fallen"""
    schedule_floor: float = 0.1
    critic_warmup: int = 0
    """optimizer steps in which only the value head learns"""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """of samples of an older policy: recomputed from the cache, or RLinf's interpolation"""
    tokens: int | None = None
    """a fixed N of the learner's batches; None: the longest of each"""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("executed", "update_epoch", "global_batch", "micro_batch", "schedule_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"rl: {name} must be at least 1, but is {getattr(self, name)}")
        for name in ("gamma", "lam", "schedule_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"rl: {name} must be within 0 and 1, but is {getattr(self, name)}")
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"rl: global_batch {self.global_batch} must be a multiple of micro_batch {self.micro_batch}"
            )
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"rl: schedule must be constant or cosine, but is {self.schedule!r}")
        if self.proximal not in ("recompute", "interpolate"):
            raise ValueError(f"rl: proximal must be recompute or interpolate, but is {self.proximal!r}")

    def rate(self, iteration: int) -> float:
        """What both learning rates are multiplied by in an iteration, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        share = min(iteration / self.schedule_iterations, 1.0)
        return self.schedule_floor + (1 - self.schedule_floor) * (1 + math.cos(math.pi * share)) / 2
