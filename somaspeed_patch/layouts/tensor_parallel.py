"""Tensor parallelism: each layer's heads and MLP width over a mesh axis, before FSDP2 goes over it.

torch's `parallelize_module` splits the linear layers and hands plain local tensors on, so whoever calls
`layer.self_attn.q_proj(x)`, host or we, computes with fewer heads. What is not split is computed by all ranks
of the axis from the same inputs, weights and random numbers, so its gradients are equal and stay so.

A layer's forward sums [B, N, W] over the axis twice; the backward, once for each first projection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from somaspeed_patch.layouts import families, tp_ops
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.layouts.tp_ops import Place
from somaspeed_patch.layouts.tp_plans import PLANS, Part

_Found = tuple[str, Any, Part]  # a module's name, itself, what is split of it


def apply(model: nn.Module, family: Family, axis: DeviceMesh) -> str:
    """Split the layers of `model` over the axis, in place, and let its ranks draw the same random numbers.

    Args:
        axis: the one that is named tp.

    Returns: what became of it, for the log.

    Raises: ValueError: something does not divide, or would compute something else.
    """
    size = axis.size()
    found = check(model, family, size)
    _same_draws(axis)
    place = Place(group=axis.get_group(), index=axis.get_local_rank(), size=size)
    numbers = sum(_split(module, part, axis, place) for _, module, part in found)
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"tp {size}: {numbers / 1e6:,.1f} of {total / 1e6:,.1f} M numbers split"


def is_split(module: nn.Module) -> bool:
    """Whether it computes with a part of its heads or width."""
    return any(
        isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()) for p in module.parameters()
    )


def _found(model: nn.Module, family: Family, size: int) -> Iterator[_Found]:
    if family.name not in PLANS:
        raise ValueError(
            f"layout: tp={size} knows the layers of {', '.join(PLANS)}, but this is {family.name}; "
            "use dp_shard"
        )
    for part in PLANS[family.name]:
        yield from ((name, module, part) for name, module in families.modules(model, (part.modules,)))


def check(model: nn.Module, family: Family, size: int) -> list[_Found]:
    """What `size` ranks would split.

    Raises: ValueError: see `apply`.
    """
    found = list(_found(model, family, size))
    lora = next((name for name, m in model.named_modules() if type(m).__module__.startswith("peft.")), None)
    if lora is not None:
        raise ValueError(
            f"layout: tp={size} does not split PEFT's {lora or 'model'}; use dp_shard, or merge it"
        )
    for name, module, part in found:
        _check_linears(name, module, part, size)
        _check_sizes(name, module, part, size)
        _check_dropouts(name, module, part, size)
    why = _why_not_pi05(model) if family.name == "pi05" else None
    if why is not None:
        raise ValueError(
            f"layout: tp={size} splits pi0.5's heads, of which LeRobot's own forward counts 8, so ours has to"
            f" run; but {why}; set --policy.train_expert_only=true and leave frozen_prefix on, or use"
            " dp_shard"
        )
    return found


def _why_not_pi05(model: nn.Module) -> str | None:
    """Why the forward that takes any number of heads does not run, or None."""
    from somaspeed_patch.pi05 import forward

    core = next(module for module in model.modules() if hasattr(module, "paligemma_with_expert"))
    return forward.refusal(core)


def _check_linears(name: str, module: Any, part: Part, size: int) -> None:
    for inner in (*part.columns, *part.rows, *part.fused, *part.shared):
        kind = type(module.get_submodule(inner))
        if kind is not nn.Linear:
            raise ValueError(
                f"layout: tp={size} splits plain nn.Linear, but {name}.{inner} is a {kind.__name__}; "
                "use dp_shard"
            )


def _check_sizes(name: str, module: Any, part: Part, size: int) -> None:
    first = module.get_submodule((*part.columns, *part.fused)[0])
    head = getattr(module, part.head_size) if part.head_size else 0
    if part.heads or head:
        count, what = getattr(module, part.heads) if part.heads else first.out_features // head, "heads"
    else:
        count, what = first.out_features, "columns"
    if count % size:
        valid = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
        raise ValueError(
            f"layout: tp={size} does not divide the {count} {what} of {name}: {count} / {size} ="
            f" {count / size:.2f}; use a tp that does ({valid})"
        )
    for inner in part.shared:
        width = module.get_submodule(inner).out_features
        if width != head:
            raise ValueError(
                f"layout: tp={size} expects one K/V head in {name}, found {width} / {head}; use dp_shard"
            )


def _check_dropouts(name: str, module: Any, part: Part, size: int) -> None:
    for inner in part.undroppable:
        probability = float(attrgetter(inner)(module))
        if probability:
            raise ValueError(
                f"layout: tp={size} cannot draw the dropout of {name} as one process does, but {inner} ="
                f" {probability:g}; set it to 0, or use dp_shard"
            )


def _same_draws(axis: DeviceMesh) -> None:
    """Give all ranks of the axis the random state of its first: a run without a seed has one each."""
    device = None if axis.device_type == "cpu" else torch.get_device_module(axis.device_type)
    state = [
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        None if device is None else device.get_rng_state(),
    ]
    dist.broadcast_object_list(state, group=axis.get_group(), group_src=0)
    random.setstate(cast(Any, state[0]))
    np.random.set_state(cast(Any, state[1]))
    torch.set_rng_state(cast(Tensor, state[2]))
    if device is not None:
        device.set_rng_state(state[3])


def _split(module: Any, part: Part, axis: DeviceMesh, place: Place) -> int:
    """Split one module; the numbers in what is split of it."""
    linears = [module.get_submodule(inner) for inner in (*part.columns, *part.rows)]
    for linear in linears:
        for parameter in linear.parameters():  # here, while it is whole
            dist.broadcast(parameter.detach(), src=0)
    numbers: int = sum(linear.weight.numel() for linear in linears)
    styles = {
        **{inner: ColwiseParallel() for inner in part.columns},
        **{inner: RowwiseParallel() for inner in part.rows},
    }
    parallelize_module(module, axis, styles, src_data_rank=None)
    for inner in part.fused:
        _replace(module.get_submodule(inner), tp_ops.fused_rows, place)
    for inner in part.dropouts:
        _replace(module.get_submodule(inner), tp_ops.part_of_dropout, place)
    for inner in part.shared:
        module.get_submodule(inner).register_forward_hook(lambda _, __, output: tp_ops.summed(output, place))
    if part.arguments:
        module.register_forward_pre_hook(partial(_own_arguments, part.arguments, place), with_kwargs=True)
    for count in part.counts:
        setattr(module, count, getattr(module, count) // place.size)
    return numbers


def _replace(module: Any, forward: Callable[..., Tensor], place: Place) -> None:
    module.forward = partial(forward, module, place)


def _own_arguments(
    names: tuple[str, ...], place: Place, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments [B, N, heads, D] with the rank's own heads."""
    return args, {
        name: tp_ops.own(value, 2, place) if name in names else value for name, value in kwargs.items()
    }
