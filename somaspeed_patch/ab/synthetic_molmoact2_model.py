"""LeRobot's MolmoAct2 with random weights: its own constructor, without a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.tiny_molmoact2 import checkpoint, sizes

PATCH = checkpoint.PATCH
POOL = 2  # patches of a pooled square's side

IMAGE_START, IMAGE_END, IMAGE_PATCH, IMAGE_COLUMN = 1, 3, 5, 6
FIRST_TEXT = 16  # ids from here on mean text; 0 is padding
_IDS = {
    "image_start_token_id": IMAGE_START,
    "low_res_image_start_token_id": 2,
    "image_end_token_id": IMAGE_END,
    "image_low_res_id": 4,
    "image_patch_id": IMAGE_PATCH,
    "image_col_id": IMAGE_COLUMN,
    "frame_start_token_id": 7,
    "frame_end_token_id": 8,
}


def build(recipe: Synthetic, device: torch.device) -> Any:
    """A MolmoAct2Policy that trains its action expert only, on the device, in training mode."""
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    torch.manual_seed(0)
    with without_checkpoint(recipe.size, device):
        policy = MolmoAct2Policy(policy_config(recipe, device.type))
    _fill_zeros(policy)
    policy.train()
    return policy


def policy_config(recipe: Synthetic, device: str) -> Any:
    """LeRobot's configuration for LIBERO: 8 state dimensions, 7 of an action, `cameras` images."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config

    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, 256, 256))
    return MolmoAct2Config(
        checkpoint_path="random weights",
        action_mode="continuous",
        train_action_expert_only=True,
        num_flow_timesteps=8,
        chunk_size=recipe.chunk,
        n_action_steps=recipe.chunk,
        model_dtype=recipe.dtype,
        device=device,
        input_features={
            **{f"observation.images.image{i}": image for i in range(recipe.cameras)},
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(8,)),
        },
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(7,))},
    )


@contextmanager
def without_checkpoint(size: str, device: torch.device) -> Iterator[None]:
    """Inside the block MolmoAct2Policy builds its model at `size` on the device and reads no file.

    It replaces the four names through which LeRobot's module reads a checkpoint; freezing, checks and the
    action horizon stay the host's own work.
    """
    from lerobot.policies.molmoact2 import modeling_molmoact2 as host

    replaced = _stand_ins(host, size, device)
    before = {name: getattr(host, name) for name in replaced}
    try:
        for name, stand_in in replaced.items():
            setattr(host, name, stand_in)
        yield
    finally:
        for name, value in before.items():
            setattr(host, name, value)


def _stand_ins(host: Any, size: str, device: torch.device) -> Mapping[str, Any]:
    config = host.HFMolmoAct2Config(**_sections(size), attn_implementation="sdpa", **_IDS)
    model = host.MolmoAct2ForConditionalGeneration
    return {
        "_resolve_checkpoint_location": lambda path, **options: path,
        "HFMolmoAct2Config": SimpleNamespace(from_pretrained=lambda path, **options: config),
        "MolmoAct2ForConditionalGeneration": SimpleNamespace(from_pretrained=_constructor(model, device)),
        "_strict_load_safetensors_weights": lambda model, path: None,
    }


def _constructor(model: Any, device: torch.device) -> Callable[..., Any]:
    """What stands in for `from_pretrained`: weights are made where and as what they stay."""

    def make(path: str, *, config: Any, dtype: torch.dtype, **options: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return model(config)
        finally:
            torch.set_default_dtype(before)

    return make


def _sections(size: str) -> dict[str, dict[str, Any]]:
    """The sub-configurations. Attention is SDPA in each: the top's choice does not reach them.

    The full size is fixed by the published counts of parameters, to the unit. A smaller one gets one
    more patch a side, an odd number, so that pooling pads as it does at the real 27, and its own vocabulary:
    there is no tokenizer here.
    """
    chosen = sizes.by_name(size)
    if size != "full":
        side = chosen.image_side + PATCH
        chosen = replace(chosen, image_side=side, vocabulary=512, added_vocabulary=16)
    found = checkpoint.sections(chosen, chosen.depth)
    for name in ("text_config", "vit_config", "adapter_config"):
        found[name]["attn_implementation"] = "sdpa"
    return found


def _fill_zeros(policy: Any) -> None:
    """Small random values in tables and matrices that start from zero and would hide what multiplies them."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(0, 0.02)
