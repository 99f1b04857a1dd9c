"""Where torch's own AdamW and clipping run instead of the kernels, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim.gradients import same_order
from somaspeed_patch.optim.options import Options

_FLAGS = ("amsgrad", "differentiable")
Groups = Sequence[dict[str, Any]]


def group_reason(groups: Groups) -> str | None:
    """Why groups with these options cannot be served by the kernels, or None."""
    for number, group in enumerate(groups):
        for flag in _FLAGS:
            if group.get(flag):
                return f"group {number} has {flag}=True"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return f"group {number} has tensor betas"
    return None


def tensor_reason(params: Sequence[Tensor]) -> str | None:
    """Why these parameters cannot be served by the kernels, or None."""
    devices = {param.device for param in params}
    if len(devices) > 1:
        return f"parameters on several devices: {', '.join(sorted(map(str, devices)))}"
    wrong = next((param for param in params if param.dtype not in adamw.CODES), None)
    if wrong is not None:
        return f"a parameter of dtype {wrong.dtype}"
    device = next(iter(devices), torch.device("cpu"))
    if device.type != "cuda" and not (device.type == "cpu" and adamw.INTERPRETED):
        return f"parameters on {device.type}"
    return "no parameters" if not params else None


def refuse(reason: str, options: Options) -> None:
    """Raise where torch cannot serve either.

    Raises: RuntimeError: names the options that torch's step does not have.
    """
    if options.beyond_torch:
        raise RuntimeError(
            f"FusedAdamW: {', '.join(options.beyond_torch)} need the kernels, which cannot serve {reason}"
        )


def step(optimizer: torch.optim.AdamW) -> None:
    """torch.optim.AdamW's step; on a CPU by torch's fused kernel, whatever the groups say."""
    with torch.enable_grad(), _fused_on_cpu(optimizer):
        _unhooked(torch.optim.Adam.step)(optimizer)


def clip_grad_norm_(params: Sequence[Tensor], max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """torch's clipping, in place, of all gradients; DTensors of one mesh or none."""
    norm = torch.nn.utils.clip_grad_norm_(list(params), max_norm, error_if_nonfinite=error_if_nonfinite)
    full = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


def _unhooked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adam.step without the hook calls that torch adds per class: FusedAdamW.step has made them."""
    while getattr(function, "hooked", False):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


@contextmanager
def _fused_on_cpu(optimizer: torch.optim.AdamW) -> Iterator[None]:
    """`fused=True` in every group that torch's CPU kernel serves, for the duration of one step only."""
    groups = optimizer.param_groups
    before = [group["fused"] for group in groups]
    try:
        for group in groups:
            group["fused"] = group["fused"] or _cpu_kernel_serves(group, optimizer.state)
        yield
    finally:
        for group, fused in zip(groups, before, strict=True):
            group["fused"] = fused


def _cpu_kernel_serves(group: dict[str, Any], state: Mapping[Tensor, Any]) -> bool | None:
    """torch 2.11's takes all tensors as flat memory, which is wrong where strides are not the parameter's."""
    params = [param for param in group["params"] if param.grad is not None]
    served = not group["differentiable"] and all(
        _flat_on_cpu(param, state.get(param) or {}) for param in params
    )
    return True if served and params else group["fused"]


def _flat_on_cpu(param: Tensor, entry: Mapping[str, Any]) -> bool:
    others = [param.grad, *(entry[name] for name in ("exp_avg", "exp_avg_sq") if name in entry)]
    return (
        param.device.type == "cpu"
        and param.is_floating_point()
        and all(other.dtype == param.dtype and same_order(other, param) for other in others)
        and (param.is_contiguous() or same_order(param, torch.empty_like(param, device="meta")))
    )
