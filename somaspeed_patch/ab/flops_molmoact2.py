"""Necessary FLOPs of a training step of MolmoAct2: frozen vision-language model, trained action expert."""

from __future__ import annotations

from dataclasses import dataclass

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
from somaspeed_patch.tiny_molmoact2.sizes import Size, by_name

_PATCH = 14  # pixels of a patch's side
_POOL = 2  # patches of a pooled square's side; a square is an image token
_ENDS = 2  # tokens around an image; each of its rows of tokens has one more behind it
_TIMES = 8  # num_flow_timesteps: times drawn for each sample
_ACTION = 32  # numbers of an action, fixed by the host
_MULTIPLE = 16  # of which the expert's feed-forward size is one
_MODULATION, _LAST_MODULATION = 9, 2  # vectors that a block, and the last layer, make of the time embedding


@dataclass(frozen=True, kw_only=True)
class Image:
    """What one image, a square, comes to."""

    patches: int
    """tokens of the vision transformer"""
    pooled: int
    """features that the language model gets"""
    marks: int
    """tokens of the language model that belong to the image and have no feature"""


def image_of(name: str, size: Size) -> Image:
    """An image in a model of that size; in a tiny one it is a patch larger, so that pooling has odd ends."""
    side = size.image_side // _PATCH + (name != "full")
    row = -(-side // _POOL)
    return Image(patches=side**2, pooled=row**2, marks=row + _ENDS)


def necessary(recipe: Synthetic) -> float:
    """FLOPs of one sample: the recipe's text tokens and images, its actions at 8 times."""
    size = by_name(recipe.size)
    image = image_of(recipe.size, size)
    context = recipe.tokens + recipe.cameras * (image.pooled + image.marks)
    backbone = recipe.cameras * vision(size, image) + language(size, context)
    return float(backbone + expert(size, recipe.chunk, context))


def vision(size: Size, image: Image) -> int:
    """The vision transformer up to the last layer that is pooled, pooling and projector, one image."""
    width = size.vision_width
    block = Block(width=width, queries=width, keys=width, mlp=size.vision_mlp, gated=False)
    layers = 1 + max(index % size.vision_depth for index in size.pooled_layers)
    tower = linear(image.patches, 3 * _PATCH**2, width) + layers * layer(block, image.patches)
    return tower + pooling(size, image) + projector(size, image)


def pooling(size: Size, image: Image) -> int:
    """Each square's mean attends to its patches; a square that ends outside the image has fewer."""
    width, features = size.vision_width, size.vision_width * len(size.pooled_layers)
    queries = linear(image.pooled, features, width) + linear(image.pooled, width, width)
    members = 2 * linear(image.patches, features, width)
    return queries + members + image.pooled * attention(1, _POOL**2, width)


def projector(size: Size, image: Image) -> int:
    """The gated feed-forward between pooling and language model."""
    inner = size.projector_mlp or size.vision_mlp
    return linear(image.pooled, inner, 2 * size.vision_width + size.llm_width)


def language(size: Size, tokens: int) -> int:
    """The frozen decoder. Of its last layer the expert reads K and V, so nothing else is needed."""
    block = Block(
        width=size.llm_width,
        queries=size.llm_heads * size.head_dim,
        keys=size.llm_kv_heads * size.head_dim,
        mlp=size.llm_mlp,
        gated=True,
    )
    return (size.depth - 1) * layer(block, tokens) + keys_values(block, tokens)


def expert(size: Size, actions: int, context: int) -> int:
    """The trained expert, forward and backward; the context is projected once for all times."""
    width, rows = size.expert_width, _TIMES * actions
    return (
        size.depth * expert_block(size, actions, context)
        + time_embedding(size)
        + linear(rows, _ACTION, width, FROZEN_INPUT)
        + linear(_TIMES, width, _LAST_MODULATION * width, TRAINED)
        + linear(rows, width, _ACTION, TRAINED)
    )


def expert_block(size: Size, actions: int, context: int) -> int:
    """Self-attention at each time, cross-attention of all times, feed-forward."""
    width, rows = size.expert_width, _TIMES * actions
    block = Block(width=width, queries=width, keys=width, mlp=_expert_mlp(size), gated=True)
    crossed = 2 * linear(rows, width, width, TRAINED) + attention(rows, context, width, TRAINED)
    projected = 2 * linear(context, size.llm_kv_heads * size.head_dim, width, FROZEN_INPUT)
    modulation = linear(_TIMES, width, _MODULATION * width, TRAINED)
    return (
        products(block, rows, TRAINED)
        + _TIMES * attention(actions, actions, width, TRAINED)
        + crossed
        + projected
        + modulation
    )


def time_embedding(size: Size) -> int:
    """The two layers over the sines of the times."""
    width = size.expert_width
    first = linear(_TIMES, size.time_width or width, width, FROZEN_INPUT)
    return first + linear(_TIMES, width, width, TRAINED)


def _expert_mlp(size: Size) -> int:
    wanted = int(size.expert_width * size.expert_mlp_ratio)
    return -(-wanted // _MULTIPLE) * _MULTIPLE
