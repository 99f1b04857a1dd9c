"""Hooks that carry what the CPU knows about masks to where they are used (hints.py); no value changes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from somaspeed_patch.pi05 import hints

_LANGUAGE_MASK = "observation.language.attention_mask"


def preprocess_images(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PI05Policy._preprocess_images: cameras in the batch come first, masks all ones, then absent ones."""
    images, img_masks = wrapped(*args, **kwargs)
    batch = args[0] if args else kwargs["batch"]
    present = sum(key in batch for key in policy.config.image_features)
    for index, mask in enumerate(img_masks):
        here = index < present
        hints.attach(mask, hints.Valid(longest=int(here), leading=True, every=here))
    return images, img_masks


def tokenizer_observation(wrapped: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """TokenizerProcessorStep.observation: the mask it returns gets the CPU mask's lengths."""
    with hints.recording() as masks:
        observation = wrapped(*args, **kwargs)
    mask = observation.get(_LANGUAGE_MASK)
    if masks and isinstance(mask, Tensor) and mask.dim() == 2:
        hints.attach(mask, hints.measure(masks[0]))
    return observation


def tokenize_text(wrapped: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """TokenizerProcessorStep._tokenize_text: what the tokenizer returned, still on the CPU."""
    encoded = wrapped(*args, **kwargs)
    hints.record(encoded.get("attention_mask"))
    return encoded
