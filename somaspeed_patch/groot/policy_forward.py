"""GrootPolicy.forward without the read of the loss behind it, and train() of both hosts without its walk."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import features, sites, train_mode
from somaspeed_patch.deferred import DeferredMetrics

_HOST = "lerobot.policies.groot.modeling_groot"


def policy_forward(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss and the metrics, which are read when somebody looks at them."""
    if not features.value("deferred_metrics") or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    return _forward(policy, *args, **kwargs)


def train(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GrootPolicy.train and Gr00tN1d7.train, which both hosts' loops call at every step."""
    mode = args[0] if args else kwargs.get("mode", True)
    if torch.compiler.is_compiling() or not features.value("train_mode"):
        return wrapped(*args, **kwargs)
    site = sites.site("groot/train_mode")
    kernels = getattr(model, "use_kernels", False)  # which transformers' train() exchanges
    if kernels or not all(train_mode.set_directly(child, mode) for child in model.children()):
        site.declined("a module has a train() of its own")
        return wrapped(*args, **kwargs)
    site.ran()
    model.training = mode
    return model


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
