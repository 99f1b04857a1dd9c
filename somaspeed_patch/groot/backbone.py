"""GR00T's Qwen3Backbone.forward: the vision-language side of a training step, on both hosts.

Frozen parts run without gradient, the images of one size in one batch, the language model without the norm
and the logits that nobody reads. Where the vision tower trains, or images differ in size, the host's own
forward runs, its logits kept to one token a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import compiled, constants, facts, features, frozen, guarded, sites, train_mode
from somaspeed_patch.groot import language, tokens, vision
from somaspeed_patch.groot.tokens import Tokens

_KEYS = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
_VIDEOS = ("pixel_values_videos", "video_grid_thw")
_inside: ContextVar[bool] = ContextVar("somaspeed_groot_backbone", default=False)
_layers = compiled.Layers("groot/compile", dynamic=None)


def forward(wrapped: Any, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Qwen3Backbone.forward(vl_input)."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    site = sites.site(_site("frozen_prefix"))
    inputs = args[0] if args else kwargs["vl_input"]
    why = _refusal(backbone, inputs, site)
    hosts = partial(_hosts, wrapped, backbone, inputs)
    if why is None:
        return guarded.or_hosts(site, backbone, partial(_features, backbone), hosts, args, kwargs)
    site.declined(why)
    return hosts(*args, **kwargs)


def encode(backbone: Any, vl_input: Mapping[str, Tensor]) -> Any:
    """The backbone's output where nothing trains: our way, or the host's own where that does not fit."""
    site = sites.site(_site("frozen_prefix"))
    why = _refusal(backbone, vl_input, site)
    if why is not None:
        site.declined(why)
        return backbone(vl_input)
    return guarded.or_hosts(site, backbone, partial(_features, backbone), backbone, (vl_input,), {})


def why_not_frozen(backbone: Any) -> str | None:
    """Why the whole backbone does not count as frozen, or None."""
    return frozen.why_not_frozen(_qwen(backbone))


def logits(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Qwen3VLForConditionalGeneration.forward: inside GR00T's backbone, logits of the last token only."""
    asked = "logits_to_keep" in kwargs or kwargs.get("labels") is not None
    if not _inside.get() or asked or args or not features.value("skip_logits"):
        return wrapped(*args, **kwargs)
    sites.site(_site("skip_logits")).ran()
    return wrapped(*args, logits_to_keep=1, **kwargs)


def release() -> None:
    """Drop copies, compiled layers and what is known of prompts and images."""
    for part in (frozen, constants, tokens, vision):
        part.release()
    guarded.release("groot")
    _layers.clear()


def _site(name: str) -> str:
    return f"groot/{name}"


def _hosts(wrapped: Any, backbone: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The host's forward with few logits; its masks get twins, which the action head asks for."""
    token = _inside.set(True)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _inside.reset(token)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and facts.has_twin(ids) and facts.has_twin(mask):
        image = facts.on_cpu(ids) == backbone.model.config.image_token_id
        facts.attach(result["image_mask"], facts.TWIN, image)
        facts.attach(result["backbone_attention_mask"], facts.TWIN, facts.on_cpu(mask) == 1)
    return result


def _refusal(backbone: Any, inputs: Mapping[str, Any], site: sites.Site) -> str | None:
    """Why the host's own forward has to run, or None."""
    if not features.value("frozen_prefix"):
        return "frozen_prefix is off"
    earlier = guarded.why_not(backbone, site.site)
    if earlier is not None:
        return earlier
    if any(inputs.get(key) is None for key in _KEYS) or any(key in inputs for key in _VIDEOS):
        return f"the batch is not of {', '.join(_KEYS)}"
    qwen = _qwen(backbone)
    why = frozen.why_not_frozen(qwen.visual)
    if why is not None:
        return f"the vision tower is not frozen: {why}"
    return _unlike_the_host(qwen)


def _unlike_the_host(qwen: Any) -> str | None:
    """What our way through the modules would not do as the host does."""
    for part in frozen.walk(qwen):
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            if hooks and not all(map(_transformers_own, hooks.values())):
                return f"somebody has hooks on a {type(part).__name__}"
    implementation = qwen.config.text_config._attn_implementation
    if implementation not in ("sdpa", "flash_attention_2"):
        return f"the language model's attention is {implementation}"
    return None


def _transformers_own(hook: Any) -> bool:
    """A hook that records outputs when asked to, or lets gradients into a checkpointed embedding.

    Neither has an effect on what is computed here: nobody asks, and the frozen side has no gradients.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _qwen(backbone: Any) -> Any:
    """The model of vision tower and language model, without the head."""
    return getattr(backbone.model, "model", backbone.model)


def _features(backbone: Any, vl_input: Mapping[str, Tensor]) -> Any:
    """Qwen3Backbone.forward's own lines around what is computed here."""
    qwen, ids = _qwen(backbone), vl_input["input_ids"]
    _evaluate_what_is_frozen(backbone, qwen)
    known = tokens.read(qwen, vl_input)
    result = {
        "backbone_features": _run(qwen, vl_input, known),
        "backbone_attention_mask": vl_input["attention_mask"] == 1,
        "image_mask": ids == qwen.config.image_token_id,
    }
    facts.attach(result["backbone_attention_mask"], facts.TWIN, known.valid)
    facts.attach(result["image_mask"], facts.TWIN, known.image)
    return _batch_feature(result)


def _evaluate_what_is_frozen(backbone: Any, qwen: Any) -> None:
    """Qwen3Backbone.set_frozen_modules_to_eval_mode."""
    frozen_parts = [
        part
        for part, tuned in ((qwen.language_model, backbone.tune_llm), (qwen.visual, backbone.tune_visual))
        if not tuned
    ]
    on = features.value("train_mode") and backbone.training
    if not on or not all(train_mode.set_directly(part, False) for part in frozen_parts):
        backbone.set_frozen_modules_to_eval_mode()


def _run(qwen: Any, inputs: Mapping[str, Tensor], known: Tokens) -> Tensor:
    device = inputs["input_ids"].device
    positions = constants.once(device, known.positions)
    why = frozen.why_not_frozen(qwen.language_model)
    sites.site(_site("frozen_prefix")).reason = "" if why is None else f"the vision tower alone: {why}"
    with torch.no_grad():
        visual = frozen.under_autocast(qwen.visual, device, _site("cast_once"))
        found, deepstack = vision.features(
            visual, inputs["pixel_values"], known.grid, known.images, _layers.of(vision.layer)
        )
    with torch.no_grad() if why is None else nullcontext():
        text = qwen.language_model
        if why is None:
            text = frozen.under_autocast(text, device, _site("cast_once"))
        embeddings = language.with_features(text.embed_tokens(inputs["input_ids"]), positions, found)
        return language.features(
            text, embeddings, _places(qwen, inputs, known), _mask(qwen, inputs, known), positions, deepstack,
            _layers.of(language.layer),
        )  # fmt: skip


def _places(qwen: Any, inputs: Mapping[str, Tensor], known: Tokens) -> Tensor:
    """[3, B, S] on the device."""
    types = None
    if hasattr(qwen, "compute_3d_position_ids"):  # transformers 5 asks for the modality of each token
        types = known.image.to(torch.int32)
        given = inputs.get("mm_token_type_ids")
        if given is not None:
            types = facts.on_cpu(given)
    places = tokens.rope_positions(qwen, known, facts.on_cpu(inputs["attention_mask"]), types)
    return constants.once(inputs["input_ids"].device, places)


def _mask(qwen: Any, inputs: Mapping[str, Tensor], known: Tokens) -> Tensor | None:
    if qwen.config.text_config._attn_implementation == "sdpa":
        return tokens.text_mask(known, inputs["input_ids"].device)
    return None if known.all_valid else inputs["attention_mask"]


def _batch_feature(data: dict[str, Any]) -> Any:
    from transformers.feature_extraction_utils import BatchFeature

    return BatchFeature(data=data)
