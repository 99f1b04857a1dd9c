"""CUDA streams of rollout and learner: on one default stream they would wait for each other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def own(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, this thread computes on a stream of its own; nothing on a CPU."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def wait(device: torch.device) -> None:
    """Until all that this thread has asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
