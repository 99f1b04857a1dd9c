"""The sizes a tiny pi0.5 comes in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

VOCABULARY = 512  # ids of the shipped tokenizer plus room; the last one marks an image
VARIABLE = "SOMASPEED_TINY_PI05"  # names the size that `activate` installs


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths and depths. Heads are always 8: LeRobot writes that number into its attention output."""

    vlm_width: int
    """hidden size of the PaliGemma language model"""
    vlm_mlp: int
    """its feed-forward size"""
    expert_width: int
    """hidden size of the action expert, also that of its adaRMS condition"""
    expert_mlp: int
    """its feed-forward size"""
    depth: int
    """decoder layers, the same number on both sides: they attend jointly"""
    head_dim: int
    """size of one head, the same on both sides"""
    vision_width: int
    """hidden size of SigLIP"""
    vision_mlp: int
    """its feed-forward size"""
    vision_depth: int
    """its layers"""
    vision_heads: int
    """its heads"""


SIZES: Mapping[str, Size] = {
    "micro": Size(
        vlm_width=64,
        vlm_mlp=128,
        expert_width=32,
        expert_mlp=64,
        depth=2,
        head_dim=16,
        vision_width=32,
        vision_mlp=64,
        vision_depth=2,
        vision_heads=2,
    ),
    # The real model's proportions: nearly all weights are in the language model, which the recipe freezes.
    "small": Size(
        vlm_width=192,
        vlm_mlp=768,
        expert_width=64,
        expert_mlp=128,
        depth=4,
        head_dim=32,
        vision_width=128,
        vision_mlp=256,
        vision_depth=2,
        vision_heads=4,
    ),
}


def by_name(name: str) -> Size:
    """The size called `name`."""
    if name not in SIZES:
        raise ValueError(f"tiny_pi05: size must be one of {sorted(SIZES)}, but is {name!r}; set {VARIABLE}")
    return SIZES[name]


def from_environment() -> Size:
    """The size named by SOMASPEED_TINY_PI05, or micro."""
    return by_name(os.environ.get(VARIABLE, "micro"))
