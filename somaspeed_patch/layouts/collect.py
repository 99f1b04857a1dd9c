"""A pipeline's whole state on rank 0: what other stages own comes from them, a tensor at a time.

Cost: every rank gathers its own shards, one tensor after the other; rank 0's line of stages sends to it.
Collective over all ranks of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from somaspeed_patch.layouts.stages import Pipeline
from somaspeed_patch.layouts.transfer import Line

Whole = Callable[[Tensor], Tensor]
"""Gathers a tensor from its shards; collective over the ranks of a stage."""


def model_state(module: nn.Module, pipeline: Pipeline, whole: Whole) -> dict[str, Any]:
    """The state dict of all stages on rank 0's CPU, in the host's order; empty on the other ranks."""
    found: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        owned = pipeline.owned.get(name)
        stage, like = 0, value
        if owned is not None:
            stage, like = owned.stage, torch.empty(owned.shape, dtype=owned.dtype, device="meta")
        found[name] = _brought(pipeline.line, stage, like, value, whole)
    return found if dist.get_rank() == 0 else {}


def optimizer_state(
    state: Mapping[int, Mapping[str, Any]], pipeline: Pipeline, owners: Mapping[int, int], whole: Whole
) -> dict[int, dict[str, Any]]:
    """The optimizer's state of all stages on rank 0's CPU; empty on the other ranks.

    Args:
        state: this rank's, by the parameter's place.
        owners: stage of each place that belongs to a block; all other places are on every rank.
    """
    line = pipeline.line
    found: dict[int, dict[str, Any]] = {}
    for stage, place, listed in _listing(state, line, owners):
        entry = found.setdefault(place, {})
        for name, like in listed.items():
            value = state[place][name] if stage == line.stage else None
            entry[name] = _brought(line, stage, like, value, whole) if isinstance(like, Tensor) else like
    return dict(sorted(found.items())) if dist.get_rank() == 0 else {}


def _listing(
    state: Mapping[int, Mapping[str, Any]], line: Line, owners: Mapping[int, int]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Stage, place and what it holds there (tensors without memory), in the same order on all ranks."""
    mine = {
        place: {name: _outline(value) for name, value in entry.items()}
        for place, entry in state.items()
        if owners.get(place, 0) == line.stage
    }
    told: list[Any] = [None] * len(line.ranks)
    dist.all_gather_object(told, mine, group=line.group)
    for stage, listing in enumerate(told):
        for place, entry in listing.items():
            yield stage, place, {name: _without_memory(value) for name, value in entry.items()}


def _outline(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else [value]


def _without_memory(outline: Any) -> Any:
    if isinstance(outline, list):
        return outline[0]
    return torch.empty(outline[0], dtype=outline[1], device="meta")


def _brought(line: Line, stage: int, like: Tensor, value: Any, whole: Whole) -> Tensor | None:
    """A stage's tensor on rank 0's CPU; None elsewhere.

    Args:
        like: its shape and dtype.
        value: the tensor or its shard, on the ranks of that stage.
    """
    first, speaks = dist.get_rank() == 0, line.ranks[0] == 0
    if line.stage == stage:
        gathered = whole(value).detach()
        if first:
            return gathered.cpu()
        if speaks:
            dist.send(gathered.to(line.device).contiguous(), 0, line.group)
    elif first:
        received = torch.empty(like.shape, dtype=like.dtype, device=line.device)
        dist.recv(received, line.ranks[stage], line.group)
        return received.cpu()
    return None
