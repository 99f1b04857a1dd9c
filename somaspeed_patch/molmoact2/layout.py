"""Which crops and pooled image tokens belong to which sample.

The host finds out with Python loops over samples and images, each reading numbers back from the device: about
170 synchronizations a step at batch 32. All of it follows from a few small integer tensors that the processor
made on the CPU, so it is planned there, without a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from somaspeed_patch import constants


@dataclass(frozen=True, kw_only=True)
class Layout:
    """N samples of C crops and P pooled tokens each, in the order in which the processor lists them."""

    samples: int
    """N"""
    crops: int
    """most crops of a sample"""
    pooled: int
    """most pooled tokens of a sample"""
    crop_rows: Tensor | None
    """[crops] int64, row of the padded [N * C]; None: every sample has C of them, there is no padding"""
    pooled_rows: Tensor | None
    """[pooled tokens] int64, row of the padded [N * P]; None: no padding"""
    offsets: Tensor
    """[pooled tokens, 1] int64, where the patches of a token's image begin within its sample"""


def plan(image_ends: Tensor, grids: Tensor, num_crops: Tensor, patches: int) -> Layout | None:
    """The layout, or None where the tensors contradict each other (the host then says how).

    Args:
        image_ends: [N], image-end tokens of each sample.
        grids: [images, 4], pooled height and width of the low-resolution image, then of the crops.
        num_crops: [images].
        patches: patches a crop.
    """
    counts = _images_per_sample(image_ends, len(grids))
    if counts is None or len(num_crops) != len(grids):
        return None
    num_crops = num_crops.long()
    sample_of_image = torch.arange(len(counts)).repeat_interleave(counts)
    pooled = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
    first_crop = _starts(num_crops, sample_of_image)
    sample_of_crop = sample_of_image.repeat_interleave(num_crops)
    sample_of_pooled = sample_of_image.repeat_interleave(pooled)
    crops, crop_rows = _rows(sample_of_crop, len(counts))
    tokens, pooled_rows = _rows(sample_of_pooled, len(counts))
    return Layout(
        samples=len(counts), crops=crops, pooled=tokens, crop_rows=crop_rows, pooled_rows=pooled_rows,
        offsets=(first_crop * patches).repeat_interleave(pooled)[:, None],
    )  # fmt: skip


def fits(layout: Layout, pixel_values: Tensor, pooling: Tensor) -> bool:
    """Whether there are as many crops and pooled tokens as the layout says."""
    crops = layout.samples * layout.crops if layout.crop_rows is None else len(layout.crop_rows)
    return len(pixel_values) == crops and len(pooling) == len(layout.offsets)


def batched(layout: Layout, pixel_values: Tensor, pooling: Tensor) -> tuple[Tensor, Tensor]:
    """What the host's `build_batched_images` returns.

    Args:
        pixel_values: [crops, patches, pixels].
        pooling: [pooled tokens, pool], patches within an image, -1 where there is none.
    Returns: [N, C, patches, pixels] and [N, P, pool] with patches within a sample, both padded with -1.
    """
    offsets = constants.on(pooling.device, layout.offsets)
    moved = torch.where(pooling >= 0, pooling + offsets, pooling)
    images = _padded(pixel_values, layout.crop_rows, layout.samples, layout.crops)
    return images, _padded(moved, layout.pooled_rows, layout.samples, layout.pooled)


def _images_per_sample(image_ends: Tensor, images: int) -> Tensor | None:
    """An image has one end token, or two where a low-resolution copy goes before the crops."""
    total = int(image_ends.sum())
    if not images or total not in (images, 2 * images):
        return None
    counts = image_ends if total == images else image_ends // 2
    return counts if int(counts.sum()) == images else None


def _starts(sizes: Tensor, owner: Tensor) -> Tensor:
    """For items of the given sizes, ordered by owner: where each begins within its owner's."""
    before = sizes.cumsum(0) - sizes
    first = torch.searchsorted(owner, owner)  # index of the owner's first item
    return before - before[first]


def _rows(owner: Tensor, owners: int) -> tuple[int, Tensor | None]:
    """The longest owner's number of items; each item's row in the padded list, or None without padding."""
    counts = owner.bincount(minlength=owners)
    longest = int(counts.max())
    if bool((counts == longest).all()):
        return longest, None
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    return longest, owner * longest + within


def _padded(values: Tensor, rows: Tensor | None, samples: int, longest: int) -> Tensor:
    if rows is not None:
        padded = values.new_full((samples * longest, *values.shape[1:]), -1)
        values = padded.index_copy(0, constants.on(values.device, rows), values)
    return values.view(samples, longest, *values.shape[1:])
