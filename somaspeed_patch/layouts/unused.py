"""Trainable parameters that a step left without a gradient, named once."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from somaspeed_patch import sites

log = logging.getLogger(__name__)

SITE = "layouts/unused"
_SHOWN = 6


def watch(model: nn.Module) -> None:
    """Before the next update, say which of the model's trainable parameters have no gradient."""

    def look(*_: Any) -> None:
        handle.remove()
        _say(model)

    handle = register_optimizer_step_pre_hook(look)
    sites.site(SITE).status = sites.PATCHED


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
