"""DTensor seen by an optimizer: the local part of a tensor, and the groups over which a norm is summed.

A parameter's squared norm is summed once over every mesh axis that shards it, and never over an axis that
replicates it. A plain tensor is taken as whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The rank's own part: itself, where it is no DTensor."""
    if isinstance(tensor, DTensor):
        part = tensor._local_tensor  # to_local() builds a new object, whose identity says nothing
        return part if type(part) is Tensor else tensor.to_local()
    return tensor


def alike(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient lies on the mesh as its parameter does; not so a sum that autograd left undone."""
    return not isinstance(grad, DTensor) or grad.placements == param.placements  # type: ignore[attr-defined]


def gradient_like(grad: Any, param: Any) -> Tensor:
    """The DTensor `grad` in the placements of the DTensor `param`, redistributed."""
    return grad.redistribute(placements=param.placements)  # type: ignore[no-any-return]


def reduction(param: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups over which the squared norm of the local part has to be summed, one a sharded mesh axis."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    return tuple(
        mesh.get_group(axis) for axis, placed in enumerate(param.placements) if not placed.is_replicate()
    )


def start(param: Tensor) -> int:
    """Index of the local part's first element in the whole, row-major parameter."""
    if not isinstance(param, DTensor) or param.ndim == 0:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    sizes = param.shape
    return sum(offset * math.prod(sizes[dim + 1 :]) for dim, offset in enumerate(offsets))


def all_reduce(values: Tensor, slices: Sequence[tuple[slice, tuple[ProcessGroup, ...]]]) -> None:
    """Sum each slice of `values` over its groups, in place."""
    for part, groups in slices:
        for group in groups:
            torch.distributed.all_reduce(values[part], group=group)


def neighbours(keys: Sequence[Any]) -> list[tuple[slice, Any]]:
    """Runs of equal keys as slices; the empty key is left out."""
    runs: list[tuple[slice, Any]] = []
    first = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[first]:
            if keys[first]:
                runs.append((slice(first, i), keys[first]))
            first = i
    return runs
