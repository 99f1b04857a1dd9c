"""The hook that keeps facts on a tensor that LeRobot's preprocessor moves to the device; no value changes."""

from __future__ import annotations

from typing import Any

from somaspeed_patch import facts


def to_device(wrapped: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DeviceProcessorStep._process_tensor: a moved tensor is a new object, so its facts move too."""
    before = args[0] if args else kwargs["tensor"]
    after = wrapped(*args, **kwargs)
    facts.moved(before, after)
    return after
