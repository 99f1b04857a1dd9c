"""GR00T's sample_time: the flow times, drawn on the CPU, go to the GPU without a wait.

The host's `.to(device)` from pageable memory waits for all that was launched: the backbone. After it the GPU
waits for the CPU to launch the DiT, 38 of 249 ms at batch 80 of an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import constants, features, sites


def sample_time(wrapped: Any, head: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """sample_time(batch_size, device, dtype): [B] of the host's own draw and arithmetic, done on the CPU."""
    on = features.value("async_times") and not torch.compiler.is_compiling()
    return _times(wrapped, *args, **kwargs) if on else wrapped(*args, **kwargs)


def _times(wrapped: Any, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Any:
    device = torch.device(device)
    if device.type == "cpu":
        return wrapped(batch_size, device=device, dtype=dtype)
    times: Tensor = wrapped(batch_size, device=torch.device("cpu"), dtype=dtype)
    sites.site("groot/async_times").ran()
    return constants.once(device, times)
