"""GR00T N1.7: LeRobot's port and NVIDIA's gr00t package, one description for both hosts.

Hooks are class attributes, looked up at each call, so the model may have been built before `patch()`.
Inference is the host's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from somaspeed_patch.features import (
    CAST_ONCE,
    COMPILE,
    DEFERRED_METRICS,
    FROZEN_PREFIX,
    TRAIN_MODE,
    Feature,
)
from somaspeed_patch.registry import Patch, function, handed, with_parameters

REQUIRES = ["transformers>=4.57,<5.6", "accelerate>=1.0,<2"]

FEATURES = [
    FROZEN_PREFIX,
    CAST_ONCE,
    COMPILE,
    DEFERRED_METRICS,
    TRAIN_MODE,
    Feature(
        name="skip_logits",
        changes="GR00T where its vision tower trains: no logits for tokens whose logits nobody reads",
        exact=True,
        default=True,
    ),
    Feature(
        name="modality_kv",
        changes="GR00T: cross-attention over the tokens of its modality, not over all of them with a mask",
        exact=True,
        default=True,
    ),
    Feature(
        name="category_linear",
        changes="GR00T: no copy of an embodiment's weights for each sample",
        exact=True,
        default=True,
    ),
    Feature(
        name="async_times",
        changes="GR00T: flow times go from the CPU to the GPU without a wait for all that was launched",
        exact=True,
        default=True,
    ),
    Feature(
        name="recompute",
        changes="GR00T with compile: the backward computes norms, GELU and masks again, to save memory",
        exact=True,
        default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Host:
    """Where one host keeps its classes."""

    name: str
    backbone: str
    """module of Qwen3Backbone"""
    dit: str
    """module of AlternateVLDiT and SelfAttentionTransformer"""
    linear: str
    """module of CategorySpecificLinear"""
    head: str
    """module of the action head, and its class"""
    model: str
    """module of what the host's loop puts into training mode, and its class"""


HOSTS = (
    _Host(
        name="lerobot",
        backbone="lerobot.policies.groot.groot_n1_7",
        dit="lerobot.policies.groot.action_head.cross_attention_dit",
        linear="lerobot.policies.groot.groot_n1_7",
        head="lerobot.policies.groot.groot_n1_7:GR00TN17ActionHead",
        model="lerobot.policies.groot.modeling_groot:GrootPolicy",
    ),
    _Host(
        name="nvidia",
        backbone="gr00t.model.modules.qwen3_backbone",
        dit="gr00t.model.modules.dit",
        linear="gr00t.model.modules.embodiment_conditioned_mlp",
        head="gr00t.model.gr00t_n1d7.gr00t_n1d7:Gr00tN1d7ActionHead",
        model="gr00t.model.gr00t_n1d7.gr00t_n1d7:Gr00tN1d7",
    ),
)


def _hooked(part: str, hook: str, *names: str) -> Callable[[Any], Any]:
    """Hand the call to a function of `somaspeed_patch.groot`, if the host's takes these parameters."""
    return handed(f"somaspeed_patch.groot.{part}", hook, ["self", *names])


def _logits(original: Any) -> Any:
    from somaspeed_patch.groot import backbone

    if "logits_to_keep" not in inspect.signature(original).parameters:
        raise AttributeError("Qwen3VLForConditionalGeneration.forward takes no logits_to_keep")
    return wrapt.FunctionWrapper(original, backbone.logits)


def _policy_forward(original: Any) -> Any:
    with_parameters(original, ["self", "batch"])
    from somaspeed_patch.groot.policy_forward import policy_forward

    return function(original, policy_forward)


def _unread(original: Any) -> Any:
    with_parameters(original, ["tensor"])
    from somaspeed_patch import deferred

    return wrapt.FunctionWrapper(original, deferred.to_fp32)


def _moved(hook: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from somaspeed_patch import fact_hooks

        return wrapt.FunctionWrapper(original, getattr(fact_hooks, hook))

    return make


def _of(host: _Host) -> list[Patch]:
    """The hooks on one host."""
    dit = (
        "hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask",
        "return_all_hidden_states", "image_mask", "backbone_attention_mask",
    )  # fmt: skip
    (heads, head), (models, model) = host.head.split(":"), host.model.split(":")
    return [
        Patch(
            module=models,
            name=f"{model}.train",
            make=_hooked("policy_forward", "train", "mode"),
            site=host.name,
        ),
        Patch(
            module=heads,
            name=f"{head}.sample_time",
            make=_hooked("times", "sample_time", "batch_size", "device", "dtype"),
            site=host.name,
        ),
        Patch(
            module=host.backbone,
            name="Qwen3Backbone.forward",
            make=_hooked("backbone", "forward", "vl_input"),
            site=host.name,
        ),
        Patch(
            module=host.dit,
            name="AlternateVLDiT.forward",
            make=_hooked("dit", "forward", *dit),
            site=host.name,
        ),
        Patch(
            module=host.dit,
            name="SelfAttentionTransformer.forward",
            make=_hooked("dit", "self_attention", "hidden_states", "return_all_hidden_states"),
            site=host.name,
        ),
        Patch(
            module=host.linear,
            name="CategorySpecificLinear.forward",
            make=_hooked("category_linear", "forward", "x", "cat_ids"),
            site=host.name,
        ),
    ]


PATCHES = [
    *(patch for host in HOSTS for patch in _of(host)),
    Patch(
        module="lerobot.policies.groot.modeling_groot",
        name="GrootPolicy.forward",
        make=_policy_forward,
        site="lerobot",
    ),
    Patch(
        module="accelerate.utils.operations",
        name="convert_to_fp32",
        make=_unread,
        site="lerobot",
    ),
    Patch(
        module="transformers.models.qwen3_vl.modeling_qwen3_vl",
        name="Qwen3VLForConditionalGeneration.forward",
        make=_logits,
        site="qwen3_vl",
    ),
    Patch(
        module="lerobot.processor.device_processor",
        name="DeviceProcessorStep._process_tensor",
        make=_moved("to_device"),
        site="moves",
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer._prepare_input",
        make=_moved("prepared"),
        site="trainer_moves",
    ),
]


def release() -> None:
    """Drop what the hooks cached."""
    import sys

    for part in ("backbone", "dit", "category_linear"):
        module = sys.modules.get(f"somaspeed_patch.groot.{part}")
        if module is not None and hasattr(module, "release"):
            module.release()
