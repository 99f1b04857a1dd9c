"""LeRobot's optimizers: FusedAdamW where plain AdamW is built, and `--optimizer.type=somaspeed_adamw`.

A config that builds a subclass, as MolmoAct2's of LeRobot main does, keeps what it builds.
"""

from __future__ import annotations

from typing import Any

import wrapt

from somaspeed_patch.registry import Patch, with_parameters

REQUIRES = ["lerobot>=0.6.1,<0.7"]
_MODULE = "lerobot.optim.optimizers"


def _build(original: Any) -> Any:
    from somaspeed_patch.optim import hooks

    with_parameters(original, ["self", "params"])
    return wrapt.FunctionWrapper(original, hooks.build)


def _register(original: Any) -> Any:
    from somaspeed_patch.optim import lerobot_config

    return lerobot_config.registered(original)


PATCHES = [
    Patch(module=_MODULE, name="AdamWConfig.build", make=_build, site="build"),
    Patch(module=_MODULE, name="XVLAAdamWConfig.build", make=_build, site="build"),
    Patch(module=_MODULE, name="OptimizerConfig._choice_registry", make=_register, site="somaspeed_adamw"),
]
