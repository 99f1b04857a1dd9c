"""LeRobot's own `compile_model=true`: it stores a compiled `forward` on the model, which hides the class attribute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from somaspeed_patch.pi05 import forward


def policy_forward(wrapped: Any, policy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PI05Policy.forward: where the split forward serves the model, the host's compiled forward steps aside."""
    stored = vars(policy.model)
    if "forward" not in stored or torch.compiler.is_compiling() or forward.refusal(policy.model) is not None:
        return wrapped(*args, **kwargs)
    compiled = stored.pop("forward")
    try:
        return wrapped(*args, **kwargs)
    finally:
        stored["forward"] = compiled
