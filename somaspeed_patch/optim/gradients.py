"""The gradients of one step, as the kernels read them: dense, in the parameter's element order."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.optim import shards

_address = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")
_call = getattr(operator, "call", lambda reference: reference())  # Python 3.11


class Gradients:
    """The gradients (local parts) of the active parameters; `take` looks again, at every clip and step."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        """As autograd left them."""
        self.dtypes: list[torch.dtype] = []
        self._references: list[weakref.ref[Tensor]] = []
        self._all_contiguous = True
        self.copies: dict[int, Tensor] = {}
        """By position: copies in the parameter's element order and placements, where that is not theirs."""
        self._whole: Sequence[Tensor] = ()
        self._params: Sequence[Tensor] = ()

    # Every look at a tensor costs 0.1 us, and a step has thousands: hence map() over functions written in C.

    def take(self, grads: Sequence[Tensor], params: Sequence[Tensor], distributed: bool) -> None:
        """Note this step's gradients.

        Args:
            grads: the gradient of each of `params`.
            params: the active parameters.
            distributed: whether any is a DTensor.
        """
        self._whole, self._params = (grads, params) if distributed else ((), ())
        self.parts = list(map(shards.local, grads)) if distributed else list(grads)
        if not same_objects(self.parts, list(map(_call, self._references))):
            self._references = list(map(weakref.ref, self.parts))
            self.dtypes = list(map(_dtype, self.parts))
            self._all_contiguous = all(map(Tensor.is_contiguous, self.parts))

    def drop(self) -> None:
        """Hold no gradient's memory until the next `take`."""
        self.parts, self.copies, self._whole, self._params = [], {}, (), ()

    def addresses(self, layouts: Sequence[Tensor], all_contiguous: bool) -> list[int]:
        """Where the kernels read each gradient; one in another element order is copied.

        Args:
            layouts: for each gradient the tensor whose element order it must have.
            all_contiguous: whether all of those are contiguous.

        Raises: RuntimeError: a sparse gradient.
        """
        self.copies = {
            i: shards.local(shards.gradient_like(grad, param))
            for i, (grad, param) in enumerate(zip(self._whole, self._params, strict=True))
            if not shards.alike(grad, param)
        }
        if not (all_contiguous and self._all_contiguous):
            self._copy_others(layouts)
        if not self.copies:
            return list(map(_address, self.parts))
        return [_address(self.copies.get(i, part)) for i, part in enumerate(self.parts)]

    def _copy_others(self, layouts: Sequence[Tensor]) -> None:
        for i, layout in enumerate(layouts):
            part = self.copies.get(i, self.parts[i])
            if part.layout != torch.strided:
                raise RuntimeError(
                    "FusedAdamW: sparse gradients are not supported; use torch.optim.SparseAdam"
                )
            if not same_order(part, layout):
                self.copies[i] = torch.empty_like(layout, dtype=part.dtype, device=part.device).copy_(part)


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, where a stride says anything."""
    strides = zip(a.stride(), b.stride(), a.shape, strict=True)
    return a.numel() == 0 or all(x == y for x, y, size in strides if size > 1)


def same_objects(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether two collections hold the same objects in the same order; `==` of tensors compares numbers."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
