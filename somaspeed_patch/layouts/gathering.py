"""All weights of a sharded model at once, for a while: what acts on an observation reads them out of order.

Training gathers one unit at a time. Inference calls parts of units from outside (MolmoAct2 computes the
modulations of all blocks before the first), or the units of one rank alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from somaspeed_patch.layouts import units

Kept = list[tuple[Any, Any]]
"""Units that were gathered, and what their groups did after a forward before."""


def gather(model: nn.Module) -> Kept:
    """Gather every unit that is not, and keep it so; for `shard`. Collective."""
    kept = []
    for unit, group in units.groups(model):
        if not group.is_unsharded:
            kept.append((unit, group.post_forward_mesh_info))
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
    return kept


def shard(kept: Kept) -> None:
    """Free what `gather` gathered, and free it after each forward again where it was."""
    for module, after_forward in kept:
        module._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info = after_forward
        if after_forward is not None or any(p.requires_grad for p in module.parameters()):
            module.reshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Whole weights inside; units that are whole already, as in an evaluation, stay so. Collective."""
    root: Any = model
    root._get_fsdp_state()._lazy_init()  # else the first unit that runs would take itself for the root
    kept = gather(model)
    order = _order(model)
    begun = len(order)
    try:
        yield
    finally:
        _forget(order, begun)
        shard(kept)


def _order(model: nn.Module) -> list[Any]:
    """FSDP2's list of the groups in the order of their forwards, by which a backward gathers ahead."""
    return next((group.comm_ctx.post_forward_order for _, group in units.groups(model)), [])


def _forget(order: list[Any], begun: int) -> None:
    """Drop the forwards since `begun`: they have no backward, and other ranks may not have had them."""
    for group in order[begun:]:
        group._post_forward_indices = [index for index in group._post_forward_indices if index < begun]
    del order[begun:]


def around(model: nn.Module, name: str) -> None:
    """Have the model's method `name` run with whole weights. All ranks have to call it, or none."""
    method = getattr(model, name)

    @functools.wraps(method)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with gathered(model):
            return method(*args, **kwargs)

    setattr(model, name, whole)
