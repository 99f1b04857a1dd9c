"""Hooks that keep facts on a tensor that a host moves to the device; no value changes."""

from __future__ import annotations

from typing import Any

from somaspeed_patch import facts


def to_device(wrapped: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DeviceProcessorStep._process_tensor: a moved tensor is a new object, so its facts move too."""
    before = args[0] if args else kwargs["tensor"]
    after = wrapped(*args, **kwargs)
    facts.moved(before, after)
    return after


def prepared(wrapped: Any, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """transformers' Trainer._prepare_input, which calls itself for what is in a container."""
    before = args[0] if args else kwargs["data"]
    after = wrapped(*args, **kwargs)
    facts.moved(before, after)
    return after
