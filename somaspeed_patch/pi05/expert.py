"""The trainable suffix: action tokens through the expert, attending to the prefix's K/V and to their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from somaspeed_patch.kernels.split_attention import split_attention
from somaspeed_patch.layouts import stages, units
from somaspeed_patch.pi05.prefix import Prefix, fold, heads, mlp_input, projection_dtype, rotate, unfold


def run(
    expert: Any,
    hidden: Tensor,
    cond: Tensor,
    prefix: Prefix,
    *,
    rotary_emb: Any,
    recompute: bool,
    layer_fn: Callable[..., Any] | None = None,
    attention: str | None = None,
) -> Tensor:
    """All expert layers and the final norm: hidden [B, S, W] -> [B, S, W].

    Args:
        expert: the host's PiGemmaModel of the action expert.
        cond: [B, W], the time embedding that modulates the norms.
        rotary_emb: the host uses PaliGemma's for both streams.
        recompute: activation checkpointing, a layer at a time.
        layer_fn: `expert_layer` or a compiled version of it.
        attention: `impl` of `split_attention`.
    """
    step = layer_fn or expert_layer
    steps = torch.arange(hidden.shape[1], device=hidden.device)
    cos, sin = rotary_emb(hidden.to(projection_dtype(expert.layers[0])), prefix.offset + steps)
    for layer, key, value in zip(expert.layers, prefix.keys, prefix.values, strict=True):
        (hidden,) = stages.enter(layer, hidden)
        if stages.elsewhere(layer):
            continue
        arguments = (layer, step, hidden, cond, cos, sin, key, value, prefix.length, prefix.mask, attention)
        if recompute:
            hidden = checkpoint(units.call, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = units.call(*arguments)
    return expert.norm(stages.leave(expert.layers, hidden), cond=cond)[0]


def expert_layer(
    layer: Any,
    hidden: Tensor,
    cond: Tensor,
    cos: Tensor,
    sin: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    impl: str | None = None,
) -> Tensor:
    """One adaRMS Gemma layer: hidden [B, S, W], prefix K and V [B, 1, N, D] -> hidden [B, S, W]."""
    attention = layer.self_attn
    normed, gate = layer.input_layernorm(hidden, cond=cond)
    query = rotate(heads(attention.q_proj(normed), attention.head_dim), cos, sin)
    key = rotate(heads(attention.k_proj(normed), attention.head_dim), cos, sin).transpose(1, 2)
    value = heads(attention.v_proj(normed), attention.head_dim).transpose(1, 2)
    mixed = split_attention(
        fold(query),
        prefix_key,
        prefix_value,
        key,
        value,
        len_a=length,
        mask_a=mask,
        scale=attention.scaling,
        impl=impl,
    )
    update = attention.o_proj(unfold(mixed, query).to(attention.o_proj.weight.dtype))
    hidden = _gated(hidden, update, gate)
    normed, gate = layer.post_attention_layernorm(hidden, cond=cond)
    return _gated(hidden, layer.mlp(mlp_input(layer, normed)), gate)


def _gated(residual: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return residual + update if gate is None else residual + update * gate
