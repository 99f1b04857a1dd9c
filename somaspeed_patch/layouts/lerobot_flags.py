"""LeRobot's own `--parallelism` flags (0.6.2) over our units.

Its FSDP2 needs the class names of a policy's units, which only two policies declare; others refuse to start.
Ours are declared for them, and where accelerate would wrap those classes our units are made: it finds but
one of pi0.5's two kinds of layer, for both have one name. Engine, mesh, data and checkpoints stay LeRobot's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from somaspeed_patch import sites
from somaspeed_patch.layouts import families, launch
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.layouts.layout import Layout

log = logging.getLogger(__name__)

SITE = "lerobot_parallelism/units"


def declared(family: str, original: list[str] | None) -> list[str]:
    """A policy's `_fsdp_wrap_modules`: LeRobot's where it declares some."""
    known = next(known for known in families.FAMILIES if known.name == family)
    return original or list(known.classes)


def accelerator(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Accelerator.__init__: FSDP2 on gloo too, for which accelerate takes a CPU for no device."""
    if kwargs.get("fsdp_plugin") is not None:
        launch.count_a_cpu_as_a_device(kwargs)
    return wrapped(*args, **kwargs)


def prepare_model(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """accelerate's fsdp2_prepare_model(accelerator, model): our units in the place of our class names."""
    return _prepared(wrapped, *args, **kwargs)


def _prepared(wrapped: Any, accelerator: Any, model: Any) -> Any:
    plugin, site = accelerator.state.fsdp_plugin, sites.site(SITE)
    family = families.of(model)
    if family is None or plugin.transformer_cls_names_to_wrap != list(family.classes):
        site.declined("the units are the command's or LeRobot's")
        return wrapped(accelerator, model)
    _refuse(plugin)
    degrees = accelerator.parallelism_config
    layout = Layout(
        dp_replicate=degrees.dp_replicate_size,
        dp_shard=degrees.dp_shard_size,
        reshard="default" if plugin.reshard_after_forward else "never",
    )
    site.ran()
    site.reason = launch.spread(model, family, layout, accelerator.device)
    _freeze_what_never_runs(model, family)
    if accelerator.is_main_process:
        log.info("parallelism: %s", site.reason)
    return model


def _freeze_what_never_runs(model: nn.Module, family: Family) -> None:
    """Torch's distributed checkpoint would ask for moments of it when it is loaded, which no update has made.

    Without a gradient no optimizer changes it either way.
    """
    for _, module in families.modules(model, family.never_run):
        module.requires_grad_(False)


def _refuse(plugin: Any) -> None:
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    for option, asked in {"cpu_offload": offloads, "ignored_modules": plugin.ignored_modules}.items():
        if asked:
            raise ValueError(
                f"lerobot_parallelism: --accelerator.fsdp.{option} is not for the units that somaspeed_patch"
                " declares; drop it, or name your own with --accelerator.fsdp.wrap_modules"
            )
