"""From the batch to the frozen language model's input, without asking the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import constants, facts, frozen
from somaspeed_patch.cpu_threads import one_thread
from somaspeed_patch.guarded import Declined
from somaspeed_patch.molmoact2 import layout, vision
from somaspeed_patch.molmoact2.embedding import embed
from somaspeed_patch.molmoact2.layout import Layout

_VISION = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
_CONTRADICTION = "the batch's images do not fit its tokens"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the language model runs on."""

    embeddings: Tensor
    """[B, S, W]"""
    position_ids: Tensor
    """[1 or B, S]"""
    bias: Tensor
    """[B, 1, S, S] added to attention scores"""


def why_not(inputs: Mapping[str, Tensor]) -> str | None:
    """Why these model inputs need the host's own preparation, or None."""
    if inputs.get("input_ids") is None:
        return "there are no input_ids"
    if inputs.get("inputs_embeds") is not None:
        return "the batch has inputs_embeds"
    if inputs.get("pixel_values_videos") is not None:
        return "the batch has videos"
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "attention_mask is not [batch, tokens]"
    if inputs.get("pixel_values") is not None and any(inputs.get(key) is None for key in _VISION):
        return f"pixel_values without {', '.join(_VISION[1:])}"
    return None


def prepare(backbone: Any, transformer: Any, tower: Any, inputs: Mapping[str, Tensor]) -> Prepared:
    """Embeddings with the image features in them, positions and attention bias.

    Args:
        backbone: the host's MolmoAct2Model.
        transformer, tower: its language model and vision backbone, or working copies of them.
    Raises: Declined: the batch contradicts itself; the host knows how to say it.
    """
    ids = inputs["input_ids"]
    embeddings = _embed(transformer.wte, ids * (ids != -1).to(ids.dtype))
    if inputs.get("pixel_values") is not None:
        positions, features = _features(backbone, tower, inputs)
        flat = embeddings.flatten(0, 1)
        flat = flat.index_copy(0, positions, flat[positions] + features)
        embeddings = flat.view_as(embeddings)
    embeddings = transformer.emb_drop(embeddings)
    bias = backbone._build_native_attention_bias(
        inputs_embeds=embeddings,
        attention_mask=inputs.get("attention_mask"),
        token_type_ids=inputs.get("token_type_ids"),
        past_key_values=None,
    )
    lower = frozen.autocast_dtype(bias.device)
    if lower is not None and torch.finfo(lower).min > torch.finfo(bias.dtype).min:
        # Autocast would round fp32's lowest value to -inf, and a token that may look nowhere (padding on the
        # left) would be NaN.
        bias = bias.clamp(min=torch.finfo(lower).min)
    position_ids = inputs.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(embeddings.shape[1], device=embeddings.device).unsqueeze(0)
    return Prepared(embeddings=embeddings, position_ids=position_ids, bias=bias)


def _embed(wte: Any, ids: Tensor) -> Tensor:
    return embed(wte, ids) if hasattr(wte, "new_embedding") else wte(ids)


@one_thread()
def plan(backbone: Any, inputs: Mapping[str, Tensor]) -> Layout | None:
    """The images' layout; None where it contradicts the other tensors."""
    ids = facts.on_cpu(inputs["input_ids"])
    grids, crops = facts.on_cpu(inputs["image_grids"]), facts.on_cpu(inputs["image_num_crops"])
    ends = (ids == backbone.config.image_end_token_id).sum(1)
    pixels = inputs["pixel_values"]
    found = layout.plan(ends, grids, crops, pixels.shape[1])
    fits = found is not None and layout.fits(found, pixels, inputs["image_token_pooling"])
    return found if fits else None


def _features(backbone: Any, tower: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Positions of the image tokens in the flattened batch, and their features."""
    found = plan(backbone, inputs)
    if found is None:
        raise Declined(_CONTRADICTION)
    positions, rows = _tokens(backbone, found, inputs)
    images, patches = layout.batched(found, inputs["pixel_values"], inputs["image_token_pooling"])
    features = vision.image_features(tower, images, patches, rows)
    return constants.on(features.device, positions), features


@one_thread()
def _tokens(backbone: Any, found: Layout, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Positions of the image tokens, and the rows of the pooled tokens that go there (None: all)."""
    ids = facts.on_cpu(inputs["input_ids"])
    positions = (ids.flatten() == backbone.config.image_patch_id).nonzero().flatten()
    rows = vision.token_rows(found, facts.on_cpu(inputs["image_token_pooling"]))
    if len(positions) != (found.samples * found.pooled if rows is None else len(rows)):
        raise Declined(_CONTRADICTION)
    return positions, rows


@one_thread()
def all_ones(mask: Tensor | None) -> bool:
    """Whether a mask is known, without asking the device, to be True everywhere. None counts as such."""
    return mask is None or (facts.has_twin(mask) and bool(facts.on_cpu(mask).bool().all()))
