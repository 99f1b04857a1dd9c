"""Parameters that were frozen when the layout was made and train now: refused where that would go wrong.

What a layout leaves whole, keeps gathered, or takes for a pipeline's frozen stage gets no gradient from other
ranks, so that they would drift apart. Shards of frozen parameters may be unfrozen: FSDP2 looks at every step.
"""

from __future__ import annotations

from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from somaspeed_patch.layouts import states
from somaspeed_patch.layouts.layout import Layout


def refuse(model: nn.Module, layout: Layout) -> None:
    """From now on raise before an update in which one of the model's frozen parameters has begun to train.

    Costs 0.2 ms a step for 1,000 parameters, as long as the model lives.

    Raises: ValueError: in the optimizer's step; names the parameter.
    """
    if layout.ranks == 1 or (layout.frozen == "sharded" and layout.pp == 1):
        return
    places = [
        (f"{prefix}.{name}".lstrip("."), module._parameters, name)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not parameter.requires_grad
    ]
    alive = ref(model)

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trains = next((where for where, held, name in places if _trains(held.get(name))), None)
        if trains is not None and _updates(optimizer, alive()):
            raise ValueError(
                f"layout: {trains} was frozen when the layout was made and trains now, but its gradients are"
                " not averaged over the ranks; use frozen=sharded without pp, or let it train from the start"
            )

    finalize(model, register_optimizer_step_pre_hook(look).remove)


def _trains(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> bool:
    """Whether it is an optimizer of this model: the hook sees those of all."""
    mine = {id(parameter) for parameter in model.parameters()} if model is not None else set()
    return any(id(parameter) in mine for parameter in states.parameters_of(optimizer))
