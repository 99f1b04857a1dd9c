"""Necessary FLOPs of a training step of GR00T N1.7: frozen Qwen3-VL, trained action head."""

from __future__ import annotations

from somaspeed_patch.ab.flops_parts import (
    FROZEN_INPUT,
    TRAINED,
    Block,
    attention,
    layer,
    linear,
    products,
)
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.tiny_groot.sizes import Size, by_name

_PATCH, _FRAMES, _CHANNELS = 16, 2, 3  # pixels of a patch's side; an image is two equal frames
_MERGED = 4  # patches of an image token
_ACTIONS = 40  # action_horizon: tokens of the head whatever the recipe's chunk; its other actions are masked
_TIME_WIDTH = 256  # sines of the time that diffusers' timestep embedding reads
_MLP = 4  # feed-forward size of diffusers' blocks over their width
_MODULATION = 2  # scale and shift that a block's norm makes of the time embedding


def necessary(recipe: Synthetic) -> float:
    """FLOPs of one sample: the recipe's text tokens and images, one state and 40 actions."""
    size = by_name(recipe.size)
    patches = (size.image_side // _PATCH) ** 2
    images = recipe.cameras * patches // _MERGED
    tokens = recipe.tokens + images
    backbone = recipe.cameras * vision(size, patches) + language(size, tokens)
    return float(backbone + features(size, tokens) + dit(size, recipe.tokens, images) + ends(size))


def vision(size: Size, patches: int) -> int:
    """The vision tower and its mergers, one image."""
    width = size.vision_width
    block = Block(width=width, queries=width, keys=width, mlp=size.vision_mlp, gated=False)
    embedded = linear(patches, _CHANNELS * _FRAMES * _PATCH**2, width)
    mergers = (1 + len(size.deepstack)) * merger(size, patches // _MERGED)
    return embedded + size.vision_depth * layer(block, patches) + mergers


def merger(size: Size, tokens: int) -> int:
    """Four patches' features to one token of the language model."""
    merged = _MERGED * size.vision_width
    return linear(tokens, merged, merged + size.llm_width)


def language(size: Size, tokens: int) -> int:
    """The decoder layers that GR00T keeps, without logits; the head reads the last one's output."""
    block = Block(
        width=size.llm_width,
        queries=size.llm_heads * size.head_dim,
        keys=size.llm_kv_heads * size.head_dim,
        mlp=size.llm_mlp,
        gated=True,
    )
    return size.selected * layer(block, tokens)


def features(size: Size, tokens: int) -> int:
    """vl_self_attention. The norm before it learns, so its first block needs dX, too."""
    return size.vl_depth * layer(_block(size.llm_width), tokens, TRAINED)


def dit(size: Size, text: int, images: int) -> int:
    """The DiT over the state and the actions: blocks over text, itself, images, itself, and so on.

    A block's K and V are those of its own modality's tokens, whose features learn.
    """
    width, rows = size.dit_heads * size.dit_head_dim, 1 + _ACTIONS
    crossed = sum(
        cross_block(size, rows, images if index % 4 else text) for index in range(0, size.dit_depth, 2)
    )
    modulation = linear(1, width, _MODULATION * width, TRAINED)
    time = linear(1, _TIME_WIDTH, width, FROZEN_INPUT) + linear(1, width, width, TRAINED)
    return (
        crossed
        + size.dit_depth // 2 * layer(_block(width), rows, TRAINED)
        + (size.dit_depth + 1) * modulation  # the last one is proj_out_1
        + time
    )


def cross_block(size: Size, rows: int, keys: int) -> int:
    """A block of the DiT whose K and V come from the backbone's features."""
    width = size.dit_heads * size.dit_head_dim
    own = Block(width=width, queries=width, keys=0, mlp=_MLP * width, gated=False)
    projected = 2 * linear(keys, size.llm_width, width, TRAINED)
    return products(own, rows, TRAINED) + projected + attention(rows, keys, width, TRAINED)


def ends(size: Size) -> int:
    """Encoders of state and actions, and what makes actions of the DiT's output, of one embodiment.

    The state's output is read by nobody.
    """
    width, head = size.dit_heads * size.dit_head_dim, size.head_width
    state = linear(1, size.dims, head, FROZEN_INPUT) + linear(1, head, width, TRAINED)
    encoder = linear(_ACTIONS, size.dims, width, FROZEN_INPUT) + linear(_ACTIONS, 3 * width, width, TRAINED)
    return state + encoder + linear(_ACTIONS, head, width + head + size.dims, TRAINED)


def _block(width: int) -> Block:
    return Block(width=width, queries=width, keys=width, mlp=_MLP * width, gated=False)
