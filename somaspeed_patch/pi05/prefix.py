"""The frozen prefix: embeddings of the valid tokens only, then each layer's K and V, without gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.kernels.split_attention import split_attention
from somaspeed_patch.layouts import stages, units
from somaspeed_patch.pi05 import hints

# Language slots: LIBERO prompts take about 60, and few lengths mean few compiled graphs.
BUCKETS = (64, 96, 128)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which of the prefix's tokens are computed, and which of those are valid."""

    cameras: tuple[int, ...]
    """Indices of the cameras that are embedded; an absent camera is a constant image behind a zero mask."""
    slots: int
    """Language slots kept, from the left."""
    length: Tensor | None
    """[B] int32, valid tokens a sample, which come first; None: `mask` says which are valid."""
    mask: Tensor | None
    """[B, N] bool, before any reordering."""
    order: Tensor | None
    """[B, N] int64, the permutation that brings valid tokens to the front; None: they are there already."""
    lengths_known: bool
    """Whether the prompts' lengths were known without asking the device."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """What the expert reads of the prefix."""

    keys: list[Tensor | None]
    """[B, 1, N, D] a layer; None: the layer is on another stage of a pipeline."""
    values: list[Tensor | None]
    """[B, 1, N, D] a layer, or None."""
    length: Tensor | None
    mask: Tensor | None
    offset: Tensor
    """[B, 1] int64, position of the first action token."""
    hidden: Tensor | None = None
    """[B, N, W] after the final norm, where it was asked for."""


def plan(img_masks: list[Tensor], masks: Tensor, image_tokens: int, compact: bool) -> Layout:
    """Decide which tokens are computed.

    Args:
        img_masks: [B] bool a camera.
        masks: [B, L] bool, the language's valid slots.
        image_tokens: T.
        compact: False keeps every token, in the host's order.
    """
    if not compact:
        every = tuple(range(len(img_masks)))
        whole = pad_mask(img_masks, masks, image_tokens)
        return Layout(
            cameras=every, slots=masks.shape[1], length=None, mask=whole, order=None, lengths_known=False
        )
    seen = [hints.of(mask) for mask in img_masks]
    cameras = tuple(i for i, hint in enumerate(seen) if hint is None or hint.longest > 0)
    language = hints.of(masks)
    leading = language is not None and language.leading
    slots = masks.shape[1] if language is None else bucket(language.longest, masks.shape[1])
    kept = masks[:, :slots] if leading else masks
    if leading and all(hint is not None and hint.every for hint in (seen[i] for i in cameras)):
        length, order = kept.sum(1) + len(cameras) * image_tokens, None
    else:
        pad = pad_mask([img_masks[i] for i in cameras], kept, image_tokens)
        length, order = pad.sum(1), torch.argsort((~pad).to(torch.uint8), dim=1, stable=True)
    return Layout(
        cameras=cameras,
        slots=kept.shape[1],
        length=length.to(torch.int32),
        mask=None,
        order=order,
        lengths_known=language is not None,
    )


def bucket(longest: int, slots: int) -> int:
    """The number of language slots to compute for prompts of up to `longest` tokens."""
    if longest == 0:
        return 0
    return next((size for size in BUCKETS if longest <= size < slots), slots)


def pad_mask(img_masks: list[Tensor], masks: Tensor, image_tokens: int) -> Tensor:
    """[B, N] bool, True where a token is valid, in the host's order: cameras, then language."""
    cameras = [mask[:, None].expand(-1, image_tokens) for mask in img_masks]
    return torch.cat([*cameras, masks], dim=1)


def embed(trunk: Any, images: list[Tensor], tokens: Tensor, layout: Layout) -> Tensor:
    """The kept tokens' embeddings [B, N, W], all cameras in one vision call.

    Args:
        trunk: PaliGemmaModel, the host's or a working copy.
        images: [B, 3, height, width] a camera.
        tokens: [B, L] int64.
    """
    language = trunk.language_model.get_input_embeddings()(tokens[:, : layout.slots])
    if not layout.cameras:
        return _order(language, layout.order)
    chosen = [images[i] for i in layout.cameras]
    features = embed_images(lambda pixels: trunk.get_image_features(pixels).pooler_output, chosen)
    return _order(torch.cat([features, language], dim=1), layout.order)


def embed_images(image_features: Callable[[Tensor], Tensor], images: list[Tensor]) -> Tensor:
    """[B, C * T, W] in the images' dtype, cameras side by side as the host concatenates them.

    Args:
        image_features: pixels [C * B, 3, height, width] fp32 -> [C * B, T, W].
        images: [B, 3, height, width] a camera.
    """
    pixels = torch.cat(images, dim=0)
    features = image_features(pixels.float()).to(pixels.dtype)
    stacked = features.unflatten(0, (len(images), -1))  # [C, B, T, W]
    return stacked.transpose(0, 1).flatten(1, 2)


def _order(embeddings: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return embeddings
    return embeddings.gather(1, order[..., None].expand(-1, -1, embeddings.shape[-1]))


def run(
    trunk: Any,
    embeddings: Tensor,
    layout: Layout,
    layer_fn: Callable[..., Any] | None = None,
    attention: str | None = None,
    *,
    need_hidden: bool = False,
) -> Prefix:
    """All layers over the kept tokens; the last one stops at K and V, which is all that training reads of it.

    Args:
        embeddings: [B, N, W] in the layers' dtype.
        layer_fn: `prefix_layer` or a compiled version of it.
        attention: `impl` of `split_attention`.
        need_hidden: compute the last layer and the final norm, too.
    """
    language_model = trunk.language_model
    positions = _positions(layout, embeddings)
    dtype = projection_dtype(language_model.layers[0])
    cos, sin = language_model.rotary_emb(embeddings.to(dtype), positions)
    keys: list[Tensor | None] = []
    values: list[Tensor | None] = []
    hidden = embeddings
    step = layer_fn or prefix_layer
    for layer in language_model.layers:
        (hidden,) = stages.enter(layer, hidden)
        key = value = None
        if stages.elsewhere(layer):
            pass
        elif layer is language_model.layers[-1] and not need_hidden:
            key, value = units.call(layer, _keys_values, hidden, cos, sin)[1:]
        else:
            rest = (cos, sin, layout.length, layout.mask, attention)
            hidden, key, value = units.call(layer, step, hidden, *rest)
        keys.append(key)
        values.append(value)
    return Prefix(
        keys=keys,
        values=values,
        length=layout.length,
        mask=layout.mask,
        offset=_offset(layout),
        hidden=language_model.norm(hidden)[0] if need_hidden else None,
    )


def _positions(layout: Layout, embeddings: Tensor) -> Tensor:
    """RoPE positions as the host counts them: the index among the valid tokens."""
    if layout.mask is not None:
        return layout.mask.cumsum(1) - 1
    return torch.arange(embeddings.shape[1], device=embeddings.device)[None]


def _offset(layout: Layout) -> Tensor:
    counted = layout.mask.sum(1) if layout.length is None and layout.mask is not None else layout.length
    return counted[:, None].long()  # type: ignore[index]  # a layout has one of the two


def prefix_layer(
    layer: Any,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One Gemma layer without gate or cache: hidden [B, N, W] -> hidden, K and V [B, 1, N, D]."""
    attention = layer.self_attn
    normed, key, value = _keys_values(layer, hidden, cos, sin)
    query = rotate(heads(attention.q_proj(normed), attention.head_dim), cos, sin)
    mixed = split_attention(
        fold(query), key, value, len_a=length, mask_a=mask, scale=attention.scaling, impl=impl
    )
    hidden = hidden + attention.o_proj(unfold(mixed, query).to(attention.o_proj.weight.dtype))
    normed, _ = layer.post_attention_layernorm(hidden)
    return hidden + layer.mlp(mlp_input(layer, normed)), key, value


def _keys_values(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The normed hidden state [B, N, W] with its K and V [B, 1, N, D]."""
    attention = layer.self_attn
    normed, _ = layer.input_layernorm(hidden)
    key = rotate(heads(attention.k_proj(normed), attention.head_dim), cos, sin)
    value = heads(attention.v_proj(normed), attention.head_dim)
    return normed, key.transpose(1, 2), value.transpose(1, 2)


def projection_dtype(layer: Any) -> torch.dtype:
    """The dtype q, k and v come out in: autocast's, or the weights'."""
    weight = layer.self_attn.q_proj.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def heads(projected: Tensor, head_dim: int) -> Tensor:
    """[B, N, H * D] -> [B, N, H, D], a view."""
    return projected.unflatten(-1, (-1, head_dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [B, N, H, D] by cos, sin [1 or B, N, D], operation by operation as transformers' Gemma."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, :, None] + turned * sin[:, :, None]


def fold(query: Tensor) -> Tensor:
    """[B, N, H, D] -> [B, 1, N * H, D]: all query heads share the one K/V head, so they are rows; a view."""
    return query.flatten(1, 2)[:, None]


def unfold(mixed: Tensor, query: Tensor) -> Tensor:
    """[B, 1, N * H, D] -> [B, N, H * D] for `query` [B, N, H, D]."""
    return mixed[:, 0].unflatten(1, (query.shape[1], query.shape[2])).flatten(2)


def mlp_input(layer: Any, normed: Tensor) -> Tensor:
    """The norm's output as the host hands it to the MLP: bf16 where the MLP's weights are."""
    return normed.to(torch.bfloat16) if layer.mlp.up_proj.weight.dtype == torch.bfloat16 else normed
