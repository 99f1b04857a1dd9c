"""A clip factor that waits for `step`: it belongs to the gradients it was measured on, as they were then."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from somaspeed_patch.optim.gradients import Gradients

_version = operator.attrgetter("_version")


class Pending:
    """The gradients (local parts) that a clip factor was made for, and the factor.

    Args:
        gradients: as they are now.
        shared: [3] fp32 on the device; its first number is the factor.
    """

    def __init__(self, gradients: Gradients, shared: Tensor) -> None:
        self._references, self.shared = gradients.references, shared  # weak: zero_grad has to free the memory
        self._versions = list(map(_version, gradients.parts))

    def holds_for(self, gradients: Gradients, writes: int = 0) -> bool:
        """Whether these are the same gradients, each written `writes` times since."""
        versions = [version + writes for version in self._versions] if writes else self._versions
        return gradients.are(self._references) and list(map(_version, gradients.parts)) == versions

    def written(self, gradients: Sequence[Tensor]) -> int | None:
        """Position of the first of these that is a gradient of then and was written since."""
        versions = {
            id(then()): version for then, version in zip(self._references, self._versions, strict=True)
        }
        for i, gradient in enumerate(gradients):
            if versions.get(id(gradient), gradient._version) != gradient._version:
                return i
        return None

    def settle(self, gradients: Sequence[Tensor]) -> None:
        """Clip those of these that are gradients of then in place, as torch does."""
        then = {id(reference()) for reference in self._references}
        mine = [gradient for gradient in gradients if id(gradient) in then]
        if mine:
            torch._foreach_mul_(mine, self.shared[0].clone())
