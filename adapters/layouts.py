"""Layouts under LeRobot and accelerate: `layout=dp_replicate=2,dp_shard=4` on an unchanged recipe.

All hooks do nothing while the feature `layout` is not set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from somaspeed_patch.features import LAYOUT
from somaspeed_patch.registry import Patch, handed

REQUIRES = ["accelerate>=1.15,<2"]  # before, its clipping could not take parameters of several meshes

FEATURES = [LAYOUT]
NEEDED_BY = LAYOUT.name


def _hooked(part: str, hook: str, *names: str) -> Callable[[Any], Any]:
    return handed(f"somaspeed_patch.layouts.{part}", hook, names)


def _property(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from somaspeed_patch.layouts import launch

        if not isinstance(original, property):
            raise AttributeError(f"Accelerator.{name} is no property")
        return getattr(launch, name)(original)

    return make


_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
PATCHES = [
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.__init__",
        make=_hooked("launch", "accelerator"),
        site="mesh",
    ),
    *(
        Patch(module="accelerate.accelerator", name=f"Accelerator.{name}", make=_property(name), site="data")
        for name in ("num_processes", "process_index")
    ),
    Patch(
        module="accelerate.accelerator",
        name="fsdp2_prepare_model",
        make=_hooked("launch", "prepare_model", "accelerator", "model"),
        site="shard",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.backward",
        make=_hooked("pipeline_step", "backward", "self", "loss", "kwargs"),
        site="stages",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator._clip_grad_norm_dtensor_aware",
        make=_hooked("pipeline_step", "clip", "self", "parameters", "max_norm", "norm_type"),
        site="stages",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.wait_for_everyone",
        make=_hooked("evaluation", "wait_for_everyone"),
        site="evaluation",
    ),
    Patch(
        module="lerobot.scripts.lerobot_eval",
        name="eval_policy",
        make=_hooked("evaluation", "eval_policy"),
        site="evaluation",
    ),
    *(
        Patch(
            module=_FSDP1,
            name=f"FullyShardedDataParallel.{name}",
            make=_hooked("states", name),
            site="checkpoint",
        )
        for name in ("state_dict_type", "optim_state_dict", "optim_state_dict_to_load")
    ),
]
