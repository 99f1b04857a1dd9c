"""What host code makes of Python numbers while a CUDA graph is recorded: a recording cannot take them along.

LeRobot's `embed_suffix` makes its attention mask of a list, at each call. Who records says so
(`remembering`), and the calls before the recording leave what they made for it; who calls such host code puts
`constants` around it. Not around layers that are compiled: torch.compile makes another graph under a mode.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Constants(TorchFunctionMode):
    """Remembers what `torch.tensor` made of Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is not torch.tensor or not args or not isinstance(args[0], (bool, int, float, list, tuple)):
            return func(*args, **given)
        key = repr((args, sorted(given.items())))
        if key not in self._made:
            self._made[key] = func(*args, **given)
        return self._made[key].clone()


class _Thread(threading.local):
    constants: _Constants | None = None


_thread = _Thread()


@contextmanager
def remembering() -> Iterator[None]:
    """Around the calls of a computation of which the last one is recorded, in this thread."""
    before, _thread.constants = _thread.constants, _Constants()
    try:
        yield
    finally:
        _thread.constants = before


def constants() -> AbstractContextManager[Any]:
    """Around host code that may make tensors of numbers; nothing where nobody records."""
    return _thread.constants or nullcontext()
