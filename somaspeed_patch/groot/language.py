"""Qwen3-VL's language model as GR00T reads it: up to the last layer's output, no norm, no logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.layouts import stages


def features(
    model: Any,
    embeddings: Tensor,
    places: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    deepstack: Sequence[Tensor],
    layer_fn: Callable[..., Tensor],
) -> Tensor:
    """The output of the last decoder layer, [B, S, W].

    Args:
        model: the host's Qwen3VLTextModel, or a working copy of it.
        embeddings: [B, S, W] with the images' features in them.
        places: [3, B, S] int64.
        mask: as the host's attention takes it.
        positions: [image tokens] in the flattened batch.
        deepstack: [image tokens, W] added behind each of the first layers.
        layer_fn: `layer`, or a compiled one.
    """
    hidden, (cos, sin) = embeddings, model.rotary_emb(embeddings, places)
    for index, block in enumerate(model.layers):
        (hidden,) = stages.enter(block, hidden)
        if stages.elsewhere(block):
            continue
        hidden = layer_fn(block, hidden, mask, cos, sin, places[0])
        last = index == len(model.layers) - 1
        if index < len(deepstack) and not (last and not adds_in_place(model)):
            hidden = with_added(hidden, positions, deepstack[index])
    return stages.leave(model.layers, hidden)


def layer(
    block: Any, hidden: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor, places: Tensor
) -> Tensor:
    """One decoder layer, by the host's own module.

    Args:
        hidden: [B, S, W].
        cos, sin: [B, S, D].
        places: [B, S], which only flash attention reads.
    """
    output = block(
        hidden, position_embeddings=(cos, sin), attention_mask=mask, position_ids=places,
        past_key_values=None, use_cache=False,
    )  # fmt: skip
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def with_features(embeddings: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """The embeddings [B, S, W] with the images' features [image tokens, W] in their places."""
    flat = embeddings.flatten(0, 1)
    return flat.index_copy(0, positions, features.to(flat.dtype)).view_as(embeddings)


def with_added(hidden: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """The hidden states [B, S, W] with features [image tokens, W] added in their places."""
    flat = hidden.flatten(0, 1)
    return flat.index_copy(0, positions, flat[positions] + features.to(flat.dtype)).view_as(hidden)


def adds_in_place(model: Any) -> bool:
    """Whether the host adds deepstack features into the tensor that it has recorded as a layer's output.

    Transformers 4.57 does, 5.5 clones first. It makes a difference where the last layer is among the first
    ones, as in a model of two layers.
    """
    probe = torch.zeros(1, 1, 1)
    model._deepstack_process(probe, torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1))
    return bool(probe.any())
