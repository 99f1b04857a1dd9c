"""The frozen vision side: crops through the tower, patches pooled in squares, one feature an image token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from somaspeed_patch import constants, features
from somaspeed_patch.kernels.add_layer_norm import add_layer_norm
from somaspeed_patch.molmoact2.attention import vision_attention
from somaspeed_patch.molmoact2.layout import Layout


def image_features(backbone: Any, images: Tensor, pooling: Tensor, rows: Tensor | None) -> Tensor:
    """One vector an image token: [tokens, W], in the order of the tokens.

    Args:
        backbone: the host's MolmoAct2VisionBackbone, frozen.
        images: [N, C, patches, pixels], in [-1, 1] or uint8.
        pooling: [N, P, pool], patches of the sample that a token pools, -1 where there is none.
        rows: tokens of the flattened [N * P] that exist; None: all.
    """
    patches = _tower(backbone, _on_the_grid(images).to(backbone.dtype))
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


def _tower(backbone: Any, images: Tensor) -> Tensor:
    """[N, C, patches, pixels] -> [N, C * patches, W * layers].

    The residual branch of a block is added where the next norm reads the sum, in one kernel.
    """
    vit = backbone.image_vit
    hidden = vit.patch_embedding(images.flatten(0, 1))
    hidden = vit.add_pos_emb(hidden, vit.config.image_num_patch)
    wanted = [int(layer) for layer in backbone.vit_layers]
    found: dict[int, Tensor] = {}
    tanh_gelu = hidden.is_cuda and _is_tanh_gelu(vit.transformer.resblocks[0].feed_forward.act)
    branch: Tensor | None = None
    for index, block in enumerate(vit.transformer.resblocks):
        hidden, normed = _add_norm(hidden, branch, block.attention_norm)
        if index - 1 in wanted:
            found[index - 1] = hidden
        branch = _attend(block.attention, normed)
        hidden, normed = _add_norm(hidden, branch, block.ffn_norm)
        branch = _feed_forward(block.feed_forward, normed, tanh_gelu)
    last = len(vit.transformer.resblocks) - 1
    if last in wanted:
        found[last] = hidden + branch
    features = torch.cat([found[layer] for layer in wanted], dim=-1)
    return features.view(images.shape[0], -1, features.shape[-1])


def _attend(
    module: Any, queries: Tensor, members: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    attend = vision_attention if features.value("fused_attention") else type(module).__call__
    return attend(module, queries, members, mask)


def _add_norm(hidden: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The sum and its norm."""
    if branch is not None and branch.dtype != hidden.dtype:
        hidden, branch = hidden + branch, None
    return add_layer_norm(hidden, branch, norm.weight, norm.bias, norm.eps)


def _feed_forward(mlp: Any, x: Tensor, tanh_gelu: bool) -> Tensor:
    """ViTMLP; on a GPU the tanh GELU runs in the epilogue of the product before it, on the fp32 sums."""
    if tanh_gelu and type(mlp.w1) is nn.Linear and x.dtype == mlp.w1.weight.dtype:
        inner = torch._addmm_activation(mlp.w1.bias, x.flatten(0, -2), mlp.w1.weight.t(), use_gelu=True)
        return mlp.w2(inner.view(*x.shape[:-1], -1))
    return mlp.w2(mlp.act(mlp.w1(x)))


def _is_tanh_gelu(act: Any) -> bool:
    """Whether an activation of transformers is GELU by tanh, which is what the epilogue computes."""
    probe = torch.tensor([-3.0, -1.0, 0.5, 2.0])
    return torch.equal(act(probe), F.gelu(probe, approximate="tanh"))


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
    mixed = _attend(backbone.image_pooling_2d, query, members, mask)
    return mixed.view(samples, tokens, -1)
