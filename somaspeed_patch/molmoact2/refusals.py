"""Why a training step of MolmoAct2 has to be the host's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from somaspeed_patch import features, frozen, guarded
from somaspeed_patch.layouts import stages, units
from somaspeed_patch.molmoact2 import inputs


def unknown_host(policy: Any) -> str | None:
    """Why the policy's training step is not the one of LeRobot 0.6.1, or None.

    LeRobot main (0.6.2, 7427f31) keeps the names and signatures, but draws in fp32, masks causally and makes
    positions of the mask; its configuration has `dtype` in the place of `model_dtype`.
    """
    if hasattr(policy.config, "model_dtype"):
        return None
    return "this LeRobot's MolmoAct2 is another than 0.6.1's (its configuration has no model_dtype)"


def of(feature: str, policy: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why `feature`, frozen_prefix or shared_context, cannot serve this call of the policy, or None."""
    if not features.value(feature):
        return f"{feature} is off"
    earlier = unknown_host(policy) or guarded.why_not(policy, f"molmoact2/{feature}")
    if earlier is not None:
        return earlier
    if kwargs.get("reduction", "mean") not in ("mean", "none"):
        return f"reduction is {kwargs['reduction']!r}"
    backbone = policy._backbone()
    why = _unlike_the_host(policy, backbone) or inputs.why_not(kwargs["model_inputs"])
    if why is None and feature == "frozen_prefix":
        why = _why_not_frozen(policy, backbone)
    return why


def of_pipeline(policy: Any) -> str | None:
    """Why the training steps to come cannot run with the language model before the expert, or None."""
    if not features.value("frozen_prefix"):
        return "frozen_prefix is off"
    backbone = policy._backbone()
    why = unknown_host(policy) or _unlike_the_host(policy, backbone)
    return why or _why_not_frozen(policy, backbone)


def _unlike_the_host(policy: Any, backbone: Any) -> str | None:
    """What neither of our ways knows."""
    expert = backbone.action_expert
    if expert is None or len(expert.blocks) != int(backbone.transformer.config.num_hidden_layers):
        return "there is not one action expert block a language layer"
    if expert.training and float(getattr(expert.config, "attn_dropout", 0.0)) > 0:
        return "attention dropout is active in the expert, its random mask has the repeated K/V's shape"
    if stages.piped(expert.blocks) or units.in_shards(policy):  # the layout's, and units.call does as it asks
        return None
    odd = next((type(p).__name__ for p in _parameters(expert) if type(p) is not nn.Parameter), None)
    if odd is not None:
        return f"the expert's parameters are {odd}s, not plain ones"
    hooked = any(_has_hooks(block) or _has_hooks(block.cross_attn) for block in expert.blocks)
    return "somebody has hooks on blocks of the action expert" if hooked else None


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Without the names that `module.parameters()` makes for each: 0.5 ms instead of 4."""
    return (p for part in frozen.walk(module) for p in part._parameters.values() if p is not None)


def _why_not_frozen(policy: Any, backbone: Any) -> str | None:
    """Why the vision-language side cannot run once without gradient."""
    if backbone.transformer.config.norm_after:
        return "the language model norms after its layers"
    insulated = policy.config.enable_knowledge_insulation and policy.config.action_mode == "continuous"
    for name, module in (("language model", backbone.transformer), ("vision side", backbone.vision_backbone)):
        why = None if module is None else frozen.why_not_frozen(module, cut_off=insulated)
        if why is not None:
            return f"the {name} is not frozen: {why}"
        why = None if module is None else _why_not_in_parts(name, module)
        if why is not None:
            return why
    return None


def _why_not_in_parts(name: str, module: nn.Module) -> str | None:
    """Why a frozen module cannot be run part by part, its last language layer only for K and V.

    Attention dropout is a number of the host's attention modules, no module that `frozen` would find.
    """
    for part in frozen.walk(module):
        if _has_hooks(part):
            return f"somebody has hooks on modules of the {name}"
        if part.training and getattr(part, "attention_dropout", 0) > 0:
            return f"attention dropout is active in the {name}"
    return None


def _has_hooks(module: nn.Module) -> bool:
    """They would not fire, because this module is not called as a whole, or not at all.

    The one that transformers puts on the embedding for gradient checkpointing need not: it makes all layers
    of the frozen model keep activations for a gradient that nobody reads.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = module._forward_hooks.values()
    return any("enable_input_require_grads" not in getattr(hook, "__qualname__", "") for hook in hooks)
