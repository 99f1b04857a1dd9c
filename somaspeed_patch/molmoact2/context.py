"""The frozen language model: what the action expert reads of it are the keys and values of every layer.

Shapes: B samples, S tokens, W the model's width, H query heads, HK heads of K and V, D a head's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from somaspeed_patch.layouts import stages
from somaspeed_patch.molmoact2.attention import language_attention, must_repeat

LayerFn = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the language model leaves behind."""

    keys: list[Tensor | None]
    """[B, S, HK * D] a layer, after the rotary embedding; None: it is on another stage of a pipeline"""
    values: list[Tensor | None]
    """[B, S, HK * D] a layer, or None"""
    hidden: Tensor | None
    """[B, S, W] after the final norm; None where nobody reads it"""


def run(
    transformer: Any,
    hidden: Tensor,
    position_ids: Tensor,
    bias: Tensor,
    *,
    need_hidden: bool,
    layer_fn: LayerFn | None = None,
) -> Context:
    """All layers, without gradient if the caller says so.

    Args:
        transformer: the host's MolmoAct2TextModel, its blocks of the pre-norm kind.
        hidden: [B, S, W], embeddings.
        position_ids: [1 or B, S].
        bias: [B, 1, S, S], see `language_attention`.
        need_hidden: False skips everything after the last layer's K and V.
        layer_fn: `language_layer` or a compiled version of it.
    """
    step = layer_fn or language_layer
    keys: list[Tensor | None] = []
    values: list[Tensor | None] = []
    blocks = transformer.blocks[: transformer.config.num_hidden_layers]
    pairs, repeat = rotary(transformer, hidden, position_ids), must_repeat(hidden.device)
    for index, block in enumerate(blocks):
        (hidden,) = stages.enter(block, hidden)
        key = value = None
        cos, sin = pairs(index)
        if stages.elsewhere(block):
            pass
        elif index == len(blocks) - 1 and not need_hidden:
            key, value = last_keys_and_values(block, hidden, cos, sin)
        else:
            hidden, key, value = step(block, hidden, cos, sin, bias, repeat)
        keys.append(key)
        values.append(value)
    last = transformer.ln_f(stages.leave(blocks, hidden)) if need_hidden else None
    return Context(keys=keys, values=values, hidden=last)


def language_layer(
    block: Any, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, repeat: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer: hidden [B, S, W] -> hidden, and its K and V [B, S, HK * D].

    Args:
        cos, sin: [1 or B, S, D].
        bias, repeat: as of `language_attention`.
    """
    attention = block.self_attn
    projected = attention.att_proj(block.attn_norm(hidden))
    query, key, value = projected.split(attention.fused_dims, dim=-1)
    query = rotate(normed_heads(attention, "q_norm", query), cos, sin)
    key = rotate(normed_heads(attention, "k_norm", key), cos, sin)
    value = value.unflatten(-1, (-1, attention.head_dim))
    hidden = hidden + attention.attn_out(language_attention(query, key, value, bias, repeat))
    hidden = hidden + block.mlp(block.ff_norm(hidden))
    # V as its own memory: as a view it would keep Q, K and V of every layer, 5.2 MB a layer and sample.
    return hidden, key.flatten(2), value.flatten(2).contiguous()


def last_keys_and_values(block: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a layer [B, S, HK * D], without its queries, attention and feed-forward."""
    attention = block.self_attn
    projection, queries = attention.att_proj, attention.fused_dims[0]
    normed = block.attn_norm(hidden)
    if type(projection) is nn.Linear:
        bias = None if projection.bias is None else projection.bias[queries:]
        projected = F.linear(normed, projection.weight[queries:], bias)
    else:  # wrapped: only its forward knows what it computes
        projected = projection(normed)[..., queries:]
    key, value = projected.split(attention.fused_dims[1:], dim=-1)
    return rotate(normed_heads(attention, "k_norm", key), cos, sin).flatten(2), value.contiguous()


def normed_heads(attention: Any, norm: str, x: Tensor) -> Tensor:
    """[B, S, heads * D] -> [B, S, heads, D], normed a head at a time (Qwen3) or over all heads."""
    layer = getattr(attention, norm)
    if layer is None or attention.q_norm is None or attention.k_norm is None:
        return x.unflatten(-1, (-1, attention.head_dim))
    if attention.qk_norm_type == "qwen3":
        return layer(x.unflatten(-1, (-1, attention.head_dim)))
    return layer(x).unflatten(-1, (-1, attention.head_dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, S, heads, D] by cos and sin [1 or B, S, D]."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def rotary(transformer: Any, hidden: Tensor, position_ids: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """cos and sin of a layer: one pair for all, or another one for the layers with a scaled embedding."""
    scaled_layers = transformer.config.rope_scaling_layers
    if scaled_layers is None:
        pair = transformer.rotary_emb(hidden, position_ids)
        return lambda index: pair
    pairs = {name: rope(hidden, position_ids) for name, rope in transformer.rotary_embs.items()}
    return lambda index: pairs["scaling" if index in scaled_layers else "default"]
