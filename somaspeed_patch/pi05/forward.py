"""Hooks on PI05Pytorch: the split training forward where PaliGemma is frozen, the host's own otherwise."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from somaspeed_patch import features, frozen, guarded, recorded, sites
from somaspeed_patch.compiled import CompiledLayer, compile_in_place, eager_again
from somaspeed_patch.layouts import units
from somaspeed_patch.pi05 import expert, prefix
from somaspeed_patch.sites import Site

log = logging.getLogger(__name__)

HOST = "lerobot.policies.pi05.modeling_pi05"

# LeRobot main (0.6.2) passes these too: a clean action prefix (training-time RTC) and a memory of states.
LATER_INPUTS = ("prefix_mask", "states", "state_masks")
_LATER_OPTIONS = ("rtc_training_max_delay", "use_visual_memory", "use_proprioceptive_memory")

_layers: dict[str, CompiledLayer] = {}
_host_layer: list[Any] = []  # the host's compute_layer_complete as it was when we patched


def remember_host() -> None:
    """Note the host functions that the split forward stands in for; a later patch of them must win."""
    _host_layer[:] = [sys.modules[HOST].compute_layer_complete]


def release() -> None:
    """Drop copies, compiled layers and notes."""
    frozen.release()
    guarded.release("pi05")
    _layers.clear()


def training_forward(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """PI05Pytorch.forward: the element-wise loss [B, S, action], by the split forward or by the host's."""
    if torch.compiler.is_compiling():  # inside a compiled region of the user's: trace the host's own code
        return wrapped(*args, **kwargs)
    site = sites.site("pi05/frozen_prefix")
    why = refusal(model) or _later_input(args[7:], kwargs)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    return guarded.or_hosts(site, model, partial(split_forward, model), wrapped, args, kwargs)


def _later_input(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call with inputs of a later host is the host's own, or None where they are not used."""
    used = [value for value in (*rest, *(kwargs.get(name) for name in LATER_INPUTS)) if value is not None]
    return f"one of {', '.join(LATER_INPUTS)} is given" if used else None


def refusal(model: Any) -> str | None:
    """Why the host's forward has to run, or None."""
    if not features.value("frozen_prefix"):
        return "frozen_prefix is off"
    earlier = guarded.why_not(model, "pi05/frozen_prefix")
    if earlier is not None:
        return earlier
    if sys.modules[HOST].compute_layer_complete is not _host_layer[0]:
        return "somebody replaced compute_layer_complete, which the split forward would not call"
    later = next((name for name in _LATER_OPTIONS if getattr(model.config, name, False)), None)
    if later is not None:
        return f"the policy has {later}"
    joint = model.paligemma_with_expert
    kv_heads = joint.paligemma.config.text_config.num_key_value_heads
    if kv_heads != 1:
        return f"needs one K/V head for all query heads, found {kv_heads}"
    # Not its lm_head, which no training step computes.
    why = frozen.why_not_frozen(joint.paligemma.model, sharded=True)
    return None if why is None else f"the PaliGemma side is not frozen: {why}"


def split_forward(
    model: Any,
    images: list[Tensor],
    img_masks: list[Tensor],
    tokens: Tensor,
    masks: Tensor,
    actions: Tensor,
    noise: Tensor,
    time: Tensor,
    *_unused: None,
    **_unset: None,
) -> Tensor:
    """The flow-matching loss [B, S, A] of PI05Pytorch.forward, with the prefix outside the gradient.

    Args:
        images, img_masks: [B, 3, height, width] and [B] bool a camera.
        tokens, masks: [B, L].
        actions, noise: [B, S, A].
        time: [B] in (0, 1).
    """
    mix = time[:, None, None]
    noisy = mix * noise + (1 - mix) * actions
    with torch.no_grad():
        context = encode(model, images, img_masks, tokens, masks)
    return F.mse_loss(noise - actions, velocity(model, noisy, time, context), reduction="none")


def encode(
    model: Any,
    images: list[Tensor],
    img_masks: list[Tensor],
    tokens: Tensor,
    masks: Tensor,
    *,
    need_hidden: bool = False,
    compact: bool | None = None,
) -> prefix.Prefix:
    """The frozen side of a step; arguments as of `split_forward`, `need_hidden` as of `prefix.run`.

    Args: compact: of `prefix.plan`; None: as the feature compact_tokens says.
    """
    trunk = working_trunk(model, tokens.device)
    wanted = bool(features.value("compact_tokens")) if compact is None else compact
    layout = prefix.plan(img_masks, masks, _image_tokens(trunk), wanted)
    if compact is None:
        _count_compaction(layout)
    embeddings = _embed(trunk, images, tokens, layout, _compiling(model))
    if _is_bf16(trunk):
        embeddings = embeddings.to(torch.bfloat16)
    layer_fn = _layer_fn(model, prefix.prefix_layer)
    return prefix.run(trunk, embeddings, layout, layer_fn, _attention(), need_hidden=need_hidden)


def velocity(model: Any, noisy: Tensor, time: Tensor, context: prefix.Prefix) -> Tensor:
    """The expert's prediction of noise - action: [B, S, A] fp32 for noisy actions [B, S, A] and time [B]."""
    with recorded.constants():
        hidden, _, _, cond = model.embed_suffix(noisy, time)
    hidden = _expert(model, hidden, cond, context)
    hidden = hidden[:, -model.config.chunk_size :].float()
    found: Tensor = model._apply_checkpoint(model.action_out_proj, hidden)
    return found


def _expert(model: Any, hidden: Tensor, cond: Tensor, context: prefix.Prefix) -> Tensor:
    joint = model.paligemma_with_expert
    if _is_bf16(joint.paligemma.model):
        hidden = hidden.to(torch.bfloat16)
    return expert.run(
        joint.gemma_expert.model,
        hidden,
        cond,
        context,
        rotary_emb=joint.paligemma.model.language_model.rotary_emb,
        recompute=model.gradient_checkpointing_enabled and model.training and torch.is_grad_enabled(),
        layer_fn=_layer_fn(model, expert.expert_layer),
        attention=_attention(),
    )


def working_trunk(model: Any, device: torch.device) -> Any:
    """The frozen PaliGemmaModel to run: the host's, or a copy with its autocast weights cast once."""
    host = model.paligemma_with_expert.paligemma.model
    dtype = frozen.autocast_dtype(device) if features.value("cast_once") else None
    sharded = any(map(units.is_sharded, host.language_model.layers))  # of a pipeline, each rank has a part
    if (dtype is None and not _compiling(model)) or sharded:
        return host
    if dtype is not None:
        sites.site("pi05/cast_once").ran()
    return frozen.working_copy(host, dtype)


def _embed(
    trunk: Any, images: list[Tensor], tokens: Tensor, layout: prefix.Layout, compiling: bool
) -> Tensor:
    if not compiling:
        return prefix.embed(trunk, images, tokens, layout)
    site = _compile_site()
    vision_layers = trunk.vision_tower.vision_model.encoder.layers
    if site.last_fallback is None and not units.is_sharded(vision_layers[0]):
        compile_in_place(vision_layers)
    try:
        return prefix.embed(trunk, images, tokens, layout)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # The compiler's; if it was something else, the eager call below raises it again.
        site.failed(error)
        log.warning("pi05: compiling the vision tower failed, it runs eagerly: %s", error)
        eager_again(vision_layers)
        return prefix.embed(trunk, images, tokens, layout)


def _layer_fn(model: Any, eager: Any) -> Any:
    if not _compiling(model):
        return eager
    if eager.__name__ not in _layers:
        _layers[eager.__name__] = CompiledLayer(eager, _compile_site())
    return _layers[eager.__name__]


def _compiling(model: Any) -> bool:
    """The feature, or the policy's own compile_model: the user asked for a compiled forward either way."""
    return bool(features.value("compile") or model.config.compile_model)


def _compile_site() -> Site:
    return sites.site("pi05/compile")


def _attention() -> str | None:
    return None if features.value("split_attention") else "reference"


def _is_bf16(trunk: Any) -> bool:
    """The host's own test for casting both streams to bf16."""
    return trunk.language_model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def _image_tokens(trunk: Any) -> int:
    return int(trunk.vision_tower.vision_model.embeddings.num_patches)


def _count_compaction(layout: prefix.Layout) -> None:
    site = sites.site("pi05/compact_tokens")
    if not features.value("compact_tokens"):
        site.declined("compact_tokens is off")
    elif not layout.lengths_known:
        site.declined("the prompts' lengths are known to the device only; every language slot is computed")
    else:
        site.ran()


def frozen_vision(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PI05Pytorch.embed_prefix in training, vision tower frozen: one no_grad call for all cameras."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # inference stays the host's
        return wrapped(*args, **kwargs)
    site = sites.site("pi05/frozen_vision")
    why = _vision_refusal(model, site) or _later_input(args[4:], kwargs)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    return guarded.or_hosts(site, model, partial(_embed_with_frozen_vision, model), wrapped, args, kwargs)


def _vision_refusal(model: Any, site: Site) -> str | None:
    if not features.value("frozen_vision"):
        return "frozen_vision is off"
    earlier = guarded.why_not(model, site.site)
    if earlier is not None:
        return earlier
    if getattr(model.config, "use_visual_memory", False):
        return "the policy has use_visual_memory"
    why = frozen.why_not_frozen(model.paligemma_with_expert.paligemma.model.vision_tower)
    return None if why is None else f"the vision tower is not frozen: {why}"


def _embed_with_frozen_vision(
    model: Any,
    images: list[Tensor],
    img_masks: list[Tensor],
    tokens: Tensor,
    masks: Tensor,
    *_unused: None,
    **_unset: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What embed_prefix returns: embeddings [B, N, W], pad mask and attention mask [B, N] bool."""
    joint = model.paligemma_with_expert
    tower, projector = joint.paligemma.model.vision_tower, joint.paligemma.model.multi_modal_projector
    dtype = frozen.autocast_dtype(tokens.device) if features.value("cast_once") else None
    if dtype is not None:
        tower = frozen.working_copy(tower, dtype)

    def image_features(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = tower(pixels).last_hidden_state
        return model._apply_checkpoint(projector, hidden)

    seen = prefix.embed_images(image_features, images)
    language = model._apply_checkpoint(joint.embed_language_tokens, tokens)
    pad = prefix.pad_mask(img_masks, masks, seen.shape[1] // len(images))
    return torch.cat([seen, language], dim=1), pad, torch.zeros_like(pad)
