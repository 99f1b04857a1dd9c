"""Why a training step of MolmoAct2 has to be the host's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from somaspeed_patch import features, frozen, guarded
from somaspeed_patch.molmoact2 import inputs


def of(feature: str, policy: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why `feature`, frozen_prefix or shared_context, cannot serve this call of the policy, or None."""
    if not features.value(feature):
        return f"{feature} is off"
    earlier = guarded.why_not(policy, f"molmoact2/{feature}")
    if earlier is not None:
        return earlier
    backbone = policy._backbone()
    why = _unlike_the_host(policy, backbone) or inputs.why_not(kwargs["model_inputs"])
    if why is None and feature == "frozen_prefix":
        why = _why_not_frozen(policy, backbone)
    return why


def _unlike_the_host(policy: Any, backbone: Any) -> str | None:
    """What neither of our ways knows."""
    expert = backbone.action_expert
    if expert is None or len(expert.blocks) != int(backbone.transformer.config.num_hidden_layers):
        return "there is not one action expert block a language layer"
    if expert.training and float(getattr(expert.config, "attn_dropout", 0.0)) > 0:
        return "attention dropout is active in the expert, its random mask has the repeated K/V's shape"
    odd = next((type(p).__name__ for p in expert.parameters() if type(p) is not nn.Parameter), None)
    if odd is not None:
        return f"the expert's parameters are {odd}s, not plain ones"
    return _hooked("action expert", expert.blocks)


def _why_not_frozen(policy: Any, backbone: Any) -> str | None:
    """Why the vision-language side cannot run once without gradient."""
    if backbone.transformer.config.norm_after:
        return "the language model norms after its layers"
    insulated = policy.config.enable_knowledge_insulation and policy.config.action_mode == "continuous"
    for name, module in (("language model", backbone.transformer), ("vision side", backbone.vision_backbone)):
        why = None if module is None else frozen.why_not_frozen(module, cut_off=insulated)
        if why is not None:
            return f"the {name} is not frozen: {why}"
    return _hooked("language model", backbone.transformer.blocks)


def _hooked(name: str, blocks: Iterable[nn.Module]) -> str | None:
    """Hooks on a block's forward would not fire, because its parts are called one by one."""
    hooked = any(block._forward_hooks or block._forward_pre_hooks for block in blocks)
    return f"somebody has forward hooks on blocks of the {name}" if hooked else None
