"""Run our own code in the place of a module's forward, so that what FSDP2 hung on the module happens.

Our forwards read a layer's weights without calling the layer. Where the layer is sharded its weights are
gathered by the hooks of `__call__`, and freed, and their gradients reduced, by others; so the code takes the
forward's place for one call. Everything else that is hung on the module runs too, as it does natively.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def call(unit: Any, run: Callable[..., Any], *args: Any) -> Any:
    """`run(unit, *args)`, with the unit's weights gathered if it is sharded.

    Args:
        args: tensors that need a gradient are among them, not hidden in objects: FSDP2 learns from them
            when the unit's backward is over.
    """
    if not isinstance(unit, FSDPModule):
        return run(unit, *args)
    return in_place_of_forward(unit, partial(run, unit), *args)


def is_sharded(unit: Any) -> bool:
    """Whether its weights are elsewhere outside its forward."""
    return isinstance(unit, FSDPModule) and any(isinstance(p, DTensor) for p in cast(Any, unit).parameters())


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
