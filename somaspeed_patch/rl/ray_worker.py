"""What runs in a Ray actor's process, and how tensors travel: `RayPlayer`'s other half. Imports no Ray.

Ray shares numpy arrays between a machine's processes without a copy, but pickles tensors byte by byte (and
numpy has no bf16). So what travels is `Packed`: a pickle whose large arrays and tensors stand beside it as
arrays of bytes. 71 MiB a sample of MolmoAct2 are then read where Ray has put them.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.rl.collect import Rollout
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.player import LocalPlayer

Bytes = NDArray[np.uint8]
MakePlayer = Callable[[int, int], LocalPlayer]
"""Of the worker's number, from 0, and how many there are; called in the worker's process."""

LARGE = 4096  # bytes from which on an array stands beside the pickle: each costs Ray a header of its own


@dataclass(frozen=True)
class Packed:
    """An object on its way; the arrays are read-only once Ray has them."""

    pickled: bytes
    arrays: list[Bytes]


@dataclass(frozen=True)
class Started:
    """What a worker says of itself."""

    process: int
    """its id"""
    state: list[int]
    """of its collector, one number a slot"""


@dataclass(frozen=True)
class Played:
    """One worker's share of a rollout."""

    rollout: Rollout
    seconds: Mapping[str, float]
    """by phase, see `Phases`"""


class Worker:
    """The actor. Its methods run in its process's main thread, so the kernel ends environments with it."""

    def __init__(self) -> None:
        """Do nothing that could fail: what `start` raises reaches the driver whole."""
        self._player: LocalPlayer | None = None

    def start(self, make_player: MakePlayer, number: int, workers: int) -> Started:
        """Make the player. Raises: TypeError: it is none."""
        player = make_player(number, workers)
        if not isinstance(player, LocalPlayer):
            raise TypeError(
                f"rl: make_player must give a LocalPlayer, but gave a {type(player).__name__}; "
                "it is called with a worker's number and how many there are"
            )
        self._player = player
        return Started(os.getpid(), player.collector.state)

    def play(self, weights: Packed, version: int, state: Sequence[int], first_slot: int) -> Packed:
        """A `Played`; it depends on the arguments alone, so that a worker's successor plays the same.

        Args:
            state: of the collector, behind which to play.
            first_slot: number of the worker's first slot among those of all workers.
        Raises: RuntimeError: see `LocalPlayer.play`, or `start` has not been called.
        """
        if self._player is None:
            raise RuntimeError("rl: a Ray worker was asked to play before it was started")
        phases = Phases("rollout")
        self._player.collector.first_slot = first_slot
        self._player.resume(state)
        rollout = self._player.play(unpacked(weights), version, phases)
        return packed(Played(rollout, phases.taken()))


def packed(value: object) -> Packed:
    """An object with tensors or arrays in it, ready to travel.

    Contiguous CPU tensors and arrays are referred to, not copied. Tensors that shared memory do not when they
    arrive, and need no gradient.
    """
    arrays: list[Bytes] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        array = np.frombuffer(buffer.raw(), np.uint8)
        if array.nbytes >= LARGE:
            arrays.append(array)
        return array.nbytes < LARGE  # True: into the pickle

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=beside).dump(value)
    return Packed(stream.getvalue(), arrays)


def unpacked(value: Packed) -> Any:
    """What `packed` was given. Its large tensors are the packed memory itself: nobody may write into them."""
    return pickle.loads(value.pickled, buffers=value.arrays)


class _Pickler(pickle.Pickler):
    """Tensors as arrays of their bytes."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().view(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor(array: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.asarray(_Lent(array))).view(dtype).view(shape)


class _Lent:
    """An array that numpy takes for a writable one: torch has no read-only tensors, and warns of each."""

    def __init__(self, array: Bytes) -> None:
        self._array = array  # keeps its memory; numpy keeps this
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {
            "data": (address, False), "shape": array.shape, "typestr": "|u1", "version": 3,
        }  # fmt: skip
