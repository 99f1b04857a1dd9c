"""GrootPolicy.forward without the read of the loss between forward and backward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import features, sites
from somaspeed_patch.deferred import DeferredMetrics

_HOST = "lerobot.policies.groot.modeling_groot"


def policy_forward(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss and the metrics, which are read when somebody looks at them."""
    if not features.value("deferred_metrics") or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    return _forward(policy, *args, **kwargs)


def _forward(policy: Any, batch: dict[str, Tensor]) -> tuple[Tensor, DeferredMetrics]:
    """The host's lines, but for the read."""
    inputs = policy._filter_groot_inputs(batch, include_action=True)
    device = sys.modules[_HOST].get_device_from_parameters(policy)
    with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=policy.config.use_bf16):
        loss = policy._groot_model.forward(inputs).get("loss")
    if loss is None:
        raise RuntimeError(
            "GR00T model.forward did not return a 'loss'. Training batches must include "
            "'action' and 'action_mask'; check the preprocessor output."
        )
    sites.site("groot/deferred_metrics").ran()
    return loss, DeferredMetrics({"loss": loss.detach()})
