"""transformers.Trainer under a layout: the path it takes for one process or DDP, over sharded weights.

The Trainer's own FSDP path writes other files and prepares the model after a checkpoint was read; its plain
path reads whole weights first, then hands model and optimizer to accelerate in one call, which is all that
FSDP2 needs. So the Trainer is told that there is no FSDP. What DDP's wrapping would have done besides, which
is autocast around the model's forward, is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from somaspeed_patch import features, sites
from somaspeed_patch.layouts import mesh

log = logging.getLogger(__name__)

ACCELERATOR, PRECISION = "layouts_trainer/accelerator", "layouts_trainer/precision"


def accelerator(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer.create_accelerator_and_postprocess(): with a layout, an Accelerator whose FSDP2 is ours."""
    _needs_the_engine()
    result = wrapped(*args, **kwargs)
    axes = mesh.of(instance.accelerator)
    if axes is None:
        return result
    for axis in ("tp", "pp"):
        if axes[axis].size() > 1:
            raise ValueError(
                f"layout: {axis}={axes[axis].size()} under transformers.Trainer: it counts every rank as one "
                f"with samples of its own; use dp_replicate and dp_shard, with {axis}=1"
            )
    if str(instance.accelerator.state.dynamo_plugin.backend.value).upper() != "NO":
        raise ValueError(
            "layout: torch_compile compiles the whole model before it is sharded; set compile=True instead"
        )
    _check_mean(axes["dp_shard"])
    instance.is_fsdp_enabled = False
    sites.site(ACCELERATOR).ran()
    return result


def _needs_the_engine() -> None:
    from somaspeed_patch import patching  # it imports the adapters

    if features.value("layout") is not None and "layouts" not in patching.active():
        raise ValueError(
            "layout: the adapter layouts_trainer is on without layouts, which splits the model; "
            "patch('layouts', 'layouts_trainer', layout=...)"
        )


def _check_mean(shards: DeviceMesh) -> None:
    """Refuse gloo of torch 2.7, which adds up where FSDP2 asks it for the mean of gradients."""
    if shards.device_type != "cpu":
        return
    mean, ones = torch.zeros(1), torch.ones(shards.size())
    dist.reduce_scatter_tensor(mean, ones, op=dist.ReduceOp.AVG, group=shards.get_group())
    if mean.item() != 1:
        raise ValueError(
            f"layout: torch {torch.__version__} on a CPU adds gradients up, not averages them; train on "
            "GPUs, or with a newer torch"
        )


def wrap_model(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer._wrap_model(model, training=True, dataloader=None), which comes before accelerate's prepare."""
    model = wrapped(*args, **kwargs)
    if mesh.of(instance.accelerator) is not None and _for_training(*args, **kwargs):
        _before_sharding(instance, model)
    return model


def clip(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Accelerator._clip_grad_norm_dtensor_aware: the norm of all shards; torch 2.7 logs this rank's share."""
    norm = wrapped(*args, **kwargs)
    return norm.full_tensor() if mesh.of(instance) is not None and isinstance(norm, DTensor) else norm


def _for_training(_model: Any, training: bool = True, dataloader: Any = None) -> bool:
    return training


def _before_sharding(trainer: Any, model: nn.Module) -> None:
    if isinstance(model, FSDPModule):
        raise ValueError(
            "layout: train() was called again for a model that is sharded already; build a new Trainer, and "
            "leave auto_find_batch_size off, which calls it again"
        )
    if trainer.accelerator.native_amp and "_original_forward" not in vars(model):
        trainer.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, and nothing else
    site = sites.site(PRECISION)
    site.ran()
    site.reason = _precision(model, trainer.accelerator.mixed_precision)
    if trainer.is_world_process_zero():
        log.info("layout: %s", site.reason)


def _precision(model: nn.Module, autocast: str) -> str:
    """What is kept and computed in which dtype; a low-precision master is said loudly."""
    trains, frozen = (_dtypes(model, trains=trains) for trains in (True, False))
    if trains - {torch.float32, torch.float64}:
        log.warning("layout: parameters that train are %s, without a copy in fp32", _names(trains))
    return f"autocast {autocast} over {_names(trains)} parameters that train and {_names(frozen)} frozen ones"


def _dtypes(model: nn.Module, *, trains: bool) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters() if parameter.requires_grad is trains}


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
