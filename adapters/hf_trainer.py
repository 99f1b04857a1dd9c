"""transformers.Trainer, and so Isaac-GR00T's: FusedAdamW for optim=adamw_torch and adamw_torch_fused.

An optimizer that DeepSpeed owns, or another class, is left as it is, and reported: also that of DeepSpeed's
config, for which the Trainer asks for no class.
"""

from __future__ import annotations

from typing import Any

import wrapt

from somaspeed_patch.registry import Patch, with_parameters

REQUIRES = ["transformers>=4.51,<5.6"]


def _optimizer_class(original: Any) -> Any:
    from somaspeed_patch.optim import hooks

    with_parameters(original, ["args", "model"])
    return wrapt.FunctionWrapper(original, hooks.optimizer_class)


def _deepspeed_init(original: Any) -> Any:
    from somaspeed_patch.optim import hooks

    return wrapt.FunctionWrapper(original, hooks.deepspeed_init)


PATCHES = [
    Patch(
        module="transformers.trainer",
        name="Trainer.get_optimizer_cls_and_kwargs",
        make=_optimizer_class,
        site="optimizer_class",
    ),
    Patch(
        module="transformers.trainer",
        name="deepspeed_init",
        make=_deepspeed_init,
        site="optimizer_class",
    ),
]
