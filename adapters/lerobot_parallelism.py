"""LeRobot's `--parallelism.dp_shard` for pi0.5, MolmoAct2 and GR00T, which do not say what their units are.

From LeRobot 0.6.2 on (its main branch); before, the feature `layout` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from somaspeed_patch.registry import Patch, handed

REQUIRES = ["lerobot>=0.6.2.dev0,<0.7", "accelerate>=1.15,<2"]
OPTIONAL = True  # no LeRobot that is released has these flags

_HOOKS = "somaspeed_patch.layouts.lerobot_flags"
_POLICIES = {"pi05": "PI05Policy", "molmoact2": "MolmoAct2Policy", "groot": "GrootPolicy"}


def _declared(family: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from somaspeed_patch.layouts import lerobot_flags

        return lerobot_flags.declared(family, original)

    return make


PATCHES = [
    *(
        Patch(
            module=f"lerobot.policies.{family}.modeling_{family}",
            name=f"{policy}._fsdp_wrap_modules",
            make=_declared(family),
            site="declared",
        )
        for family, policy in _POLICIES.items()
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.__init__",
        make=handed(_HOOKS, "accelerator"),
        site="units",
    ),
    Patch(
        module="accelerate.accelerator",
        name="fsdp2_prepare_model",
        make=handed(_HOOKS, "prepare_model", ("accelerator", "model")),
        site="units",
    ),
]
