"""torch's fully_shard over the units of a model family, from the inside out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from somaspeed_patch.layouts import families, gathering, mesh, units
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.layouts.layout import Layout

_RESHARD = {"always": True, "never": False, "default": None}


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What became of a model."""

    family: str
    layout: Layout
    units: int
    trainable: int
    """numbers in parameters that train"""
    frozen: int
    """numbers in those that do not"""
    dtypes: tuple[str, ...]
    """of the parameters that train, as the host made them"""

    def __str__(self) -> str:
        trainable, frozen = (
            f"{self.trainable / 1e6:,.1f} M trainable numbers",
            f"{self.frozen / 1e6:,.1f} M frozen",
        )
        dtypes = f"weights and moments in {' and '.join(self.dtypes)}"
        if self.layout.whole:
            return f"{self.family}, one shard, so none is made: {trainable}, {frozen} ones; {dtypes}"
        where = {"whole": "whole on every rank", "gathered": "gathered once", "sharded": "sharded too"}
        return (
            f"{self.family}, {self.layout.dp_replicate} x {self.layout.dp_shard} ranks, {self.units} units: "
            f"{trainable} in {self.layout.dp_shard} shards, {frozen} ones {where[self.layout.frozen]}; "
            f"{dtypes}, gradients averaged in float32"
        )


def shard(model: nn.Module, family: Family, layout: Layout, axes: DeviceMesh) -> Sharded:
    """Split the parameters of `model` over the ranks, in place.

    Dtypes stay the host's: its optimizer updates what it would update alone. Gradients are averaged in fp32.

    Args:
        axes: as `mesh.build` makes it.

    Raises: ValueError: a parameter is shared by modules of different units.
    """
    if axes["pp"].size() == 1:  # else done, before the stages were cut
        same_everywhere(model)
    counts = _numbers(model, trains=True), _numbers(model, trains=False)
    whole = _whole(model, layout)
    _checkpoint(model, family, layout.checkpointing)
    made = _Units(model, mesh.data(axes), _RESHARD[layout.reshard], whole)
    for name, module in families.modules(model, (*family.called_alone, *family.never_run, *family.units)):
        made.add(name, module)
    made.add_root()
    register_fsdp_forward_method(model, "forward")
    for name in family.acts:
        if hasattr(model, name) and not layout.whole:
            gathering.around(model, name)
    _unmark(model)
    if layout.frozen == "gathered":
        _keep_gathered(made.units)
    trainable, frozen = counts
    return Sharded(
        family=family.name,
        layout=layout,
        units=len(made.units),
        trainable=trainable,
        frozen=frozen,
        dtypes=tuple(sorted({str(p.dtype)[6:] for p in model.parameters() if p.requires_grad})),
    )


def _whole(model: nn.Module, layout: Layout) -> set[nn.Parameter]:
    """What FSDP2 leaves alone: all, where there is one shard, for it would copy weights and gradients.

    On one rank it cost 4 % (GR00T) and 7 % (pi0.5) of the time on one H200. With tp all parameters have to be
    DTensors, for torch's AdamW takes no mixture.
    """
    if layout.whole:
        return set(model.parameters())
    empty = {p for p in model.parameters() if p.numel() == 0}  # of another stage's blocks
    frozen = {p for p in model.parameters() if not p.requires_grad}
    return empty | (frozen if layout.frozen == "whole" else set())


def _checkpoint(model: nn.Module, family: Family, which: str) -> None:
    """Mark the units that train, all of them or every other one of each stack."""
    if which == "none":
        return
    for pattern in family.units:
        training = [m for _, m in families.modules(model, (pattern,)) if _trains(m)]
        for module in training[:: 2 if which == "selective" else 1]:
            units.recompute(module)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _numbers(model: nn.Module, *, trains: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad is trains)


@torch.no_grad()
def same_everywhere(model: nn.Module) -> None:
    """Every rank starts from rank 0's weights and buffers, as DistributedDataParallel sees to it."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):  # which tensor parallelism has seen to, while it was whole
            dist.broadcast(tensor.detach(), src=0)


class _Units:
    """The units made so far."""

    def __init__(
        self, model: nn.Module, axes: DeviceMesh, reshard: bool | None, whole: set[nn.Parameter]
    ) -> None:
        self.units: list[FSDPModule] = []
        self._model, self._whole, self._homes = model, whole, _homes(model)
        self._options: dict[str, Any] = {
            "mesh": axes,
            **({} if reshard is None else {"reshard_after_forward": reshard}),  # torch 2.7 takes no None
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }

    def add(self, name: str, module: nn.Module) -> None:
        """A unit of one module, unless there is nothing to split in it."""
        mine = self._unsplit(module)
        if not mine:
            return
        inside = set(module.modules())
        for parameter in mine:
            outside = [other for home, other in self._homes[parameter] if home not in inside]
            if outside:
                raise ValueError(
                    f"layout: {name} shares a parameter with {', '.join(outside)}: they cannot be gathered"
                    " apart; untie them, or freeze them and use frozen=whole"
                )
        self._split(module, mine)

    def add_root(self) -> None:
        """What is left, gathered for the whole step."""
        if self._options.get("reshard_after_forward"):
            del self._options["reshard_after_forward"]  # the backward would gather it again at once
        self._split(self._model, self._unsplit(self._model))

    def _unsplit(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p not in self._whole and not _is_sharded(p)]

    def _split(self, module: nn.Module, mine: list[nn.Parameter]) -> None:
        for part in (*_of_rarer_dtypes(module, mine), module):
            ignored = {p for p in part.parameters() if p in self._whole}
            self.units.append(fully_shard(part, ignored_params=ignored, **self._options))


def _is_sharded(parameter: nn.Parameter) -> bool:
    """By FSDP2; tensor parallelism's DTensors lie on their own axis alone until then."""
    return isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ())


def _homes(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, with the name it has there: several for a shared one."""
    homes: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            homes.setdefault(parameter, []).append((module, name))
    return homes


def _of_rarer_dtypes(module: nn.Module, mine: list[nn.Parameter]) -> list[nn.Module]:
    """Submodules with trainable parameters of a rarer dtype: FSDP2 takes one dtype a unit."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in mine:
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if len(sizes) < 2:
        return []
    most, own = max(sizes, key=lambda dtype: sizes[dtype]), set(mine)
    return [
        part
        for part in module.modules()
        if part is not module
        and any(p in own and p.requires_grad and p.dtype != most for p in part.parameters(recurse=False))
    ]


def _unmark(model: nn.Module) -> None:
    """Take torch's note for dynamo off the modules.

    With it a compiled layer is compiled again for each layer of its stack, until dynamo's limit of 8 lets the
    others run eagerly: MolmoAct2 (36 blocks) trained at 0.55 times the speed. Units are gathered outside of
    what is compiled here (`units.call`), so dynamo need not know. FSDP1, which frozen modules must not be
    taken for, leaves the same note.
    """
    for module in model.modules():
        vars(module).pop("_is_fsdp_managed_module", None)


def _keep_gathered(made: Iterable[FSDPModule]) -> None:
    """Gather the units in which nothing trains now, for good."""
    for unit in made:
        state: Any = unit
        if not _trains(state):
            state.set_reshard_after_forward(False, recurse=False)
            state.set_reshard_after_backward(False, recurse=False)
            state.unshard()
