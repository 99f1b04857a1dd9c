"""The recipe's model on the meta device: shapes, dtypes and modules as its host builds them, no memory.

Cost: the host's imports (7 s) and its constructor (0.1 to 4 s at full size).
"""

from __future__ import annotations

from typing import Any

import torch

from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.tiny.replaced import Replaced


def model(recipe: Synthetic) -> Any:
    """The policy of a recipe's section `synthetic`, all of its tensors on the meta device.

    Raises: ValueError: the host is not installed.
    """
    replaced = Replaced()
    try:
        from lerobot.configs import policies

        # LeRobot's configurations check their device against cuda, mps, xpu and cpu.
        replaced.put(policies, "is_torch_device_available", lambda _: lambda name: True)
        return _BUILDERS[recipe.model](recipe, torch.device("meta"))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"layout plan: {recipe.name} needs its host, and {error.name} is not installed; "
            "pip install somaspeed-patch[lerobot]"
        ) from error
    finally:
        replaced.restore()


def _pi05(recipe: Synthetic, device: torch.device) -> Any:
    from somaspeed_patch.ab import synthetic_pi05

    return synthetic_pi05.build(recipe, device)


def _molmoact2(recipe: Synthetic, device: torch.device) -> Any:
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    from somaspeed_patch.ab import synthetic_molmoact2_model as host

    with host.without_checkpoint(recipe.size, device):
        return MolmoAct2Policy(host.policy_config(recipe, device.type))


def _groot(recipe: Synthetic, device: torch.device) -> Any:
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    from somaspeed_patch.ab import synthetic_groot_model as host

    with host.without_checkpoint(recipe, device):
        return GrootPolicy(host.policy_config(recipe, device.type))


_BUILDERS = {"pi05": _pi05, "molmoact2": _molmoact2, "groot": _groot}
