"""LeRobot's MolmoAct2 (`lerobot.policies.molmoact2`): the training step, above all with a frozen backbone.

Hooks are class attributes, looked up at each call, so the policy may have been built before `patch()`.
Inference (`predict_action_chunk`, `select_action`, real-time chunking) is the host's, except that it does not
use modulations cached before a weight changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
from somaspeed_patch.registry import Patch, function, with_parameters

REQUIRES = ["lerobot>=0.6.1,<0.7", "accelerate>=1.0,<2"]

FEATURES = [
    FROZEN_PREFIX,
    CAST_ONCE,
    COMPILE,
    Feature(
        name="shared_context",
        changes="MolmoAct2 whose language model trains: one K/V a sample for all its flow timesteps",
        exact=True,
        default=True,
    ),
    Feature(
        name="fused_attention",
        changes="MolmoAct2: fused attention in vision tower and pooling (any batch), not eager in fp32",
        exact=True,
        default=True,
    ),
    Feature(
        name="batched_images",
        changes="MolmoAct2: lay out image crops without a loop or a device sync a sample",
        exact=True,
        default=True,
    ),
    Feature(
        name="split_embedding",
        changes="MolmoAct2: look up vocabulary and added rows without joining the two tables at each call",
        exact=True,
        default=True,
    ),
    Feature(
        name="fresh_modulations",
        changes="MolmoAct2: inference during training uses the new weights, not modulations cached before",
        exact=True,
        default=True,
    ),
    DEFERRED_METRICS,
    TRAIN_MODE,
    Feature(
        name="gpu_images",
        changes="MolmoAct2: resize, normalise and cut the images into patches on the GPU; "
        "rounds a few pixels otherwise",
        exact=False,
        default=False,
    ),
]

_MODEL = "lerobot.policies.molmoact2.modeling_molmoact2"
_HF_MODEL = "lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2"
_PROCESSOR = "lerobot.policies.molmoact2.processor_molmoact2"
_HF_PROCESSOR = "lerobot.policies.molmoact2.molmoact2_hf_model.image_processing_molmoact2"


def _hooked(module: str, hook: str, *names: str) -> Callable[[Any], Any]:
    """Hand the call to a function of `somaspeed_patch.molmoact2`, if the host's takes these parameters."""

    def make(original: Any) -> Any:
        with_parameters(original, ["self", *names])
        ours = importlib.import_module(f"somaspeed_patch.molmoact2.{module}")
        return wrapt.FunctionWrapper(original, getattr(ours, hook))

    return make


def _forward(original: Any) -> Any:
    with_parameters(original, ["self", "batch", "reduction"])
    from somaspeed_patch.molmoact2.policy_forward import policy_forward

    return function(original, policy_forward)


def _unread(original: Any) -> Any:
    with_parameters(original, ["tensor"])
    from somaspeed_patch import deferred

    return wrapt.FunctionWrapper(original, deferred.to_fp32)


def _carrying(original: Any) -> Any:
    from somaspeed_patch import fact_hooks

    return wrapt.FunctionWrapper(original, fact_hooks.to_device)


_IMAGES = ("input_ids", "pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
_SETTINGS = (
    "size", "resample", "image_mean", "image_std", "do_convert_rgb", "max_crops", "overlap_margins",
    "crop_mode", "patch_size", "pooling_size", "return_tensors", "kwargs",
)  # fmt: skip

PATCHES = [
    Patch(
        module=_MODEL,
        name="MolmoAct2Policy._compute_flow_matching_loss_joint_per_layer",
        make=_hooked("forward", "flow_loss", "batch", "model_inputs", "timesteps", "noise", "reduction"),
        site="frozen_prefix",
    ),
    Patch(
        module=_MODEL,
        name="MolmoAct2Policy.forward",
        make=_forward,
        site="deferred_metrics",
    ),
    Patch(
        module="accelerate.utils.operations",
        name="convert_to_fp32",
        make=_unread,
        site="deferred_metrics",
    ),
    Patch(
        module=_MODEL,
        name="MolmoAct2Policy.train",
        make=_hooked("hooks", "train", "mode"),
        site="train_mode",
    ),
    Patch(
        module=_HF_MODEL,
        name="MolmoAct2Embedding.forward",
        make=_hooked("hooks", "embedding", "x"),
        site="split_embedding",
    ),
    Patch(
        module=_HF_MODEL,
        name="MolmoAct2Model.build_batched_images",
        make=_hooked("hooks", "batch_images", *_IMAGES),
        site="batched_images",
    ),
    Patch(
        module=_HF_MODEL,
        name="ViTMultiHeadDotProductAttention.forward",
        make=_hooked("hooks", "attend", "inputs_q", "inputs_kv", "attn_mask"),
        site="fused_attention",
    ),
    Patch(
        module=_HF_MODEL,
        name="ActionExpert.get_or_prepare_modulation_cache",
        make=_hooked("modulations", "prepare", "timesteps", "cache_key"),
        site="fresh_modulations",
    ),
    Patch(
        module="lerobot.policies.molmoact2.molmoact2_hf_model.inference",
        name="ActionCudaGraphManager.run_action_flow",
        make=_hooked("modulations", "replay", "inputs", "steps", "run_loop"),
        site="fresh_modulations",
    ),
    Patch(
        module=_PROCESSOR,
        name="MolmoAct2PackInputsProcessorStep.__call__",
        make=_hooked("gpu_images", "pack", "transition"),
        site="gpu_images",
    ),
    Patch(
        module=_HF_PROCESSOR,
        name="MolmoAct2ImageProcessor.preprocess",
        make=_hooked("gpu_images", "preprocess", "images", *_SETTINGS),
        site="gpu_images",
    ),
    Patch(
        module=_MODEL,
        name="MolmoAct2Policy._model_inputs",
        make=_hooked("gpu_images", "model_inputs", "batch"),
        site="gpu_images",
    ),
    Patch(
        module="lerobot.processor.device_processor",
        name="DeviceProcessorStep._process_tensor",
        make=_carrying,
        site="moves",
    ),
]


def release() -> None:
    """Drop what the hooks cached."""
    import sys

    for name in ("molmoact2.forward", "molmoact2.gpu_images", "molmoact2.modulations", "train_mode"):
        module = sys.modules.get(f"somaspeed_patch.{name}")
        if module is not None:
            module.release()
