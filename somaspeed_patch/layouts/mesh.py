"""The device mesh of a layout, and a rank's place on its data axes.

Ranks that differ in pp or tp only work on the same samples.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from somaspeed_patch.layouts.layout import AXES, Layout

_ATTRIBUTE = "_somaspeed_mesh"


def build(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh, with all four axes. Collective."""
    return init_device_mesh(device_type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)


def data(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP2 takes: dp_shard, or dp_replicate and dp_shard."""
    axes = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    return mesh[axes]


def attach(owner: Any, mesh: DeviceMesh) -> None:
    """Note the mesh on an Accelerator, or on the model that is spread over it."""
    setattr(owner, _ATTRIBUTE, mesh)


def of(owner: Any) -> DeviceMesh | None:
    """The mesh noted on an Accelerator or a model, or None."""
    found: DeviceMesh | None = vars(owner).get(_ATTRIBUTE)
    return found


def replicas(accelerator: Any) -> int | None:
    """How many different batches a step has; None without a layout."""
    mesh = of(accelerator)
    return None if mesh is None else mesh["dp_replicate"].size() * mesh["dp_shard"].size()


def replica(accelerator: Any) -> int | None:
    """Which of them this rank works on; None without a layout."""
    mesh = of(accelerator)
    if mesh is None:
        return None
    outer, inner = mesh["dp_replicate"], mesh["dp_shard"]
    return outer.get_local_rank() * inner.size() + inner.get_local_rank()
