"""LeRobot's own `compile_model=true` stores a compiled `forward` on the model, hiding the class attribute."""

from __future__ import annotations

from typing import Any

import torch

from somaspeed_patch.pi05 import forward


def policy_forward(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PI05Policy.forward: where the split forward serves the model, the compiled one steps aside."""
    stored = vars(policy.model)
    if "forward" not in stored or torch.compiler.is_compiling() or forward.refusal(policy.model) is not None:
        return wrapped(*args, **kwargs)
    compiled = stored.pop("forward")
    try:
        return wrapped(*args, **kwargs)
    finally:
        stored["forward"] = compiled
