"""`--optimizer.type=somaspeed_adamw`: FusedAdamW in LeRobot's registry of optimizers, with its options."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lerobot.optim.optimizers import AdamWConfig

from somaspeed_patch.optim.fused_adamw import FusedAdamW

NAME = "somaspeed_adamw"


@dataclass
class SomaspeedAdamWConfig(AdamWConfig):  # type: ignore[misc]
    """LeRobot's AdamWConfig, and what FusedAdamW can do beyond; see there."""

    moments_dtype: str | None = None
    """"float32" or "bfloat16"; None: the parameter's dtype."""
    master_weights: bool = False
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    nonfinite: str = "propagate"
    fused: bool | None = None

    def build(self, params: Any) -> FusedAdamW:
        """The optimizer of `params`, which are parameters or groups of them."""
        settings = asdict(self)
        settings.pop("grad_clip_norm")
        dtype = settings.pop("moments_dtype")
        return FusedAdamW(params, **settings, moments_dtype=None if dtype is None else _dtype(dtype))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"optimizer.moments_dtype must be float32, bfloat16 or float16, but is {name!r}")
    return found


def registered(registry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The registry with our entry behind it: what others register meanwhile goes into theirs, and stays."""
    return ChainMap(registry, {NAME: SomaspeedAdamWConfig})
