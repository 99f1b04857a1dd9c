"""Inside a training process: write every parameter's gradient of one update to a file, with its name.

The gradient is what `.grad` holds: summed or averaged over micro-batches and ranks as the host does it,
before clipping; with a loss scaler still scaled. Rank 0 writes it in its own dtype. Cost: one copy of all
gradients in host memory and on disk; a sharded gradient is gathered parameter by parameter, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from somaspeed_patch import sites
from somaspeed_patch.ab.gradients import FILE

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing
_KEPT_AWAY = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def save(accelerator: Any, folder: Path) -> None:
    """Write the gradients of all models that the accelerator has prepared; every rank calls it.

    Where the gradients are not in `.grad`, or only a part is, nothing is written, and the report says why.

    Args:
        folder: where FILE is written, whole or not at all.
    """
    why = _refusal(accelerator)
    on_rank_0 = PartialState().process_index == 0
    found = {} if why else _collected(accelerator._models, keep=on_rank_0)
    if on_rank_0 and not (found or why):
        why = "no parameter of a prepared model has a gradient"
    site = sites.site("step_recorder/record_gradients")
    if why:
        site.declined(why)
        return
    if on_rank_0:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{FILE}.part"
        save_file(found, part)
        part.replace(folder / FILE)
    site.ran()


def _refusal(accelerator: Any) -> str | None:
    """Why `.grad` is not the gradient, or None."""
    kind = accelerator.distributed_type.value
    if kind in _KEPT_AWAY:
        return f"{kind} keeps the gradients to itself"
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        return "FSDP1 joins the gradients of several parameters; use FSDP2"
    return None


def _collected(models: list[nn.Module], *, keep: bool) -> dict[str, Tensor]:
    """Whole gradients by name, on the CPU; names of a second model and those after it begin with its number.

    Args:
        keep: False on a rank that only takes part in gathering.
    """
    found: dict[str, Tensor] = {}
    for number, model in enumerate(models):
        for name, parameter in _named(model):
            if parameter.grad is None:
                continue
            gradient = _whole(parameter.grad.detach())
            if keep:
                found[f"{number}.{name}" if number else name] = gradient.cpu().contiguous()
    return found


def _named(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's parameters, named as without DDP, torch.compile and activation checkpointing."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def _whole(gradient: Tensor) -> Tensor:
    """Gathered from all ranks where it is sharded, dense where it is sparse."""
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
