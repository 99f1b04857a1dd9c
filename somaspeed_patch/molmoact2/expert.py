"""The trainable action expert: one K and V a sample, however many flow timesteps are drawn for it.

The host repeats the projected K and V of every layer for each timestep, 431 MB a sample for 8 of them. They
are the same numbers: the timesteps' rows are queries of one attention, so a view replaces the copies, and dK
and dV are summed over the timesteps inside the kernel.

Shapes: B samples, F timesteps, T actions, S context tokens, W the expert's width, H heads, D a head's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What all layers need to know of the action rows."""

    timesteps: int
    """F"""
    conditioning: Tensor
    """[B * F, W], the time embedding that modulates the norms"""
    rotary: tuple[Tensor, Tensor] | None
    """cos and sin [1, 1, T, D / 2]"""
    self_mask: Tensor | None
    """[B * F, 1, 1 or T, T] added to scores among actions; None: all are real"""
    cross_mask: Tensor | None
    """[B, 1, 1, S] added to scores against the context; None: all of it is real"""
    valid: Tensor | None
    """[B * F, T, 1], 0 where an action is padding; None: all are real"""


def arguments(expert: Any, key: Tensor, value: Tensor, rows: Rows) -> tuple[Any, ...]:
    """What `expert_layer` takes after the block and its hidden states."""
    cos, sin = rows.rotary if rows.rotary is not None else (None, None)
    return (
        expert, rows.conditioning, key, value,
        cos, sin, rows.self_mask, rows.cross_mask, rows.valid, rows.timesteps,
    )  # fmt: skip


def expert_layer(
    block: Any,
    hidden: Tensor,
    expert: Any,
    conditioning: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    self_mask: Tensor | None,
    cross_mask: Tensor | None,
    valid: Tensor | None,
    timesteps: int,
) -> Tensor:
    """One block of the expert: hidden [B * F, T, W] -> [B * F, T, W].

    Args:
        expert: the host's ActionExpert, whose context projections all blocks share.
        key, value: [B, S, HK * D] of the language model's layer.
        The others: see `Rows`.
    """
    # First, as in the host: LoRA's dropout on these projections draws random numbers in this order.
    keys, values = projected_context(expert, block, key, value)
    chunks = block.modulation(conditioning).unsqueeze(1).chunk(9, dim=-1)
    (shift_self, scale_self, gate_self), (shift_cross, scale_cross, gate_cross) = chunks[:3], chunks[3:6]
    shift_mlp, scale_mlp, gate_mlp = chunks[6:]
    attended = block.self_attn(
        block.self_norm(hidden) * (1 + scale_self) + shift_self,
        attn_mask=self_mask,
        is_causal=expert.config.causal_attn,
        rope_cache=None if cos is None else (cos, sin),
    )
    hidden = hidden + gate_self * attended
    normed = block.cross_norm(hidden) * (1 + scale_cross) + shift_cross
    crossed = cross_attention(block.cross_attn, normed, keys, values, cross_mask, timesteps)
    hidden = hidden + gate_cross * crossed
    hidden = hidden + gate_mlp * block.mlp(block.ff_norm(hidden) * (1 + scale_mlp) + shift_mlp)
    return hidden if valid is None else hidden * valid


def projected_context(expert: Any, block: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the language model [B, S, HK * D] as the expert's [B, S, H, D]."""
    heads = (expert.config.num_heads, -1)
    keys = expert.context_norm(expert.context_k_proj(key)).unflatten(-1, heads)
    values = expert.context_norm(expert.context_v_proj(value)).unflatten(-1, heads)
    norm = block.cross_attn.k_norm
    return (keys if norm is None else norm(keys)), values


def cross_attention(
    attention: Any, hidden: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, timesteps: int
) -> Tensor:
    """The host's cross-attention with the F rows of a sample side by side: [B * F, T, W] -> [B * F, T, W]."""
    query = attention.q_proj(hidden).unflatten(-1, (attention.num_heads, -1))
    if attention.q_norm is not None:
        query = attention.q_norm(query)
    folded = query.reshape(-1, timesteps * hidden.shape[1], *query.shape[2:])
    mixed = F.scaled_dot_product_attention(
        folded.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
    )
    return attention.out_drop(attention.out_proj(mixed.transpose(1, 2).reshape(hidden.shape)))
