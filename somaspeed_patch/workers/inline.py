"""Small tensors among a batch's facts go through a worker's queue inside the pickle, not in shared memory.

There each costs a file descriptor, which the trainer's process has to fetch over a socket: 2 ms of its CPU
time for the six twins of a pi0.5 batch, where the whole batch takes 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from somaspeed_patch import facts

_LARGEST = 1 << 20  # bytes; a pipe copies that in about the time a descriptor takes


def light(packed: facts.Facts) -> facts.Facts:
    """What `facts.pack` made, so that it is pickled without shared memory."""
    return _Inline(packed.by_key)


@dataclass(frozen=True, eq=False)
class _Small:
    """A tensor on its way."""

    array: np.ndarray[Any, Any]


class _Inline(facts.Facts):
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, (_each(self.by_key, _to_array),)


def _arrived(by_key: Mapping[str, Mapping[str, Any]]) -> facts.Facts:
    """What `_Inline` is in the trainer."""
    return facts.Facts(
        _each(by_key, lambda one: torch.from_numpy(one.array) if isinstance(one, _Small) else one)
    )


def _each(by_key: Mapping[str, Mapping[str, Any]], change: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    return {key: {name: change(value) for name, value in known.items()} for key, known in by_key.items()}


def _to_array(value: Any) -> Any:
    small = isinstance(value, Tensor) and value.device.type == "cpu" and value.nbytes <= _LARGEST
    return _Small(value.detach().numpy()) if small and value.dtype != torch.bfloat16 else value
