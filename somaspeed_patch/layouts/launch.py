"""What accelerate is told at the start of a run, and what it calls instead of its own wrapping.

accelerate's FSDP2 does everything else: it moves the optimizer to the new parameters, reads the clipping's
norm over the mesh, shards the data by the mesh's data axes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from somaspeed_patch import features, sites
from somaspeed_patch.layouts import families, mesh, pipeline, tensor_parallel, thawed, unused
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.layouts.layout import Layout, parse
from somaspeed_patch.layouts.shard import shard

log = logging.getLogger(__name__)

SITE = "layouts/shard"
_OWN_ENGINES = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "torch_tp_plugin",
)


def accelerator(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Accelerator.__init__: refuse a mesh that does not fit; else ask for accelerate's FSDP2 over it."""
    text = features.value("layout")
    if text is None:
        return wrapped(*args, **kwargs)
    layout = parse(str(text)).on(_ranks_started())
    own = [name for name in _OWN_ENGINES if kwargs.get(name) is not None]
    if own:
        raise ValueError(f"layout: this host gives Accelerator its own {', '.join(own)}; drop one of the two")
    if not layout.shards or not _launched():
        sites.site(SITE).declined(_why_hosts(layout))
        return wrapped(*args, **kwargs)
    result = wrapped(*args, **{**kwargs, "fsdp_plugin": _plugin(layout, kwargs)})
    mesh.attach(instance, mesh.build(layout, instance.device.type))
    return result


def _ranks_started() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _launched() -> bool:
    """Whether a launcher set up ranks, be it one: torch's process group needs its variables."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def _why_hosts(layout: Layout) -> str:
    if not layout.shards:
        return f"{layout.dp_replicate} replicas and no shards: the host's own DistributedDataParallel"
    return "one process without a launcher: nothing to split; torchrun --nproc_per_node 1 goes through FSDP2"


def _plugin(layout: Layout, kwargs: Mapping[str, Any]) -> Any:
    """What accelerate takes to switch its FSDP2 on; the mesh stays ours, for it has no pp."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    count_a_cpu_as_a_device(kwargs)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.reshard != "never",
        cpu_ram_efficient_loading=False,  # every rank has read the weights by then
    )


def count_a_cpu_as_a_device(kwargs: Mapping[str, Any]) -> None:
    """accelerate has FSDP for accelerators only; on gloo it works as well, and is how it is tested."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    groups = (h for h in kwargs.get("kwargs_handlers") or () if isinstance(h, InitProcessGroupKwargs))
    state = PartialState(cpu=bool(kwargs.get("cpu")), **next((h.to_kwargs() for h in groups), {}))
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def num_processes(original: property) -> property:
    """Accelerator.num_processes: of a layout, the number of different batches; what the host counts by."""
    return property(lambda self: _own(mesh.replicas(self), original, self))


def process_index(original: property) -> property:
    """Accelerator.process_index: of a layout, which of those batches is this rank's."""
    return property(lambda self: _own(mesh.replica(self), original, self))


def _own(found: int | None, original: property, instance: Any) -> Any:
    return original.__get__(instance) if found is None else found


def prepare_model(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """accelerate's fsdp2_prepare_model(accelerator, model): our units, where we know the model."""
    return _prepare(wrapped, *args, **kwargs)


def _prepare(wrapped: Any, accelerator: Any, model: nn.Module) -> nn.Module:
    axes, site = mesh.of(accelerator), sites.site(SITE)
    if axes is None:
        return wrapped(accelerator, model)  # type: ignore[no-any-return]
    family = families.of(model)
    if family is None:
        known = ", ".join(family.name for family in families.FAMILIES)
        raise ValueError(
            f"layout: {type(model).__name__} is none of the models whose units are known ({known}); "
            "train it without layout, or with accelerate's own FSDP options"
        )
    layout = parse(str(features.value("layout"))).on(axes.size())
    site.ran()
    site.reason = spread(model, family, layout, accelerator.device, axes)
    if accelerator.is_main_process:
        log.info("layout: %s", site.reason)
    return model


def spread(
    model: nn.Module,
    family: Family,
    layout: Layout,
    device: torch.device,
    axes: DeviceMesh | None = None,
) -> str:
    """Put a model on its ranks, in place; what became of it. Collective.

    Args:
        axes: the layout's mesh, where it exists already.
    """
    axes = axes or mesh.build(layout, device.type)
    model.to(device)
    if axes["pp"].size() > 1:
        pipeline.cut(model, family, axes)
    split = tensor_parallel.apply(model, family, axes["tp"]) if axes["tp"].size() > 1 else ""
    result = shard(model, family, layout, axes)
    mesh.attach(model, axes)
    unused.watch(model)
    thawed.refuse(model, layout)
    return "; ".join(filter(None, (str(result), split)))
