"""What tensor parallelism splits in each model family, as data.

Megatron's scheme: a layer's first projections by their outputs, that is by heads or by the MLP's inner width,
and the last one by its inputs, whose partial results are summed over the ranks. All else is whole on every
rank and computed there from the same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of module whose inside is split; names are relative to it."""

    modules: str
    """pattern, as in `families`"""
    columns: tuple[str, ...] = ()
    """nn.Linear, split by outputs"""
    rows: tuple[str, ...] = ()
    """nn.Linear, split by inputs; their outputs are summed over the ranks"""
    fused: tuple[str, ...] = ()
    """nn.Linear of q, k and v one above the other: whole on every rank, each computes its own heads' rows"""
    shared: tuple[str, ...] = ()
    """nn.Linear of the one K/V head: whole on every rank, but its output goes to the rank's own heads only"""
    arguments: tuple[str, ...] = ()
    """keyword arguments [B, N, heads, D] of the module's forward, which takes its own heads of them"""
    counts: tuple[str, ...] = ()
    """attributes that the host's code reads as a number of heads or as their width"""
    heads: str | None = None
    """the attribute that is the number of heads; None: a width is split, or see `head_size`"""
    head_size: str | None = None
    """the attribute that is a head's size, where none is the number of heads"""
    dropouts: tuple[str, ...] = ()
    """nn.Dropout on what is split: it draws for the whole width and takes its part"""
    undroppable: tuple[str, ...] = ()
    """attributes with a dropout on what is split that cannot draw as one process does: must be 0"""


def _gemma(stack: str) -> tuple[Part, ...]:
    """Gemma's layer: query heads that share one K/V head."""
    return (
        Part(
            modules=f"{stack}.layers.*.self_attn",
            columns=("q_proj",),
            rows=("o_proj",),
            shared=("k_proj", "v_proj"),
            counts=("num_key_value_groups",),
            head_size="head_dim",
            undroppable=("attention_dropout",),
        ),
        Part(modules=f"{stack}.layers.*.mlp", columns=("gate_proj", "up_proj"), rows=("down_proj",)),
    )


def _diffusers(stack: str) -> tuple[Part, ...]:
    """diffusers' block: its other dropouts come after the sums, where all ranks hold and draw the same."""
    return (
        Part(
            modules=f"{stack}.transformer_blocks.*.attn1",
            columns=("to_q", "to_k", "to_v"),
            rows=("to_out.0",),
            counts=("heads",),
            heads="heads",
        ),
        Part(
            modules=f"{stack}.transformer_blocks.*.ff",
            columns=("net.0.proj",),
            rows=("net.2",),
            dropouts=("net.1",),
        ),
    )


_EXPERT = "action_expert.blocks.*"  # of MolmoAct2
PLANS: dict[str, tuple[Part, ...]] = {
    "pi05": (
        *_gemma("paligemma_with_expert.paligemma.model.language_model"),
        *_gemma("paligemma_with_expert.gemma_expert.model"),
    ),
    "molmoact2": (
        Part(
            modules=f"{_EXPERT}.self_attn",
            fused=("qkv",),
            rows=("out_proj",),
            counts=("num_heads", "hidden_size"),
            heads="num_heads",
            undroppable=("attn_dropout",),
        ),
        Part(
            modules=f"{_EXPERT}.cross_attn",
            columns=("q_proj",),
            rows=("out_proj",),
            arguments=("kv_k", "kv_v"),
            counts=("num_heads", "hidden_size"),
            heads="num_heads",
            undroppable=("attn_dropout",),
        ),
        Part(
            modules=f"{_EXPERT}.mlp",
            columns=("gate_proj", "up_proj"),
            rows=("down_proj",),
            undroppable=("dropout.p",),  # one module drops the inner width and then the whole one
        ),
    ),
    "groot": (*_diffusers("action_head.vl_self_attention"), *_diffusers("action_head.model")),
}
