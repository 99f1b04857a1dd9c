"""State dicts that torch.optim.AdamW wrote or will read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

_WIDE = ("exp_avg", "exp_avg_sq", "master")


def export(saved: dict[str, Any]) -> dict[str, Any]:
    """A state_dict whose `step`s are where torch keeps them, each in memory of its own.

    Inside the optimizer they are views of one vector on the device, which safetensors refuses and which would
    make torch's foreach step, after a resume, wait for the device once a parameter.

    Args:
        saved: what Optimizer.state_dict returned; its entries are the live state, and stay as they are.
    """
    on_device = {
        key
        for group in saved["param_groups"]
        if group["fused"] or group["capturable"]
        for key in group["params"]
    }
    keys = [key for key, entry in saved["state"].items() if isinstance(entry, dict) and "step" in entry]
    steps = [saved["state"][key]["step"] for key in keys]
    state = dict(saved["state"])
    for key, step in zip(keys, _to_cpu(steps), strict=True):
        kept = state[key]["step"].clone() if key in on_device else step
        state[key] = {**state[key], "step": kept}
    return {**saved, "state": state}


def _to_cpu(steps: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, with one synchronization instead of one each."""
    if not any(step.is_cuda for step in steps):
        return [step.clone() for step in steps]
    return [step.clone() for step in torch.stack([step.detach() for step in steps]).cpu()]


def restore_wide(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give moments and master weights back the bits that Optimizer.load_state_dict rounded away.

    Args:
        optimizer: has just loaded `saved`.
    """
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, param in zip(keys, params, strict=True):
        entry = saved["state"].get(key, {})
        for name in _WIDE:
            value = entry.get(name)
            if value is not None and value.dtype == torch.float32 and param.dtype != torch.float32:
                optimizer.state[param][name] = value.detach().to(param.device, copy=True)
