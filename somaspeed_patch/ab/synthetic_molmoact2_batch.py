"""A random MolmoAct2 batch as LeRobot's preprocessor leaves it on the device: one crop an image, resized."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from somaspeed_patch import facts
from somaspeed_patch.ab import synthetic_molmoact2_model as model

ACTION_DIM, REAL_ACTION_DIM = 32, 7  # the first is fixed by the host, the second is LIBERO's
_FIRST, _BETWEEN = 4, 3  # text tokens before the first image ("<bos>Image 1") and before each other one
_PADDING = 0


def make(
    config: Any,
    lengths: Tensor,
    *,
    cameras: int,
    chunk: int,
    padding: str | None,
    device: torch.device,
    seed: int,
) -> dict[str, Tensor]:
    """B samples of S tokens and N images in all, of P patches and Q pooled tokens each.

    Args:
        config: the host's model configuration.
        lengths: [B] int64 on the CPU, text tokens of each sample; S fits the first, which is the longest.
        padding: left or right; None where all lengths are equal.
    Returns: moved from the CPU: input_ids and attention_mask [B, S] int64, token_type_ids [B, S] bool,
        image_token_pooling [N * Q, 4] int64 with -1 where a square has no patch, image_grids [N, 4] and
        image_num_crops [N] int64, action [B, chunk, 32] fp32, action_dim_is_pad [B, 32] and
        action_horizon_is_pad [B, chunk] bool; and pixel_values [N, P, 588] fp32, bytes scaled to [-1, 1].
    Raises: ValueError: a prompt is too short to hold what stands before its images.
    """
    shortest, lead = int(lengths.min()), _FIRST + (cameras - 1) * _BETWEEN
    if padding is not None and shortest < lead:
        raise ValueError(
            f"synthetic batch: a prompt of {shortest} tokens cannot hold the {lead} before its last image; "
            "set tokens to twice that or more"
        )
    rng = torch.Generator().manual_seed(seed)
    samples, side = len(lengths), config.vit_config.image_default_input_size[0]
    grid, pooling = _image(side)
    made = {
        **_prompt(_longest(config, lengths, cameras, grid, rng), lengths, padding),
        "image_token_pooling": pooling.repeat(samples * cameras, 1),
        "image_grids": grid.repeat(samples * cameras, 1),
        "image_num_crops": torch.ones(samples * cameras, dtype=torch.int64),
        **_actions(samples, chunk, rng),
    }
    batch = {key: facts.to(value, device) for key, value in made.items()}
    batch["pixel_values"] = _pixels(samples * cameras, (side // model.PATCH) ** 2, device, seed)
    return batch


def _image(side: int) -> tuple[Tensor, Tensor]:
    """Of one image, from the host's own processor: grid [1, 4] and pooling [pooled, 4]."""
    from lerobot.policies.molmoact2.molmoact2_hf_model import image_processing_molmoact2 as host
    from PIL import Image

    black, half = np.zeros((side, side, 3), np.uint8), [0.5] * 3
    crop = [1, [4, 4], [side, side], Image.Resampling.BILINEAR]
    grid, _, pooling = host.image_to_patches_and_grids(
        black, *crop, half, half, model.PATCH, model.POOL, model.POOL, crop_mode="resize"
    )
    return torch.from_numpy(grid), torch.from_numpy(pooling)


def _longest(
    config: Any, lengths: Tensor, cameras: int, grid: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids [B, S], and which of them belong to an image; every text is as long as the first sample's."""
    height, width = int(grid[0, 0]), int(grid[0, 1])
    rows = [*[model.IMAGE_PATCH] * width, model.IMAGE_COLUMN] * height
    image = torch.tensor([model.IMAGE_START, *rows, model.IMAGE_END]).expand(len(lengths), -1)
    shape = (len(lengths), int(lengths[0]))
    text = torch.randint(model.FIRST_TEXT, config.text_config.vocab_size, shape, generator=rng)
    parts, taken = [], 0
    for camera in range(cameras):
        upto = _FIRST + camera * _BETWEEN
        parts += [text[:, taken:upto], image]
        taken = upto
    ids = torch.cat([*parts, text[:, taken:]], 1)
    return ids, (ids < model.FIRST_TEXT)


def _prompt(longest: tuple[Tensor, Tensor], lengths: Tensor, padding: str | None) -> dict[str, Tensor]:
    """Every sample cut to its length at the end of its text, and padded on one side to S."""
    ids, images = longest
    missing = (int(lengths[0]) - lengths)[:, None]
    source = torch.arange(ids.shape[1]) - (missing if padding == "left" else 0)
    real = (source >= 0) & (source < ids.shape[1] - missing)
    source = source.clamp(min=0).expand_as(ids)
    return {
        "input_ids": ids.gather(1, source).where(real, _PADDING),
        "attention_mask": real.long(),
        "token_type_ids": images.gather(1, source) & real,
    }


def _actions(samples: int, chunk: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Actions in [-1, 1], all of them real, zero in the dimensions that the robot lacks."""
    lacking = torch.arange(ACTION_DIM) >= REAL_ACTION_DIM
    action = torch.rand(samples, chunk, ACTION_DIM, generator=rng) * 2 - 1
    return {
        "action": action.masked_fill(lacking, 0.0),
        "action_dim_is_pad": lacking.repeat(samples, 1),
        "action_horizon_is_pad": torch.zeros(samples, chunk, dtype=torch.bool),
    }


def _pixels(images: int, patches: int, device: torch.device, seed: int) -> Tensor:
    """[images, patches, 588] fp32, bytes as the host normalises them; in place: 256 samples are 0.9 GB."""
    shape, rng = (images, patches, model.PATCH**2 * 3), torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=rng)
    return drawn.float().div_(127.5).sub_(1.0)
