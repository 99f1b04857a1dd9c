"""Metrics that are read from the device when somebody looks at them, and not before.

A policy's forward returns floats for the log, and every `.item()` on the way waits until the GPU has done the
whole forward. The backward's launches then start on an idle GPU: 60 ms of a 420 ms step of MolmoAct2 at batch
32 on an H200. LeRobot reads these floats after the update, when they cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class DeferredMetrics(dict[str, Any]):
    """A dict of floats whose values stay on the device until the first look; then it is a plain dict."""

    def __init__(self, on_device: Mapping[str, Tensor]) -> None:
        """Take 0-dimensional tensors, all on one device, by name."""
        super().__init__(dict.fromkeys(on_device, float("nan")))
        self._on_device: dict[str, Tensor] | None = dict(on_device)

    def _look(self) -> None:
        """Read all of them with one transfer; what was set meanwhile stays as it is."""
        waiting, self._on_device = self._on_device, None
        if waiting:
            values = torch.stack([value.float() for value in waiting.values()]).tolist()
            super().update(dict(zip(waiting, values, strict=True)))

    def __setitem__(self, key: str, value: Any) -> None:
        self._look()
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        """Pickled and copied as the plain dict it stands for."""
        return dict, (dict(self.items()),)


def to_fp32(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """accelerate's convert_to_fp32 on what a policy returns under autocast, deferred metrics left unread.

    It would read them to look for 16-bit tensors, and they are floats.
    """
    outputs = args[0] if args else kwargs["tensor"]
    if type(outputs) is not tuple or not any(isinstance(one, DeferredMetrics) for one in outputs):
        return wrapped(*args, **kwargs)
    return tuple(one if isinstance(one, DeferredMetrics) else wrapped(one) for one in outputs)


def _looking(name: str) -> Any:
    method = getattr(dict, name)

    def look(self: DeferredMetrics, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return method(self, *args, **kwargs)

    look.__name__, look.__doc__ = name, method.__doc__
    return look


# Everything of dict that shows or changes values; length, truth and `in` need none of them.
for _name in (
    "__getitem__", "__delitem__", "__iter__", "__reversed__", "__eq__", "__ne__", "__repr__",
    "__or__", "__ror__", "__ior__", "get", "items", "values", "keys", "copy",
    "pop", "popitem", "setdefault", "update", "clear",
):  # fmt: skip
    setattr(DeferredMetrics, _name, _looking(_name))
