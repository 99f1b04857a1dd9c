"""Trainable parameters that a step left without a gradient, named once."""

from __future__ import annotations

import logging
from typing import Any
from weakref import finalize, ref

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from somaspeed_patch import sites

log = logging.getLogger(__name__)

SITE = "layouts/unused"
_SHOWN = 6


def watch(model: nn.Module) -> None:
    """Before the model's next update, say which of its trainable parameters have no gradient."""

    waiting = [ref(model)]

    def look(optimizer: Optimizer, *_: Any) -> None:
        alive = waiting[0]() if waiting else None
        if alive is not None and _updates(optimizer, alive):
            waiting.clear()
            _say(alive)

    finalize(model, register_optimizer_step_pre_hook(look).remove)  # torch forbids it while its hooks run
    sites.site(SITE).status = sites.PATCHED


def _updates(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer is this model's: torch's hook is called for those of others, too."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in held for p in model.parameters())


def _say(model: nn.Module) -> None:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names = [name for name, p in trainable if p.grad is None]
    site = sites.site(SITE)
    site.ran()
    if not names:
        return
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    site.reason = f"{len(names)} of {len(trainable)} trainable parameters get no gradient: " + (
        ", ".join(names[:_SHOWN]) + more
    )
    log.warning("layout: %s", site.reason)
