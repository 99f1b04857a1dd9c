"""MolmoAct2's images from raw uint8 to patches, on the device where they are, rounded as on the host's CPU.

The host resizes on the CPU, one image after the other: torchvision casts uint8 to fp32, torch's bilinear
kernel interpolates without antialiasing, and the result is rounded, half to even. Going from 256 to 378
pixels every weight is near a multiple of 1/142,884, so some results lie on a half but for their own rounding,
and the order of the sum decides: all in fp64 instead, 2.1e-4 of a LIBERO frame's values are one step of 255
off; in the fixed point of torch's uint8 kernel, which torchvision does not use here, it is 7.6e-2.

So a GPU runs the sum of the host's kernel term by term. Compilers fuse its products and additions where the
CPU can (AVX2, AVX-512); a fused operation is one in fp64 here, rounded once, the product being exact. No
value differs from such a CPU's; from a CPU without fused operations 6.9e-5 do, by one step. The shares are of
32 frames (tests/test_molmoact2_gpu_images.py). On a CPU the host's own kernel runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from somaspeed_patch import constants

# 32 images of 378 pixels are 110 MB in fp64, and two such tensors are alive at once. The patches of 256
# images, two cameras of 128 samples, are 440 MB in fp32: made in one go, little beside a step's activations.
_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Processing:
    """What the image processor was set to, for the images that it left raw."""

    size: tuple[int, int]
    """height and width to resize to, in pixels"""
    mean: tuple[float, ...]
    """of each channel, in units of 255"""
    std: tuple[float, ...]
    """of each channel, in units of 255"""
    patch: int
    """side of a patch, in pixels"""


def patches(images: Tensor, how: Processing) -> Tensor:
    """What the host's processor makes of the images.

    Args:
        images: [n, H, W, 3] uint8, on any device.
        how: with a size that is a multiple of the patch.
    Returns: [n, patches, patch * patch * 3] fp32, on the same device.
    """
    side, (height, width) = how.patch, how.size
    rows, columns = height // side, width // side
    made = torch.empty(len(images), rows, columns, side, side, 3, device=images.device)
    for some, into in zip(images.split(_AT_ONCE), made.split(_AT_ONCE), strict=True):
        pixels = _normalized(_resized(some.permute(0, 3, 1, 2), how.size), how)
        cut = pixels.unflatten(3, (columns, side)).unflatten(2, (rows, side))
        into.copy_(cut.permute(0, 2, 4, 3, 5, 1))
    return made.view(len(images), rows * columns, -1)


def interpolated(images: Tensor, size: tuple[int, int]) -> Tensor:
    """torch's bilinear resize of a CPU with fused operations, bit for bit on any device that has fp64.

    Args:
        images: [n, 3, H, W] uint8.
        size: height and width.
    Returns: [n, 3, *size] fp32, not rounded to whole numbers.
    """
    down = _taps(images.shape[-2], size[0], images.device)
    across = _taps(images.shape[-1], size[1], images.device)
    total = torch.zeros((), device=images.device)
    for (y, row_weight), order in zip(down, (reversed(across), across), strict=True):
        line = images[:, :, y]
        for x, column_weight in order:
            weight = (row_weight[:, None] * column_weight).double()
            total = (line[..., x] * weight + total).float()
    return total


def _taps(before: int, after: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each of `after` places on an axis of `before`: the lower neighbour, its weight, and the upper."""
    scale = (torch.tensor(before, dtype=torch.float32) / after).item()
    place = ((torch.arange(after, dtype=torch.float64) + 0.5) * scale - 0.5).float().clamp(min=0)
    low = place.floor().clamp(max=before - 1)
    weight = (place - low).clamp(0, 1)
    high = (low + 1).clamp(max=before - 1)
    taps = ((low.long(), 1 - weight), (high.long(), weight))
    return [(constants.on(device, index), constants.on(device, share)) for index, share in taps]


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, 3, H, W] uint8 -> [n, 3, *size] fp32 in whole numbers from 0 to 255."""
    if images.shape[-2:] == size:
        return images.float()
    if images.is_cuda:
        return interpolated(images, size).round_()
    return F.interpolate(images.float(), size=size, mode="bilinear", align_corners=False).round_()


def _normalized(pixels: Tensor, how: Processing) -> Tensor:
    """The host's two ways, in place. Divisors are tensors: torch's CUDA kernel multiplies by 1 / a number."""
    pixels.div_(torch.full((), 255.0, device=pixels.device))
    if np.allclose(how.mean, 0.5) and np.allclose(how.std, 0.5):
        return pixels.mul_(2.0).sub_(1.0)
    mean, std = (constants.on(pixels.device, torch.tensor(of)[:, None, None]) for of in (how.mean, how.std))
    return pixels.sub_(mean).div_(std)
