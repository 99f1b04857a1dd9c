"""LeRobot's GR00T N1.7 with random weights: its own constructor, without a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.tiny.replaced import Replaced
from somaspeed_patch.tiny_groot import configs, sizes

REAL_STATE, REAL_ACTION = 8, 7  # dimensions of LIBERO's robot


def build(recipe: Synthetic, device: torch.device) -> Any:
    """A GrootPolicy that trains its action head, on the device, in training mode.

    With dtype bfloat16 the frozen backbone is as `load_bf16` leaves it and the head is fp32; with float32 all
    weights are (`model_params_fp32`, LeRobot's default). Either computes under autocast to bf16.
    """
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    torch.manual_seed(0)
    with without_checkpoint(recipe, device):
        policy = GrootPolicy(policy_config(recipe, device.type))
    _fill_zeros(policy)
    policy.train()
    return policy


def policy_config(recipe: Synthetic, device: str) -> Any:
    """LeRobot's configuration for LIBERO: 8 state dimensions, 7 of an action, `cameras` images."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.groot.configuration_groot import GrootConfig

    size = _size(recipe)
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, 256, 256))
    return GrootConfig(
        base_model_path="random weights",
        embodiment_tag="libero_sim",
        max_state_dim=size.dims,
        max_action_dim=size.dims,
        model_params_fp32=recipe.dtype == "float32",
        device=device,
        input_features={
            **{f"observation.images.image{i}": image for i in range(recipe.cameras)},
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(REAL_STATE,)),
        },
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(REAL_ACTION,))},
    )


@contextmanager
def without_checkpoint(recipe: Synthetic, device: torch.device) -> Iterator[None]:
    """Inside the block GrootPolicy builds its model on the device, and reads no file."""
    from lerobot.policies.groot import modeling_groot

    replaced = Replaced()
    replaced.put(modeling_groot, "GR00TN17", lambda model: _stand_in(model, recipe, device))
    try:
        yield
    finally:
        replaced.restore()


def _stand_in(model: Any, recipe: Synthetic, device: torch.device) -> Any:
    """What holds the place of the class: its `from_pretrained` draws the weights where they stay."""

    def from_pretrained(pretrained_model_name_or_path: str, **options: Any) -> Any:
        options.pop("transformers_loading_kwargs")
        size = _size(recipe)
        chosen = configs.model(size, load_bf16=recipe.dtype == "bfloat16", **options)
        with configs.backbone_of(size), torch.device(device):
            return model(chosen, load_backbone_weights=False)

    stand_in: Callable[..., Any] = from_pretrained
    return SimpleNamespace(from_pretrained=stand_in)


def _size(recipe: Synthetic) -> sizes.Size:
    """The recipe's, with the real model's dropout, which micro does not have."""
    return replace(sizes.by_name(recipe.size), dropout=sizes.by_name("full").dropout)


def _fill_zeros(policy: Any) -> None:
    """Small random values in what starts from zero: a part that is left out would not show."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)
