"""Qwen3-VL's vision tower over images of one size: one batched attention a layer, no loop over images.

With SDPA the host splits each layer's tokens by image and calls attention for each: 640 images times 24
layers of tiny calls at batch 320, which bound the step to the CPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from somaspeed_patch import frozen

_Grid = tuple[int, int, int]
_Key = tuple[_Grid, torch.device, torch.dtype, int, int]

_embeddings: WeakKeyDictionary[nn.Module, dict[_Key, tuple[Tensor, Tensor, Tensor]]] = WeakKeyDictionary()


def features(
    visual: Any, pixels: Tensor, grid: _Grid, images: int, layer_fn: Callable[..., Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """What the host's tower returns for images of one grid.

    Args:
        visual: the host's Qwen3VLVisionModel, or a working copy of it.
        pixels: [patches of all images, pixels of a patch].
        grid: frames, height and width of an image in patches.
        images: N.
        layer_fn: `layer`, or a compiled one.
    Returns: the merged tokens [N * L / merge^2, W], and those of each deepstack layer.
    """
    places, cos, sin = _places(visual, grid)
    hidden = _embedded(visual.patch_embed, pixels.type(visual.dtype)).view(images, -1, places.shape[-1])
    hidden = hidden + places
    deepstack, wanted = [], list(visual.deepstack_visual_indexes)
    for index, block in enumerate(visual.blocks):
        hidden = layer_fn(block, hidden, cos, sin)
        if index in wanted:
            merger = visual.deepstack_merger_list[wanted.index(index)]
            deepstack.append(merger(hidden.flatten(0, 1)))
    return visual.merger(hidden.flatten(0, 1)), deepstack


def layer(block: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One block of the tower.

    Args:
        hidden: [N, L, W].
        cos, sin: [L, D] of the rotary embedding.
    Returns: [N, L, W].
    """
    hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
    updated: Tensor = hidden + block.mlp(block.norm2(hidden))
    return updated


def _embedded(embed: Any, pixels: Tensor) -> Tensor:
    """Patches [P, pixels of a patch] as tokens [P, W].

    The host's convolution takes one step a patch, so it is a linear layer. As a convolution in bf16 it ran
    without matrix units on an H200: 28.7 ms of 743 at batch 320, against 0.8 ms. In fp32 it stays what it is,
    bit for bit.
    """
    conv = embed.proj
    dtype = frozen.autocast_dtype(pixels.device) or conv.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16) or not _is_linear(conv, pixels.shape[-1]):
        tokens: Tensor = embed(pixels)
        return tokens
    return F.linear(pixels, conv.weight.flatten(1), conv.bias)


def _is_linear(conv: nn.Module, pixels: int) -> bool:
    """Whether a patch of so many pixels is one product with the whole weight, and nobody listens."""
    if type(conv) is not nn.Conv3d or conv._forward_hooks or conv._forward_pre_hooks:
        return False
    whole = conv.in_channels * math.prod(conv.kernel_size) == pixels
    return whole and conv.padding == (0, 0, 0) and conv.dilation == (1, 1, 1) and conv.groups == 1


def _attend(attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    images, length, _ = hidden.shape
    qkv = attention.qkv(hidden).view(images, length, 3, attention.num_heads, -1)
    query, key, value = qkv.unbind(2)
    query, key = sys.modules[type(attention).__module__].apply_rotary_pos_emb_vision(query, key, cos, sin)
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, scale=attention.scaling)
    projected: Tensor = attention.proj(mixed.transpose(1, 2).reshape(images, length, -1))
    return projected


def _places(visual: Any, grid: _Grid) -> tuple[Tensor, Tensor, Tensor]:
    """An image's position embedding [L, W], cosines and sines [L, D]: the host's, computed once a grid."""
    weight = visual.pos_embed.weight
    key = (grid, weight.device, weight.dtype, weight.data_ptr(), weight._version)
    known = _embeddings.setdefault(visual, {})
    if key not in known:
        for old in [old for old in known if old[1:] != key[1:]]:
            del known[old]  # of weights that changed
        one = torch.tensor([grid], device=weight.device)
        angles = visual.rot_pos_emb(one).flatten(1)
        angles = torch.cat((angles, angles), dim=-1)
        known[key] = (visual.fast_pos_embed_interpolate(one), angles.cos(), angles.sin())
    return known[key]


def release() -> None:
    """Forget the position embeddings."""
    _embeddings.clear()
