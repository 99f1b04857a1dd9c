"""Small index tensors that recur from step to step: sent to the device once, found again by their values."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

_MOST = 64  # a step needs up to 8 of them; prompts of new lengths make new ones

_sent: OrderedDict[tuple[bytes, torch.dtype, torch.Size, torch.device], Tensor] = OrderedDict()


def on(device: torch.device, values: Tensor) -> Tensor:
    """CPU `values` as a tensor on `device`; treat it as read-only. Copies from pinned memory do not wait."""
    if device.type == "cpu":
        return values
    key = (values.numpy().tobytes(), values.dtype, values.shape, device)
    if key in _sent:
        _sent.move_to_end(key)
        return _sent[key]
    while len(_sent) >= _MOST:
        _sent.popitem(last=False)
    _sent[key] = once(device, values)
    return _sent[key]


def once(device: torch.device, values: Tensor) -> Tensor:
    """CPU `values` on `device` for one step, kept nowhere; the copy does not wait either."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def release() -> None:
    """Forget all of them."""
    _sent.clear()
