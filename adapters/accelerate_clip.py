"""accelerate's gradient clipping: where the optimizer is FusedAdamW, only the norm is computed here.

`Accelerator.clip_grad_norm_` is a class attribute that LeRobot and transformers.Trainer both call, whatever
the launcher; the factor is applied by the optimizer's step, while it reads the gradients.
"""

from __future__ import annotations

from typing import Any

import wrapt

from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch, with_parameters

REQUIRES = ["accelerate>=1.0,<2"]

FEATURES = [
    Feature(
        name="optimizer",
        changes="FusedAdamW where the host builds plain AdamW: norm, clip and update in four launches",
        exact=True,
        default=True,
    ),
]


def _clip(original: Any) -> Any:
    from somaspeed_patch.optim import hooks

    with_parameters(original, ["self", "parameters", "max_norm", "norm_type"])
    return wrapt.FunctionWrapper(original, hooks.clip_grad_norm_)


def _writes(original: Any) -> Any:
    from somaspeed_patch.optim import hooks

    return wrapt.FunctionWrapper(original, hooks.before_writing_gradients)


_MODULE = "accelerate.accelerator"
PATCHES = [
    Patch(module=_MODULE, name="Accelerator.clip_grad_norm_", make=_clip, site="clip"),
    Patch(module=_MODULE, name="Accelerator.clip_grad_value_", make=_writes, site="clip"),
    Patch(module=_MODULE, name="Accelerator.backward", make=_writes, site="clip"),
]


def refresh() -> None:
    """Bring the steps of all FusedAdamW into the report."""
    import sys

    from somaspeed_patch import sites

    module = sys.modules.get("somaspeed_patch.optim.fused_adamw")
    if module is None:
        return
    site = sites.site("accelerate_clip/optimizer")
    others = {reason: count for reason, count in module.CALLS.items() if reason != "triton"}
    site.calls, site.native_calls = module.CALLS["triton"], sum(others.values())
    if others and site.status == sites.PATCHED:
        site.reason = f"torch's step: {', '.join(others)}"
