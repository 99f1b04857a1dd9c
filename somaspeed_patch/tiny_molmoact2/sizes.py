"""The sizes a MolmoAct2 of random weights comes in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SOMASPEED_TINY_MOLMOACT2"  # names the size that `activate` installs


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths and depths."""

    llm_width: int
    """hidden size of the language model"""
    llm_mlp: int
    """its feed-forward size"""
    llm_heads: int
    """its query heads"""
    llm_kv_heads: int
    """its key and value heads"""
    head_dim: int
    """size of one of them"""
    depth: int
    """decoder layers; the action expert has a block for each"""
    expert_width: int
    """hidden size of the action expert"""
    expert_heads: int
    """its heads"""
    vision_width: int
    """hidden size of the vision transformer and of the pooling after it"""
    vision_mlp: int
    """their feed-forward size"""
    vision_depth: int
    """layers of the vision transformer, at least 2: the last two are pooled"""
    vision_heads: int
    """their heads"""
    image_side: int
    """pixels of a crop's side, a multiple of the 14 of a patch; two by two patches make a token"""
    expert_mlp_ratio: float = 8 / 3
    """its feed-forward size over its hidden size"""
    time_width: int | None = None
    """size of the expert's sinusoidal time embedding; None: that of the expert"""
    pooled_layers: tuple[int, int] = (-1, -2)
    """layers of the vision transformer whose features are pooled"""
    projector_mlp: int | None = None
    """feed-forward size of the projector after the pooling; None: that of the vision transformer"""
    vocabulary: int | None = None
    """rows of the first embedding table; None: as many as the tokenizer has ids"""
    added_vocabulary: int | None = None
    """rows of the second one; None: as many as there are image tokens, which then are these rows"""


SIZES: Mapping[str, Size] = {
    "micro": Size(
        llm_width=64,
        llm_mlp=128,
        llm_heads=4,
        llm_kv_heads=2,
        head_dim=16,
        depth=2,
        expert_width=32,
        expert_heads=2,
        vision_width=32,
        vision_mlp=64,
        vision_depth=3,
        vision_heads=2,
        image_side=56,
    ),
    # The real model's proportions: nearly all weights are in the language model, which the recipe freezes.
    "small": Size(
        llm_width=192,
        llm_mlp=768,
        llm_heads=6,
        llm_kv_heads=2,
        head_dim=32,
        depth=4,
        expert_width=64,
        expert_heads=4,
        vision_width=64,
        vision_mlp=128,
        vision_depth=3,
        vision_heads=4,
        image_side=84,
    ),
    # The real one's, for a benchmark where no checkpoint is at hand: 10.9 GB on disk in bf16.
    "full": Size(
        llm_width=2560,
        llm_mlp=9728,
        llm_heads=32,
        llm_kv_heads=8,
        head_dim=128,
        depth=36,
        expert_width=768,
        expert_heads=8,
        vision_width=1152,
        vision_mlp=4304,
        vision_depth=27,
        vision_heads=16,
        image_side=378,
        expert_mlp_ratio=4.0,
        time_width=256,
        pooled_layers=(-3, -9),
        projector_mlp=9728,
        vocabulary=154_624,
        added_vocabulary=128,
    ),
}


def by_name(name: str) -> Size:
    """The size called `name`.

    Raises: ValueError: there is none.
    """
    if name not in SIZES:
        raise ValueError(
            f"tiny_molmoact2: size must be one of {sorted(SIZES)}, but is {name!r}; set {VARIABLE}"
        )
    return SIZES[name]


def from_environment() -> str:
    """The name of the size in SOMASPEED_TINY_MOLMOACT2, or micro.

    Raises: ValueError: it names no size.
    """
    name = os.environ.get(VARIABLE, "micro")
    by_name(name)
    return name
