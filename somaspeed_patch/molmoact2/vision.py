"""The frozen vision side: crops through the tower, patches pooled in squares, one feature an image token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.molmoact2 import constants
from somaspeed_patch.molmoact2.attention import vision_attention
from somaspeed_patch.molmoact2.layout import Layout

BlockFn = Callable[[Any, Tensor], Tensor]


def vision_block(block: Any, hidden: Tensor) -> Tensor:
    """One block of the tower: [B, P, W] -> [B, P, W]."""
    hidden = hidden + vision_attention(block.attention, block.attention_norm(hidden))
    return hidden + block.feed_forward(block.ffn_norm(hidden))


def image_features(
    backbone: Any, images: Tensor, pooling: Tensor, rows: Tensor | None, block_fn: BlockFn = vision_block
) -> Tensor:
    """One vector an image token: [tokens, W], in the order of the tokens.

    Args:
        backbone: the host's MolmoAct2VisionBackbone, frozen.
        images: [N, C, patches, pixels], in [-1, 1] or uint8.
        pooling: [N, P, pool], patches of the sample that a token pools, -1 where there is none.
        rows: tokens of the flattened [N * P] that exist; None: all.
        block_fn: `vision_block` or a compiled version of it.
    """
    patches = _tower(backbone, _on_the_grid(images).to(backbone.dtype), block_fn)
    pooled = backbone.image_projector(_pooled(backbone, patches, pooling)).flatten(0, 1)
    return pooled if rows is None else pooled[constants.on(pooled.device, rows)]


def token_rows(layout: Layout, pooling: Tensor) -> Tensor | None:
    """Rows of [N * P] whose token pools at least one patch, or None where all do.

    Args:
        pooling: [pooled tokens, pool] on the CPU, as the processor made it.
    """
    real = (pooling >= 0).any(-1)
    if layout.pooled_rows is None and bool(real.all()):
        return None
    rows = torch.arange(len(pooling)) if layout.pooled_rows is None else layout.pooled_rows
    return rows[real]


def _on_the_grid(images: Tensor) -> Tensor:
    """The host's canonical pixels: in [-1, 1], on the uint8 grid, fp32."""
    if images.dtype != torch.uint8:
        images = (((images.float() + 1.0) * 0.5) * 255.0).round().clamp(0.0, 255.0)
    return images.float() / 255.0 * 2.0 - 1.0


def _tower(backbone: Any, images: Tensor, block_fn: BlockFn) -> Tensor:
    """[N, C, patches, pixels] -> [N, C * patches, W * layers]."""
    vit = backbone.image_vit
    hidden = vit.patch_embedding(images.flatten(0, 1))
    hidden = vit.add_pos_emb(hidden, vit.config.image_num_patch)
    wanted = [int(layer) for layer in backbone.vit_layers]
    found: dict[int, Tensor] = {}
    for index, block in enumerate(vit.transformer.resblocks):
        hidden = block_fn(block, hidden)
        if index in wanted:
            found[index] = hidden
    features = torch.cat([found[layer] for layer in wanted], dim=-1)
    return features.view(images.shape[0], -1, features.shape[-1])


def _pooled(backbone: Any, patches: Tensor, pooling: Tensor) -> Tensor:
    """[N, patches, W] -> [N, P, hidden], each token attending from the mean of its patches to them."""
    samples, tokens, _ = pooling.shape
    real = pooling >= 0
    sample = torch.arange(samples, device=pooling.device)[:, None, None]
    members = patches[sample, pooling.clamp(min=0)] * real[..., None].to(patches.dtype)
    members = members.flatten(0, 1)
    if backbone.adapter_config.pooling_attention_mask:
        mask = real.view(-1, 1, 1, real.shape[-1])
        count = real.flatten(0, 1).float().sum(-1)
        count = torch.where(count == 0, 1, count)[:, None, None].to(members.dtype)
        query = members.sum(-2, keepdim=True) / count
    else:
        mask, query = None, members.mean(-2, keepdim=True)
    mixed = vision_attention(backbone.image_pooling_2d, query, members, mask)
    return mixed.view(samples, tokens, -1)
