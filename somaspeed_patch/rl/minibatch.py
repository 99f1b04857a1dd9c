"""The samples of an iteration on the learner's device, and some of them together with their features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.rl.features import Features, below


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What N samples are trained on and towards, on one device; log-probabilities are `scores.reduced`."""

    x: Tensor
    """[N, H, A] fp32"""
    x_next: Tensor
    k: Tensor
    """[N] int64"""
    noise_level: Tensor
    """[N] fp32"""
    behaviour: Tensor
    """[N, ...] log-probability of the policy that acted"""
    proximal: Tensor | None
    """[N, ...] of the policy the iteration began with; None: nobody needs it"""
    lag: Tensor | None
    """[N] int64, versions since the policy that acted, where the proximal one is interpolated; else None"""
    advantages: Tensor
    """[N]"""
    values: Tensor
    """[N], of the critic that was there"""
    returns: Tensor
    weights: Tensor
    """[N] with mean 1"""

    def to(self, device: torch.device) -> Targets:
        """The same on another device."""
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})

    def rows(self, chosen: Tensor) -> Targets:
        """Those of some samples, [b] int64 on the same device."""
        return replace(self, **{name: value[chosen] for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        every = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in every if value is not None}


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """Samples whose loss is computed at once."""

    encoded: Features
    targets: Targets
    share: Tensor
    """0-dim fp32, how much of the optimizer step's loss this is"""

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name: what a graph has to be given."""
        return {
            **self.encoded.tensors(),
            **{f"targets/{name}": each for name, each in self.targets.tensors().items()},
            "share": self.share,
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Minibatch:
        """What `tensors` gave."""
        absent: dict[str, Any] = {"proximal": None, "lag": None}
        targets = Targets(**{**absent, **below("targets/", tensors)})
        return cls(encoded=Features.of(tensors), targets=targets, share=tensors["share"])
