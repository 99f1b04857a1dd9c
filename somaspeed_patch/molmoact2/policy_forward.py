"""MolmoAct2Policy.forward without the two reads of the device between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import features, sites
from somaspeed_patch.deferred import DeferredMetrics
from somaspeed_patch.molmoact2 import refusals


def policy_forward(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss and the metrics, which are read when somebody looks at them."""
    site = sites.site("molmoact2/deferred_metrics")
    why = _refusal(policy)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    return _continuous(policy, *args, **kwargs)


def _refusal(policy: Any) -> str | None:
    if not features.value("deferred_metrics"):
        return "deferred_metrics is off"
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return "not a training step"
    if policy.config.action_mode != "continuous":
        return f"action_mode is {policy.config.action_mode}: its loss counts tokens on the host"
    return refusals.unknown_host(policy)


def _continuous(
    policy: Any, batch: dict[str, Tensor], reduction: str = "mean"
) -> tuple[Tensor, DeferredMetrics]:
    """The host's forward for action_mode "continuous", line by line, but for the reads."""
    if reduction not in {"mean", "none"}:
        raise ValueError(f"Unsupported reduction={reduction!r}. Expected 'mean' or 'none'.")
    model_inputs = policy._model_inputs(batch)
    flow_loss, _ = policy._compute_flow_matching_loss_joint_per_layer(
        batch=batch, model_inputs=model_inputs, reduction=reduction
    )
    loss = torch.stack([flow_loss]).sum(dim=0)
    sites.site("molmoact2/deferred_metrics").ran()
    shown = {"action_flow_loss": flow_loss, "loss": loss}
    return loss, DeferredMetrics({name: value.detach().float().mean() for name, value in shown.items()})
