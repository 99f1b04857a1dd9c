"""What also serves a policy whose backbone trains: modes, embedding, image batching, vision attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import features, guarded, sites, train_mode
from somaspeed_patch.guarded import Declined
from somaspeed_patch.molmoact2 import inputs, layout
from somaspeed_patch.molmoact2.attention import vision_attention
from somaspeed_patch.molmoact2.embedding import embed


def train(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """MolmoAct2Policy.train, whose walks are left out where every module is in its mode already."""
    if torch.compiler.is_compiling() or not features.value("train_mode"):
        return wrapped(*args, **kwargs)
    mode = args[0] if args else kwargs.get("mode", True)
    setting = (mode, getattr(policy.config, "train_action_expert_only", False))
    if train_mode.already(policy, setting):
        policy._set_inference_cuda_graph_enabled(not mode)  # no module's mode: the host's last line
        sites.site("molmoact2/train_mode").ran()
        return policy
    result = wrapped(*args, **kwargs)
    train_mode.note(policy, setting)
    return result


def embedding(wrapped: Any, wte: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """MolmoAct2Embedding.forward."""
    return _served("split_embedding", wte, partial(embed, wte), wrapped, args, kwargs)


def batch_images(wrapped: Any, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """MolmoAct2Model.build_batched_images."""
    return _served("batched_images", backbone, partial(_batch_images, backbone), wrapped, args, kwargs)


def attend(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ViTMultiHeadDotProductAttention.forward."""
    return _served("fused_attention", module, partial(_attend, module), wrapped, args, kwargs)


def _served(
    feature: str, owner: Any, ours: Any, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Ours in training; inference, and what the user compiles, stay the host's."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    site = sites.site(f"molmoact2/{feature}")
    why = f"{feature} is off" if not features.value(feature) else guarded.why_not(owner, site.site)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    return guarded.or_hosts(site, owner, ours, wrapped, args, kwargs)


def _batch_images(
    backbone: Any,
    input_ids: Tensor,
    pixel_values: Tensor,
    image_token_pooling: Tensor,
    image_grids: Tensor,
    image_num_crops: Tensor,
) -> tuple[Tensor, Tensor]:
    found = inputs.plan(
        backbone,
        {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
            "image_token_pooling": image_token_pooling,
            "image_grids": image_grids,
            "image_num_crops": image_num_crops,
        },
    )
    if found is None:
        raise Declined("the batch's images do not fit its tokens")
    return layout.batched(found, pixel_values, image_token_pooling)


def _attend(
    module: Any, inputs_q: Tensor, inputs_kv: Tensor | None = None, attn_mask: Tensor | None = None
) -> Tensor:
    if module.attn_implementation not in ("eager", "sdpa"):
        raise Declined(f"the host's attention is {module.attn_implementation}")
    if module.training and module.attention_dropout > 0:
        raise Declined("attention dropout is active, its random mask depends on the implementation")
    return vision_attention(module, inputs_q, inputs_kv, attn_mask)
