"""Attention of MolmoAct2's vision tower, of its image pooling and of its frozen language model.

The host's default is eager: scores in fp32 for the vision side (`float32_attention` casts bf16 queries and
keys up first), a matrix of probabilities in memory, K and V repeated for every query head. A fused kernel
multiplies the same bf16 numbers, sums in fp32 and keeps the probabilities in registers, so it loses nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def vision_attention(
    module: Any, inputs_q: Tensor, inputs_kv: Tensor | None = None, attn_mask: Tensor | None = None
) -> Tensor:
    """What `ViTMultiHeadDotProductAttention.forward` returns: [B, Q, hidden].

    Args:
        module: the host's; its attention dropout must not be active.
        inputs_q: [B, Q, W].
        inputs_kv: [B, K, W]; None: inputs_q.
        attn_mask: [B, 1, 1, K] bool, or None. The host's eager attention ignores it, and so does this.
    """
    source = inputs_q if inputs_kv is None else inputs_kv
    query = _heads(module.wq(inputs_q), module.head_dim)
    key, value = _heads(module.wk(source), module.head_dim), _heads(module.wv(source), module.head_dim)
    if module.attn_implementation == "eager":
        attn_mask = None
    if query.shape[1] == 1:
        mixed = _one_query(query, key, value, attn_mask, module.num_key_value_groups)
    else:
        mixed = _fused(query, key, value, attn_mask)
    return module.residual_dropout(module.wo(mixed.reshape(*inputs_q.shape[:2], module.hidden_size)))


def language_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, repeat: bool) -> Tensor:
    """Causal attention in which image tokens also see later image tokens: [B, S, H, D] -> [B, S, H * D].

    Args:
        query: [B, S, H, D].
        key, value: [B, S, HK, D]; each K/V head serves H / HK query heads.
        bias: [B, 1, S, S], 0 where a query may look, the dtype's lowest value elsewhere.
        repeat: see `must_repeat`.
    """
    if repeat:
        groups = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    return _fused(query, key, value, bias).flatten(2)


def must_repeat(device: torch.device) -> bool:
    """Whether K and V have to be repeated for the query heads.

    Of PyTorch's fused attentions on a GPU only cuDNN's takes a bias and K/V heads of groups.
    """
    return device.type == "cuda" and not torch.backends.cuda.cudnn_sdp_enabled()


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[B, Q, H, D] from [B, Q, H, D] and [B, K, HK, D]."""
    grouped = query.shape[2] != key.shape[2]
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """One query over few keys, for very many small problems: [B, 1, H, D].

    Image pooling is batch x 392 problems of four keys. cuDNN's fused attention refuses that from batch 128
    on; as plain products it works at any.
    """
    key, value = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (key, value))
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) * key.to(exact)).sum(-1) / query.shape[-1] ** 0.5  # [B, K, H]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, 0, 0, :, None], float("-inf"))
    weights = scores.softmax(1)
    if mask is not None:  # a problem without any key: zeros, as the fused kernels give
        weights = weights.nan_to_num(0.0)
    return (weights[..., None] * value.to(exact)).sum(1, keepdim=True).to(query.dtype)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))
