"""Necessary FLOPs of a training step of pi0.5: frozen PaliGemma, trained action expert."""

from __future__ import annotations

from somaspeed_patch.ab.flops_parts import (
    FROZEN_INPUT,
    TRAINED,
    Block,
    attention,
    keys_values,
    layer,
    linear,
    products,
)
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.tiny_pi05.sizes import Size, by_name

# LeRobot's: gemma_2b and gemma_300m of get_gemma_config, SigLIP-so400m with its feed-forward of 4304.
FULL = Size(
    vlm_width=2048,
    vlm_mlp=16_384,
    expert_width=1024,
    expert_mlp=4096,
    depth=18,
    head_dim=256,
    vision_width=1152,
    vision_mlp=4304,
    vision_depth=27,
    vision_heads=16,
)
_HEADS = 8  # of queries; all share one K and V
_PATCH = 14  # pixels of a patch's side; a patch is a token
_FULL_SIDE, _TINY_SIDE = 224, 28  # pixels of an image's side
_ACTION = 32  # numbers of an action: the host's max_action_dim
_MODULATION = 3  # scale, shift and gate that adaRMS makes of the time embedding


def necessary(recipe: Synthetic) -> float:
    """FLOPs of one sample.

    The prefix is the recipe's cameras and real language tokens: empty slots and absent cameras are masked.
    """
    full = recipe.size == "full"
    size = FULL if full else by_name(recipe.size)
    patches = ((_FULL_SIDE if full else _TINY_SIDE) // _PATCH) ** 2
    prefix = recipe.cameras * patches + recipe.tokens
    backbone = recipe.cameras * vision(size, patches) + language(size, prefix)
    return float(backbone + expert(size, recipe.chunk, prefix))


def vision(size: Size, patches: int) -> int:
    """SigLIP and the projector, one image."""
    width = size.vision_width
    block = Block(width=width, queries=width, keys=width, mlp=size.vision_mlp, gated=False)
    ends = linear(patches, 3 * _PATCH**2, width) + linear(patches, width, size.vlm_width)
    return ends + size.vision_depth * layer(block, patches)


def language(size: Size, tokens: int) -> int:
    """The frozen Gemma. Of its last layer the expert reads K and V, so nothing else is needed."""
    block = _block(size, size.vlm_width, size.vlm_mlp)
    return (size.depth - 1) * layer(block, tokens) + keys_values(block, tokens)


def expert(size: Size, actions: int, prefix: int) -> int:
    """The trained Gemma, forward and backward; the prefix's K and V need no gradient."""
    width = size.expert_width
    block = _block(size, width, size.expert_mlp)
    modulation = linear(1, width, _MODULATION * width, TRAINED)
    each = (
        2 * modulation
        + products(block, actions, TRAINED)
        + attention(actions, prefix, block.queries, FROZEN_INPUT)
        + attention(actions, actions, block.queries, TRAINED)
    )
    time = linear(1, width, width, FROZEN_INPUT) + linear(1, width, width, TRAINED)
    ends = linear(actions, _ACTION, width, FROZEN_INPUT) + linear(actions, width, _ACTION, TRAINED)
    return size.depth * each + modulation + time + ends


def _block(size: Size, width: int, mlp: int) -> Block:
    return Block(width=width, queries=_HEADS * size.head_dim, keys=size.head_dim, mlp=mlp, gated=True)
