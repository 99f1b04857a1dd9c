"""A digest of weights that costs one pass over them where they are, and notices later writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_CHUNK = 1 << 24  # words at a time: the weights of positions take 8 bytes a word
_ODD = -7046029254386353131  # 2^64 / golden ratio, odd: multiplying by it loses nothing


def digest(tensors: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits of names, dtypes, shapes and bits.

    Every byte counts, weighed by its position: a changed, moved or swapped number changes the digest. It is
    a checksum against mistakes, not against somebody who wants a collision.

    Args:
        tensors: by name, in any order; of any dtype, on any device.
    """
    seen = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum(tensor)};".encode())
    return seen.hexdigest()[:16]


def _sum(tensor: Tensor) -> int:
    """Of all bytes, each times a number of its position, modulo 2^64."""
    total = 0
    for start, part in _parts(tensor.detach()):
        place = torch.arange(start, start + len(part), device=part.device) * _ODD
        mixed = (place ^ (place >> 29)) * 2 + 1  # odd: no position weighs nothing
        total += int((part.to(torch.int64) * mixed).sum())
    return total % (1 << 64)


def _parts(tensor: Tensor) -> Iterable[tuple[int, Tensor]]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 4:  # where a tensor lies must not decide how it is read
        flat = flat.clone()
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    for start in range(0, len(words), _CHUNK):
        yield start, words[start : start + _CHUNK]


class Watch:
    """Tells whether weights were written since it was made, without reading them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._seen = self._state()

    def changed(self) -> str | None:
        """The name of a weight that was written, replaced or set to train since; or None."""
        for (name, before), after in zip(self._seen.items(), self._state().values(), strict=True):
            if before != after:
                return name
        return None

    def _state(self) -> dict[str, tuple[int, int, bool]]:
        return {n: (t.data_ptr(), t._version, t.requires_grad) for n, t in self._tensors.items()}
