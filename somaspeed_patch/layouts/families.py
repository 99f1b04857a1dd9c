"""What differs between model families, as data: which modules are gathered together.

A pattern is a dotted name with `*` for an index; it is looked for anywhere in the model, so the same entry
serves a policy, a policy inside PEFT's wrapper, and both homes of GR00T. What no unit holds belongs to the
root, which is gathered for the whole step: embeddings, projections, and whatever the host's code reads
without calling the module it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    name: str
    needs: tuple[str, ...]
    """patterns that a model of this family has"""
    units: tuple[str, ...]
    """each match is gathered for its own forward and freed after it"""
    never_run: tuple[str, ...] = ()
    """trainable, and computed by no training step: alone, so that nobody ever gathers them"""
    called_alone: tuple[str, ...] = ()
    """inside a unit, but the host calls them before or after it: units of their own"""
    stacks: tuple[tuple[str, ...], ...] = ()
    """blocks that a pipeline cuts, in the order of their calls; those side by side go at the same index"""
    classes: tuple[str, ...] = ()
    """names of its blocks' classes, as hosts ask for them"""
    acts: tuple[str, ...] = ("predict_action_chunk",)
    """methods by which hosts have the model act on an observation"""


FAMILIES = (
    Family(
        name="pi05",
        needs=("paligemma_with_expert.paligemma", "paligemma_with_expert.gemma_expert.model.layers.*"),
        units=(
            "vision_tower.vision_model.encoder.layers.*",
            "paligemma_with_expert.paligemma.model.language_model.layers.*",
            "paligemma_with_expert.gemma_expert.model.layers.*",
            "paligemma_with_expert.paligemma.model.language_model.embed_tokens",
        ),
        never_run=("paligemma_with_expert.paligemma.lm_head", "paligemma_with_expert.gemma_expert.lm_head"),
        stacks=(
            (
                "paligemma_with_expert.paligemma.model.language_model.layers.*",
                "paligemma_with_expert.gemma_expert.model.layers.*",
            ),
        ),
        classes=("SiglipEncoderLayer", "_PiGemmaDecoderLayerBase"),
    ),
    Family(
        name="molmoact2",
        needs=("action_expert.blocks.*", "transformer.blocks.*", "vision_backbone"),
        # Not the whole vision tower and not the whole expert: the host calls parts of them from outside.
        units=(
            "vision_backbone.image_vit.transformer.resblocks.*",
            "transformer.blocks.*",
            "action_expert.blocks.*",
            "transformer.wte",
        ),
        called_alone=("action_expert.blocks.*.cross_attn.k_norm",),
        stacks=(("transformer.blocks.*", "action_expert.blocks.*"),),
        classes=("MolmoAct2DecoderLayer", "ActionExpertBlock"),
    ),
    Family(
        name="groot",
        needs=("backbone.model", "action_head.model.transformer_blocks.*"),
        units=(
            "visual.blocks.*",
            "visual.deepstack_merger_list.*",
            "language_model.layers.*",
            "action_head.vl_self_attention.transformer_blocks.*",
            "action_head.model.transformer_blocks.*",
        ),
        stacks=(
            ("language_model.layers.*",),
            ("action_head.vl_self_attention.transformer_blocks.*",),
            ("action_head.model.transformer_blocks.*",),
        ),
        classes=("Qwen3VLTextDecoderLayer", "BasicTransformerBlock"),
        acts=("predict_action_chunk", "get_action"),
    ),
)


def of(model: nn.Module) -> Family | None:
    """The family that a model belongs to, by its modules' names."""
    names = [name for name, _ in model.named_modules()]
    for family in FAMILIES:
        if all(any(_matches(pattern, name) for name in names) for pattern in family.needs):
            return family
    return None


def modules(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a matching name, pattern by pattern, each once."""
    named = list(model.named_modules())
    for pattern in patterns:
        yield from ((name, module) for name, module in named if _matches(pattern, name))


def _matches(pattern: str, name: str) -> bool:
    return _compiled(pattern).search(name) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(^|\.)" + re.escape(pattern).replace(r"\*", r"\d+") + "$")
