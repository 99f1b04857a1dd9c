"""A clip factor that waits for `step`: it belongs to the gradients it was measured on, as they were then."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from somaspeed_patch.optim.gradients import same_objects

_version = operator.attrgetter("_version")


class Pending:
    """The gradients that a clip factor was made for, and the factor.

    Args:
        gradients: local parts, as they are now. They are held until `step` or `zero_grad`: letting go of five
            hundred tensors that autograd still holds, and asking for them again, costs 0.1 ms.
        shared: [3] fp32 on the device; its first number is the factor.
    """

    def __init__(self, gradients: list[Tensor], shared: Tensor) -> None:
        self._gradients, self.shared = gradients, shared
        self._versions = list(map(_version, gradients))

    def holds_for(self, gradients: Sequence[Tensor], writes: int = 0) -> bool:
        """Whether these are the same gradients, each written `writes` times since."""
        versions = [version + writes for version in self._versions] if writes else self._versions
        return same_objects(gradients, self._gradients) and list(map(_version, gradients)) == versions

    def written(self, gradients: Sequence[Tensor]) -> int | None:
        """Position of the first of these that is a gradient of then and was written since."""
        versions = dict(zip(map(id, self._gradients), self._versions, strict=True))
        for i, gradient in enumerate(gradients):
            if versions.get(id(gradient), gradient._version) != gradient._version:
                return i
        return None

    def settle(self, gradients: Sequence[Tensor]) -> None:
        """Clip those of these that are gradients of then in place, as torch does."""
        then = set(map(id, self._gradients))
        mine = [gradient for gradient in gradients if id(gradient) in then]
        if mine:
            torch._foreach_mul_(mine, self.shared[0].clone())
