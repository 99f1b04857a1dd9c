"""A training step of a pipeline, around the forward: which loss counts, whole gradients, one norm.

Sum over the stages: the gradients of what is no block, in one message a dtype. What a stage has no part in is
zero there, so that the sum is the gradient of one process, and the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from somaspeed_patch.layouts import stages, transfer
from somaspeed_patch.layouts.stages import Pipeline
from somaspeed_patch.optim import shards


def backward(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Accelerator.backward(loss): the last stage's counts; then the shared gradients are summed."""
    model, pipeline = _found(instance)
    if pipeline is None:
        return wrapped(*args, **kwargs)
    loss, *rest = args
    result = wrapped(loss if pipeline.line.last else transfer.quiet(loss), *rest, **kwargs)
    if instance.sync_gradients:
        sum_shared(model, pipeline)
    return result


def clip(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Accelerator._clip_grad_norm_dtensor_aware(parameters, max_norm, norm_type): over all stages."""
    model, pipeline = _found(instance)
    if pipeline is None:
        return wrapped(*args, **kwargs)
    return _clip(model, pipeline, *args, **kwargs)


def _found(accelerator: Any) -> tuple[Any, Pipeline | None]:
    """The model that is cut, if there is one."""
    for model in accelerator._models:
        pipeline = stages.of_model(model)
        if pipeline is not None:
            return model, pipeline
    return None, None


@torch.no_grad()
def sum_shared(model: nn.Module, pipeline: Pipeline) -> None:
    """Add up the stages' parts of the gradients of what is on every rank. Collective over the stages."""
    shared, _ = _trained(model, pipeline)
    have = _with_gradient(shared, pipeline)
    for parameter in have:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in have:
        part = shards.local(_gradient(parameter))
        by_dtype.setdefault(part.dtype, []).append(part)
    for parts in by_dtype.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=pipeline.line.group)
        for part, whole in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
            part.copy_(whole.view(part.shape))


def _trained(model: nn.Module, pipeline: Pipeline) -> tuple[list[nn.Parameter], frozenset[int]]:
    """The shared parameters that train, and the ids of the blocks'; looked up once, which takes 9 ms."""
    if not pipeline.trained:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        shared = [p for name, p in named if name not in pipeline.owned]
        pipeline.trained.append((shared, frozenset(id(p) for name, p in named if name in pipeline.owned)))
    return pipeline.trained[0]


def _with_gradient(shared: Sequence[nn.Parameter], pipeline: Pipeline) -> list[nn.Parameter]:
    """Those that have one on some rank. The ranks ask each other at each pattern that they had not before:
    they run the same code on the same samples, so it is new for all of them."""
    mine = tuple(parameter.grad is not None for parameter in shared)
    if mine not in pipeline.patterns:
        told: list[Any] = [None] * len(pipeline.line.ranks)
        dist.all_gather_object(told, mine, group=pipeline.line.group)
        pipeline.patterns[mine] = tuple(any(entry) for entry in zip(*told, strict=True))
    return [p for p, found in zip(shared, pipeline.patterns[mine], strict=True) if found]


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"layout: a gradient of shape {list(parameter.shape)} has gone; zero_grad() ran?")
    return parameter.grad


@torch.no_grad()
def _clip(
    model: nn.Module, pipeline: Pipeline, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Tensor:
    """torch's clip_grad_norm_ of all stages' blocks and of what they share.

    Args:
        parameters: of this rank.
    Returns: [] fp32, the norm before clipping, the same on every rank.
    Raises: ValueError: another norm than the 2-norm.
    """
    if float(norm_type) != 2:
        raise ValueError(f"layout: pp clips by the 2-norm, but norm_type is {norm_type}; use 2")
    mine = [parameter for parameter in parameters if parameter.grad is not None]
    _, owned = _trained(model, pipeline)
    blocks = _squares([p for p in mine if id(p) in owned], pipeline)
    dist.all_reduce(blocks, group=pipeline.line.group)
    norm = (blocks + _squares([p for p in mine if id(p) not in owned], pipeline)).sqrt().float()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in (shards.local(_gradient(parameter)) for parameter in mine):
        gradient.mul_(factor)
    return norm


def _squares(parameters: Sequence[Tensor], pipeline: Pipeline) -> Tensor:
    """[] fp64, the squared norm of gradients whose shards the data ranks hold."""
    whole = torch.zeros((), dtype=torch.float64, device=pipeline.line.device)
    for group, parts in _by_group(parameters).items():
        total = torch.nn.utils.get_total_norm(parts).double() ** 2
        for one in group:
            dist.all_reduce(total, group=one)
        whole += total
    return whole


def _by_group(parameters: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient = _gradient(parameter)
        group = shards.reduction(gradient) if isinstance(gradient, DTensor) else ()
        found.setdefault(group, []).append(shards.local(gradient))
    return found
