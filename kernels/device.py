"""Where Triton's kernels run: the interpreter on a CPU, and the current device on a GPU."""

import contextlib
import os
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # what triton.jit looked at, too


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current one: Triton launches there, not on that of its arguments."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
