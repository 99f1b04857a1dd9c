"""Units at work: our own code in the place of a module's forward, and activation checkpointing of a unit.

Our forwards read a layer's weights without calling the layer. Where the layer is sharded its weights are
gathered by the hooks of `__call__`, and freed, and their gradients reduced, by others; so the code takes the
forward's place for one call. Everything else that is hung on the module runs too, as it does natively.

A unit marked by `recompute` keeps its inputs only; its backward runs it again, with the same random numbers,
inside FSDP2's hooks: the weights are there for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from somaspeed_patch.layouts import mesh

_WITHIN = "_somaspeed_within"
_recomputed: WeakSet[nn.Module] = WeakSet()


def recompute(unit: nn.Module) -> None:
    """Checkpoint the unit's activations from now on, whoever calls it."""
    _recomputed.add(unit)
    cast(Any, unit).forward = checkpointed(unit.forward)


def is_recomputed(unit: nn.Module) -> bool:
    """Whether it is marked."""
    return unit in _recomputed


def checkpointed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, of which only the inputs are kept where a gradient is asked for."""

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return again


def call(unit: Any, run: Callable[..., Any], *args: Any) -> Any:
    """`run(unit, *args)`, with the unit's weights gathered if it is sharded.

    Args:
        args: tensors that need a gradient are among them, not hidden in objects: FSDP2 learns from them
            when the unit's backward is over.
    """
    sharded = isinstance(unit, FSDPModule)
    once: Callable[..., Any] = partial(_within, run, unit) if sharded else partial(run, unit)
    if unit in _recomputed:
        once = checkpointed(once)
    return in_place_of_forward(unit, once, *args) if sharded else once(*args)


def body(unit: Any) -> Callable[..., Any]:
    """What code that may stand in for the unit's forward calls to have it computed.

    Within `call` that is its class's forward: its hooks run around that code already, and its forward is that
    code. Otherwise it is the unit.
    """
    return partial(type(unit).forward, unit) if getattr(unit, _WITHIN, False) else unit


def _within(run: Callable[..., Any], unit: Any, *args: Any) -> Any:
    setattr(unit, _WITHIN, True)
    try:
        return run(unit, *args)
    finally:
        delattr(unit, _WITHIN)


def is_sharded(unit: Any) -> bool:
    """Whether its weights are elsewhere outside its forward."""
    return isinstance(unit, FSDPModule) and any(isinstance(p, DTensor) for p in cast(Any, unit).parameters())


def groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """FSDP2's units that hold parameters, each with its group of them."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield unit, group


def shard_versions(module: nn.Module) -> list[tuple[int, int]]:
    """What changes when an optimizer writes to the shards of a module.

    Gathered parameters do not tell: FSDP2 fills them without a trace.
    """
    shards = (one.sharded_param for _, group in groups(module) for one in group.fsdp_params)
    return [(shard._version, shard._local_tensor._version) for shard in shards]


def in_shards(model: Any) -> bool:
    """Whether a layout's FSDP2 alone is why its parameters are no plain ones."""
    axes = mesh.of(model)
    return axes is not None and axes["tp"].size() == 1


def in_place_of_forward(module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)`, where `run` is its forward for this call."""
    state = vars(module)
    before = state.get("forward")
    state["forward"] = run
    try:
        return nn.Module.__call__(module, *args, **kwargs)
    finally:
        if before is None:
            del state["forward"]
        else:
            state["forward"] = before
