"""MolmoAct2's images stay raw until they are on the policy's device, and become patches there.

    pack          the step whose images go to a policy: only in there does the image processor leave them raw
    preprocess    the image processor: uint8 images, with their places in the prompt as the host lays them out
    model_inputs  the policy's first look at a batch: raw images to what the host's processor would have made

An image of 256 pixels crosses the data loader's queue and the bus to the GPU with 0.2 MB, not with 1.7. How
it is to be resized rides on the tensor as a fact. So does the reason where the processor had to make patches
itself: it may have run in a data-loader worker, whose report nobody reads; the policy's side counts.

Raw images without this adapter are an error at once, since the host unpacks three dimensions: after an
unpatch() a data loader whose workers were forked or started before must be started anew. Switching the
feature needs no care, raw images are understood while the adapter is on.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from somaspeed_patch import facts, features, guarded, sites
from somaspeed_patch.guarded import Declined
from somaspeed_patch.molmoact2 import pixels
from somaspeed_patch.molmoact2.pixels import Processing

_SITE = "molmoact2/gpu_images"
_HOW, _REFUSED = "image_processing", "images_not_raw"  # facts
_BILINEAR = 2  # PIL's number, which torchvision takes
_SETTINGS = (
    "size", "resample", "image_mean", "image_std", "do_convert_rgb", "max_crops", "overlap_margins",
    "crop_mode", "patch_size", "pooling_size",
)  # fmt: skip

_packing: ContextVar[bool] = ContextVar("somaspeed_packing", default=False)


def pack(wrapped: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """MolmoAct2PackInputsProcessorStep.__call__."""
    if not features.value("gpu_images"):
        return wrapped(*args, **kwargs)
    before = _packing.set(True)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _packing.reset(before)


def preprocess(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """MolmoAct2ImageProcessor.preprocess: raw images for a policy, the host's patches for anyone else."""
    if not _packing.get():
        return wrapped(*args, **kwargs)
    outcome = sites.Site(site=_SITE, target="")  # of this call alone, not in the report
    earlier = guarded.why_not(processor, _SITE)
    if earlier is None:
        made = guarded.or_hosts(outcome, processor, partial(_raw, processor), wrapped, args, kwargs)
    else:
        outcome.declined(earlier)
        made = wrapped(*args, **kwargs)
    why = outcome.last_fallback or outcome.reason
    if why and isinstance(made.get("pixel_values"), Tensor):
        facts.attach(made["pixel_values"], _REFUSED, why)
    return made


def model_inputs(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """MolmoAct2Policy._model_inputs, for training and inference.

    Raises: ValueError: raw images that do not carry how they are to be processed.
    """
    batch = args[0] if args else kwargs["batch"]
    images = batch.get("pixel_values")
    if not isinstance(images, Tensor):
        return wrapped(*args, **kwargs)
    site = sites.site(_SITE)
    if images.dtype != torch.uint8 or images.dim() != 4:
        if features.value("gpu_images"):  # off by default, and then no news in the report
            why = facts.get(images, _REFUSED)
            site.declined(why or "the batch was preprocessed where gpu_images is off")
        return wrapped(*args, **kwargs)
    how = facts.get(images, _HOW)
    if how is None:
        raise ValueError(
            "gpu_images: expected uint8 pixel_values as MolmoAct2's preprocessor left them, but came a copy "
            "or a changed tensor, which does not say how to resize it; pass the preprocessor's own batch to "
            "the policy, or switch gpu_images off"
        )
    site.ran()
    return wrapped({**batch, "pixel_values": pixels.patches(images, how)})


def release() -> None:
    """Forget where the images' patches belong."""
    _places.cache_clear()


def _raw(processor: Any, images: Any, *by_position: Any, **given: Any) -> Any:
    """The host's result, but for pixel_values: uint8 [images, H, W, 3], carrying a Processing.

    Raises: Declined: these images or settings are the host's to process.
    """
    from transformers.feature_extraction_utils import BatchFeature

    why = _unlike_training(processor, by_position, given) or _unlike_cameras(images)
    if why is not None:
        raise Declined(why)
    how = Processing(
        size=(processor.size["height"], processor.size["width"]),
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
        patch=processor.patch_size,
    )
    pooling, grid, crops = _places(*images[0].shape[:2], how, tuple(processor.pooling_size))
    data = {
        "pixel_values": np.stack(images),
        "image_token_pooling": np.concatenate([pooling] * len(images)),
        "image_grids": np.concatenate([grid] * len(images)),
        "image_num_crops": np.array([crops] * len(images)),
    }
    made = BatchFeature(data, tensor_type="pt")
    facts.attach(made["pixel_values"], _HOW, how)
    return made


def _unlike_training(processor: Any, by_position: tuple[Any, ...], given: dict[str, Any]) -> str | None:
    """Why this call is not LeRobot's for a policy with one crop an image, or None."""
    if by_position or given.get("return_tensors") != "pt":
        return "the call is not LeRobot's: it asks for tensors by name"
    if processor.crop_mode != "resize":
        return f"crop_mode is {processor.crop_mode}: each image has a number of crops of its own"
    if processor.resample != _BILINEAR:
        return f"resample is {processor.resample}, not bilinear"
    if np.shape(processor.image_mean) != (3,) or np.shape(processor.image_std) != (3,):
        return "image_mean or image_std is not a number a channel"
    other = [name for name in _SETTINGS if given.get(name) not in (None, getattr(processor, name))]
    return f"{', '.join(other)} given for this call only" if other else None


def _unlike_cameras(images: Any) -> str | None:
    """Why these are not uint8 images of one size, or None."""
    if not isinstance(images, list) or not images or not all(isinstance(one, np.ndarray) for one in images):
        return "the images are not a list of arrays"
    if any(one.dtype != np.uint8 or one.ndim != 3 or one.shape[-1] != 3 for one in images):
        return "the images are not uint8 [height, width, 3]"
    sizes = {one.shape[:2] for one in images}
    return f"the images have {len(sizes)} sizes" if len(sizes) > 1 else None


@lru_cache(maxsize=64)
def _places(height: int, width: int, how: Processing, pooling: tuple[int, int]) -> tuple[Any, Any, int]:
    """Of one image of a size, by the host: patches that a token pools, grid of tokens, number of crops."""
    from lerobot.policies.molmoact2.molmoact2_hf_model import image_processing_molmoact2 as host

    black = np.zeros((height, width, 3), np.uint8)
    grid, crops, pooled = host.image_to_patches_and_grids(
        black,
        max_crops=1,
        overlap_margins=[0, 0],
        base_image_input_size=list(how.size),
        resample=_BILINEAR,
        image_mean=list(how.mean),
        image_std=list(how.std),
        image_patch_size=how.patch,
        image_pooling_w=pooling[1],
        image_pooling_h=pooling[0],
        crop_mode="resize",
    )
    return pooled, grid, len(crops)
