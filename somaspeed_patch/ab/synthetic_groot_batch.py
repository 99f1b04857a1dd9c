"""A random GR00T N1.7 batch as LeRobot's preprocessor leaves it on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import facts
from somaspeed_patch.ab.synthetic_groot_model import REAL_ACTION, REAL_STATE

LIBERO = 2  # libero_sim, the embodiment of the first sample
_PADDING = 0
_FIRST, _LAST = 3, 2  # text tokens around images and instruction: "<|im_start|>user\n" and "<|im_end|>\n"
_MARKS = 2  # "<|vision_start|>" and "<|vision_end|>" around each image


def make(
    model: Any,
    lengths: Tensor,
    *,
    side: int,
    cameras: int,
    chunk: int,
    embodiments: int,
    device: torch.device,
    seed: int,
) -> dict[str, Tensor]:
    """B samples of S tokens and N images in all, of P patches and P / 4 tokens each.

    Args:
        model: the host's GR00TN17, for its configurations.
        lengths: [B] int64 on the CPU, tokens of each sample that no image gave; S fits the first, which is
            the longest. The others are padded on the left, as the host's tokenizer does it.
        side: pixels of an image's side, a multiple of 32.
        chunk: actions of the 40 that are real; the rest are masked, as with LIBERO's 16.
        embodiments: how many robots the samples are spread over.
    Returns: moved from the CPU: input_ids, attention_mask and mm_token_type_ids [B, S] and image_grid_thw
        [N, 3] int64, embodiment_id [B] int32, state [B, 1, dims], action and action_mask [B, 40, dims] fp32;
        and pixel_values [N * P, 1536] fp32, bytes scaled to [-1, 1].
    Raises: ValueError: a prompt is too short to hold what stands around its images, or the model has fewer
        embodiments, or actions.
    """
    _check(model.config, int(lengths.min()), cameras, chunk, embodiments)
    rng, samples = torch.Generator().manual_seed(seed), len(lengths)
    patches = side // model.backbone.visual.config.patch_size
    merged = patches // model.backbone.visual.config.spatial_merge_size
    longest = _longest(model.backbone.model.config, lengths, cameras, merged**2, rng)
    made = {
        **_prompt(longest, lengths, model.backbone.model.config.image_token_id),
        "image_grid_thw": torch.tensor([[1, patches, patches]]).repeat(samples * cameras, 1),
        "embodiment_id": (LIBERO + torch.arange(samples, dtype=torch.int32) % embodiments)
        % model.config.max_num_embodiments,
        **_numbers(model.config, samples, chunk, rng),
    }
    batch = {key: facts.to(value, device) for key, value in made.items()}
    batch["pixel_values"] = _pixels(samples * cameras * patches**2, model, device, seed)
    return batch


def _check(config: Any, shortest: int, cameras: int, chunk: int, embodiments: int) -> None:
    around = _FIRST + cameras * _MARKS + _LAST
    if shortest < around:
        raise ValueError(
            f"synthetic batch: a prompt of {shortest} tokens cannot hold the {around} around its images; "
            "set tokens to twice that or more"
        )
    for name, asked, most in (
        ("chunk", chunk, config.action_horizon),
        ("embodiments", embodiments, config.max_num_embodiments),
    ):
        if asked > most:
            raise ValueError(f"synthetic batch: {name} must be at most the model's {most}, but is {asked}")


def _longest(config: Any, lengths: Tensor, cameras: int, merged: int, rng: torch.Generator) -> Tensor:
    """Ids [B, S], where every text is as long as the first sample's: images first, then the instruction."""
    special = config.vision_start_token_id, config.vision_end_token_id, config.image_token_id
    shape = (len(lengths), int(lengths[0]) - cameras * _MARKS)
    # the tokenizer puts its special tokens behind all words
    text = torch.randint(_PADDING + 1, min(special), shape, generator=rng)
    image = torch.tensor([special[0], *[special[2]] * merged, special[1]]).repeat(len(lengths), cameras)
    return torch.cat([text[:, :_FIRST], image, text[:, _FIRST:]], 1)


def _prompt(ids: Tensor, lengths: Tensor, image_token: int) -> dict[str, Tensor]:
    """Every sample cut to its length at the end of its text, and padded on the left to S."""
    source = torch.arange(ids.shape[1]) - (lengths[0] - lengths)[:, None]
    real = source >= 0
    ids = ids.gather(1, source.clamp(min=0)).where(real, _PADDING)
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "mm_token_type_ids": (ids == image_token).long(),
    }


def _numbers(config: Any, samples: int, chunk: int, rng: torch.Generator) -> dict[str, Tensor]:
    """State and actions in [-1, 1], zero in the dimensions that the robot lacks and after the chunk."""
    state = torch.rand(samples, 1, config.max_state_dim, generator=rng) * 2 - 1
    action = torch.rand(samples, config.action_horizon, config.max_action_dim, generator=rng) * 2 - 1
    real = (torch.arange(config.max_action_dim) < REAL_ACTION).repeat(config.action_horizon, 1)
    real[chunk:] = False
    return {
        "state": state.masked_fill(torch.arange(config.max_state_dim) >= REAL_STATE, 0.0),
        "action": action.masked_fill(~real, 0.0),
        "action_mask": real.float().repeat(samples, 1, 1),
    }


def _pixels(patches: int, model: Any, device: torch.device, seed: int) -> Tensor:
    """[patches, 3 * 2 * 16 * 16] fp32: colours, two frames that are the same image, a patch's pixels.

    Bytes as the host normalises them; in place: 640 samples are 2 GB.
    """
    vision = model.backbone.visual.config
    shape = (patches, vision.in_channels, 1, vision.patch_size**2)
    rng = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=rng)
    frames = drawn.expand(-1, -1, vision.temporal_patch_size, -1).reshape(patches, -1)
    return frames.float().div_(127.5).sub_(1.0)
