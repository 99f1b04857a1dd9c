"""Cut a model into the stages of a pipeline: successive blocks on successive ranks, in the model's own order.

Synchronous, without microbatches: a stage waits for the one before, so what is gained is memory. A rank keeps
its own blocks and everything that is no block; of the other stages' blocks it keeps the modules, their names
and empty parameters, which do not train here. Cost: one broadcast of the model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from somaspeed_patch import sites
from somaspeed_patch.layouts import families, pipeline_refusals, stages
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.layouts.partition import split
from somaspeed_patch.layouts.shard import same_everywhere
from somaspeed_patch.layouts.stages import Owned, Pipeline, Place
from somaspeed_patch.layouts.transfer import Line, Link

log = logging.getLogger(__name__)

SITE = "layouts/pipeline"
_TRAINS = 4  # a number that trains: itself, its gradient and two moments; its forward and twice that backward


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Blocks that run one after the other."""

    name: str
    blocks: Sequence[tuple[str, nn.Module]]
    owners: Sequence[int]
    """the stage of each"""


def cut(model: nn.Module, family: Family, axes: DeviceMesh) -> None:
    """Leave this rank its stage of `model`, in place; `stages` and `pipeline_step` do the rest. Collective.

    Args:
        axes: as `mesh.build` makes it, its pp axis longer than one.

    Raises: ValueError: the model, its settings or the mesh do not go through a pipeline.
    """
    count = axes["pp"].size()
    stacks = _stacks(model, family, count)
    why = pipeline_refusals.of(model, family.name, axes["tp"].size()) or _shared(model, stacks)
    if why is not None:
        raise ValueError(f"layout: pp={count}: {why}")
    same_everywhere(model)
    line = _line(model, axes)
    whole = _bytes(model)
    pipeline = Pipeline(line=line)
    for stack in stacks:
        _place(stack, line)
        for (name, block), owner in zip(stack.blocks, stack.owners, strict=True):
            pipeline.owned.update(_owned(name, block, owner))
            if owner != line.stage:
                _empty(block)
                stages.refuse_calls(block, name, owner)
    stages.attach(model, pipeline)
    _report(stacks, line, _bytes(model), whole)


def _stacks(model: nn.Module, family: Family, count: int) -> list[_Stack]:
    """The family's stacks with the stages of their blocks; stacks side by side are cut at the same index."""
    rows = [[list(families.modules(model, (pattern,))) for pattern in beside] for beside in family.stacks]
    weights = [
        sum(_weight(block) for _, block in blocks) for row in rows for blocks in zip(*row, strict=True)
    ]
    owners = split(weights, count, f"{family.name}'s {', then '.join(map(' with '.join, family.stacks))}")
    found: list[_Stack] = []
    for beside, row in zip(family.stacks, rows, strict=True):
        mine, owners = owners[: len(row[0])], owners[len(row[0]) :]
        found += [
            _Stack(name=name, blocks=blocks, owners=mine) for name, blocks in zip(beside, row, strict=True)
        ]
    return found


def _weight(block: nn.Module) -> int:
    return sum(p.numel() * (_TRAINS if p.requires_grad else 1) for p in block.parameters())


def _shared(model: nn.Module, stacks: Iterable[_Stack]) -> str | None:
    """Why a parameter cannot be left to one stage, or None."""
    homes = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for stack in stacks:
        for name, block in stack.blocks:
            inside = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
            if any(homes[key] > number for key, number in inside.items()):
                return f"{name} shares a parameter with another part of the model; untie them"
    return None


def _line(model: nn.Module, axes: DeviceMesh) -> Line:
    group = axes["pp"].get_group()
    return Line(
        group=group,
        ranks=tuple(dist.get_process_group_ranks(group)),
        stage=axes["pp"].get_local_rank(),
        device=next(model.parameters()).device,
    )


def _place(stack: _Stack, line: Line) -> None:
    draws = any(_draws(module) for _, block in stack.blocks for module in block.modules())
    last = len(stack.blocks) - 1
    for index, ((_, block), owner) in enumerate(zip(stack.blocks, stack.owners, strict=True)):
        begins = index > 0 and stack.owners[index - 1] != owner
        stages.put(
            block,
            Place(
                line=line,
                owner=owner,
                cut=Link(line, owner - 1, to_all=False) if begins else None,
                end=Link(line, owner, to_all=True) if index == last else None,
                draws=draws,
            ),
        )


def _draws(module: nn.Module) -> bool:
    """Whether it has dropout, as a module or as a number."""
    numbers = (value for name, value in vars(module).items() if "drop" in name)
    return (isinstance(module, nn.Dropout) and module.p > 0) or any(
        isinstance(value, float) and value > 0 for value in numbers
    )


def _owned(name: str, block: nn.Module, owner: int) -> dict[str, Owned]:
    return {
        f"{name}.{inner}": Owned(stage=owner, shape=tuple(p.shape), dtype=p.dtype)
        for inner, p in block.named_parameters(remove_duplicate=False)
    }


def _empty(block: nn.Module) -> None:
    """Give its parameters' memory back; dtype and device stay, which hosts ask for."""
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _report(stacks: Iterable[_Stack], line: Line, held: int, whole: int) -> None:
    sizes = "; ".join(f"{stack.name} {_counts(stack, len(line.ranks))}" for stack in stacks)
    site = sites.site(SITE)
    site.status = sites.PATCHED
    site.ran()
    site.reason = (
        f"stage {line.stage} of {len(line.ranks)}: {held} of {whole} bytes of parameters; "
        f"blocks a stage: {sizes}"
    )
    log.info("layout: %s", site.reason)


def _counts(stack: _Stack, count: int) -> str:
    return " + ".join(str(list(stack.owners).count(stage)) for stage in range(count))
