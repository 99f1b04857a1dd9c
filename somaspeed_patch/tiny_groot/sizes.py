"""The sizes a GR00T N1.7 of random weights comes in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "SOMASPEED_TINY_GROOT"  # names the size that `activate` installs


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths and depths: of the backbone, a vision-language model, and of the action head, a DiT."""

    llm_width: int
    """hidden size of the language model, and of the self-attention over what it gives"""
    llm_mlp: int
    """its feed-forward size"""
    llm_heads: int
    """its query heads"""
    llm_kv_heads: int
    """its key and value heads"""
    head_dim: int
    """size of one of them"""
    rope_sections: tuple[int, int, int]
    """how many of its head_dim / 2 rotary frequencies follow time, height and width"""
    llm_depth: int
    """decoder layers of its configuration"""
    selected: int
    """decoder layers that GR00T keeps of them; with no more than deepstack has, its last is never read"""
    vision_width: int
    """hidden size of the vision transformer"""
    vision_mlp: int
    """its feed-forward size"""
    vision_depth: int
    """its layers"""
    vision_heads: int
    """its heads"""
    deepstack: tuple[int, ...]
    """its layers whose features are added to those after the first layers of the language model"""
    positions: int
    """rows of its position embedding, a square number"""
    image_side: int
    """pixels of the side of a square image in the model, a multiple of 32; 32 by 32 pixels make a token"""
    vl_depth: int
    """layers of the self-attention over what the language model gives"""
    vl_heads: int
    """its heads"""
    dit_depth: int
    """blocks of the DiT: in turn over text, itself, images, itself"""
    dit_heads: int
    """its heads"""
    dit_head_dim: int
    """size of one of them; its hidden size is dit_heads times that"""
    head_width: int
    """hidden size of the encoder of states and the decoder of actions, and what the DiT gives"""
    dropout: float
    """of the DiT, the self-attention before it and whole states"""
    dims: int
    """dimensions a state or action is padded to: --policy.max_state_dim and --policy.max_action_dim"""
    embodiments: int
    """robots with an encoder and decoder of their own"""
    vocabulary: int | None = None
    """rows of the embedding; None: as many as the tokenizer has ids"""


SIZES: Mapping[str, Size] = {
    "micro": Size(
        llm_width=64,
        llm_mlp=128,
        llm_heads=4,
        llm_kv_heads=2,
        head_dim=16,
        rope_sections=(4, 2, 2),
        llm_depth=3,
        selected=2,
        vision_width=32,
        vision_mlp=64,
        vision_depth=3,
        vision_heads=2,
        deepstack=(1,),
        positions=16,
        image_side=64,
        vl_depth=1,
        vl_heads=2,
        dit_depth=4,
        dit_heads=2,
        dit_head_dim=16,
        head_width=24,
        dropout=0.0,
        dims=16,
        embodiments=12,  # LeRobot's default, new_embodiment, is 10, libero_sim is 2
    ),
    # The real model's proportions, but for fewer embodiments: most weights are in the frozen backbone.
    "small": Size(
        llm_width=256,
        llm_mlp=768,
        llm_heads=8,
        llm_kv_heads=4,
        head_dim=32,
        rope_sections=(6, 5, 5),
        llm_depth=7,
        selected=4,
        vision_width=128,
        vision_mlp=512,
        vision_depth=6,
        vision_heads=4,
        deepstack=(1, 2, 4),
        positions=144,
        image_side=128,
        vl_depth=1,
        vl_heads=4,
        dit_depth=4,
        dit_heads=8,
        dit_head_dim=24,
        head_width=128,
        dropout=0.2,
        dims=16,
        embodiments=12,
        vocabulary=6144,
    ),
    # The real one's, for a benchmark where no checkpoint is at hand: 6.3 GB on disk in bf16.
    "full": Size(
        llm_width=2048,
        llm_mlp=6144,
        llm_heads=16,
        llm_kv_heads=8,
        head_dim=128,
        rope_sections=(24, 20, 20),
        llm_depth=28,
        selected=16,
        vision_width=1024,
        vision_mlp=4096,
        vision_depth=24,
        vision_heads=16,
        deepstack=(5, 11, 17),
        positions=2304,
        image_side=256,
        vl_depth=4,
        vl_heads=32,
        dit_depth=32,
        dit_heads=32,
        dit_head_dim=48,
        head_width=1024,
        dropout=0.2,
        dims=132,
        embodiments=32,
        vocabulary=151_936,
    ),
}


def by_name(name: str) -> Size:
    """The size called `name`.

    Raises: ValueError: there is none.
    """
    if name not in SIZES:
        raise ValueError(f"tiny_groot: size must be one of {sorted(SIZES)}, but is {name!r}; set {VARIABLE}")
    return SIZES[name]


def from_environment() -> str:
    """The name of the size in SOMASPEED_TINY_GROOT, or micro.

    Raises: ValueError: it names no size.
    """
    name = os.environ.get(VARIABLE, "micro")
    by_name(name)
    return name
