"""Layouts under LeRobot and accelerate: `layout=dp_replicate=2,dp_shard=4` on an unchanged recipe.

All hooks do nothing while the feature `layout` is not set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch, with_parameters

REQUIRES = ["accelerate>=1.14,<2"]

FEATURES = [
    Feature(
        name="layout",
        changes="split the training over ranks: dp_replicate=2,dp_shard=4 and reshard=, frozen=",
        exact=True,
        default=None,
    ),
]


def _hooked(part: str, hook: str, *names: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        import importlib

        if names:
            with_parameters(original, list(names))
        module = importlib.import_module(f"somaspeed_patch.layouts.{part}")
        return wrapt.FunctionWrapper(original, getattr(module, hook))

    return make


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
