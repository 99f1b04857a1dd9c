"""Why a model cannot go through a pipeline, said before training.

A pipeline runs through our own forwards: the host's call all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from somaspeed_patch import features
from somaspeed_patch.layouts.layout import parse

_FEATURE_OF = {"pi05": "compact_tokens", "molmoact2": "fresh_modulations", "groot": "modality_kv"}
"""One feature that only this family's patch has: known while the patch is on."""


def of(model: nn.Module, family: str, tp: int) -> str | None:
    """Why not, or None.

    Args:
        family: a key of `WHY_NOT`, or it is refused.
        tp: ranks that share the heads.
    """
    if tp > 1:
        return f"together with tp={tp} it is not built; use tp or pp, and dp_shard beside it"
    if family not in WHY_NOT:
        return f"no stages are known for {family}, only for {', '.join(WHY_NOT)}"
    if features.value(_FEATURE_OF[family]) is None:
        return f"it runs through our own forward, but the patch {family!r} is not on; add it"
    return WHY_NOT[family](model)


def _pi05(model: nn.Module) -> str | None:
    """The host's own forward goes through a pipeline too: the function that it calls a layer is hooked."""
    from somaspeed_patch.pi05 import forward

    core = _owner(model, "paligemma_with_expert")
    why = forward.refusal(core)
    wrapping = [
        name for name in ("gradient_checkpointing", "compile_model") if getattr(core.config, name, False)
    ]
    if why is None or not wrapping:
        return None
    return f"the host's own forward runs ({why}), and not with {' and '.join(wrapping)}; switch that off"


def _molmoact2(model: nn.Module) -> str | None:
    from somaspeed_patch.molmoact2 import refusals

    policy: Any = next(module for module in model.modules() if hasattr(type(module), "_backbone"))
    return _needs_frozen(_sharded() or refusals.of_pipeline(policy))


def _groot(model: nn.Module) -> str | None:
    from somaspeed_patch import frozen

    for feature in ("frozen_prefix", "modality_kv"):
        if not features.value(feature):
            return _needs_frozen(f"{feature} is off")
    head = _owner(model, "action_head").action_head
    if type(head.model).__name__ != "AlternateVLDiT":
        return f"the action head's blocks are a {type(head.model).__name__}'s, not an AlternateVLDiT's"
    why = frozen.why_not_frozen(_owner(model, "backbone").backbone)
    return _needs_frozen(_sharded() or (None if why is None else f"the backbone is not frozen: {why}"))


def _needs_frozen(why: str | None) -> str | None:
    return None if why is None else f"it needs our forward with the vision-language side frozen, but {why}"


def _sharded() -> str | None:
    chosen = parse(str(features.value("layout"))).frozen
    return None if chosen == "whole" else f"with frozen={chosen} it has no whole weights; use frozen=whole"


def _owner(model: nn.Module, child: str) -> Any:
    """The module that has a child of this name."""
    return next(module for module in model.modules() if child in module._modules)


WHY_NOT: Mapping[str, Callable[[nn.Module], str | None]] = {
    "pi05": _pi05,
    "molmoact2": _molmoact2,
    "groot": _groot,
}
