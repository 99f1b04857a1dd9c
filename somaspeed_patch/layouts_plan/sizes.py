"""The parameters of a model, unit by unit, and how much of each a rank holds.

Units are those of `layouts.families`, in the order of the model; what no unit holds is the root. A unit's
parts of a rarer dtype, which FSDP2 gathers apart, are counted with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from somaspeed_patch.layouts import families, tp_plans
from somaspeed_patch.layouts.families import Family

ROOT = "root"
_HALF = 2  # bytes of a bf16 number
_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter."""

    shape: tuple[int, ...]
    itemsize: int
    """bytes of a number"""
    trains: bool
    """whether it learns"""
    castable: bool
    """fp32, and of a module whose weights autocast casts to bf16"""
    split: int | None
    """the dimension that tensor parallelism splits; None: whole on every rank"""

    def numbers(self, shards: int = 1, tp: int = 1) -> int:
        """How many numbers of it rank 0 holds: FSDP2 pads the first dimension to whole shards."""
        shape = list(self.shape or (1,))
        if self.split is not None:
            shape[self.split] = -(-shape[self.split] // tp)
        return -(-shape[0] // shards) * math.prod(shape[1:])


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered together."""

    name: str
    """the module's; ROOT for what no unit holds"""
    weights: tuple[Weight, ...]
    runs: bool
    """whether a training step computes it; the parameters of one that does not get no gradient"""
    block: tuple[int, int] | None = None
    """its place in the family's `stacks`, which one and where; None: every stage of a pipeline has it"""

    @property
    def stack(self) -> str:
        """Its name without its place among its like: units of one stack run one after the other."""
        return self.name.rstrip("0123456789")

    def of(self, *, trains: bool) -> tuple[Weight, ...]:
        """Its trainable parameters, or its frozen ones."""
        return tuple(weight for weight in self.weights if weight.trains is trains)


@dataclass(frozen=True, kw_only=True)
class Census:
    """All parameters of a model."""

    family: str
    """its name in `layouts.families`"""
    units: tuple[Unit, ...]
    """the root is the last"""
    tp_width: int
    """tensor parallelism over n ranks needs n to divide this; 1: the family has none"""

    def numbers(self, *, trains: bool) -> int:
        """How many numbers its trainable parameters have, or its frozen ones."""
        return sum(weight.numbers() for unit in self.units for weight in unit.of(trains=trains))


def stored(weights: Iterable[Weight], shards: int = 1, tp: int = 1) -> int:
    """Bytes of a rank's shards."""
    return sum(weight.numbers(shards, tp) * weight.itemsize for weight in weights)


def cast(weights: Iterable[Weight], tp: int = 1) -> int:
    """Bytes of the bf16 copies that autocast makes; whole, for a product keeps what it multiplied with."""
    return sum(weight.numbers(1, tp) * _HALF for weight in weights if weight.castable)


def take(model: nn.Module) -> Census:
    """The census of a model, on any device.

    Raises: ValueError: its family is not known.
    """
    family = families.of(model)
    if family is None:
        known = ", ".join(entry.name for entry in families.FAMILIES)
        raise ValueError(f"layout plan: {type(model).__name__} is none of the models with units ({known})")
    splits, width = _splits(model, family)
    weights, blocks = _weights(model, splits), _blocks(model, family)
    units: list[Unit] = []
    for pattern in (*family.called_alone, *family.never_run, *family.units):
        for name, module in families.modules(model, (pattern,)):
            units.extend(_unit(name, module, weights, pattern not in family.never_run, blocks))
    units.extend(_unit(ROOT, model, weights, True, blocks))
    return Census(family=family.name, units=tuple(units), tp_width=width)


def _unit(
    name: str, module: nn.Module, left: dict[int, Weight], runs: bool, blocks: Mapping[str, tuple[int, int]]
) -> Iterator[Unit]:
    """A unit of those of the module's parameters that no earlier one took."""
    mine = tuple(left.pop(id(p)) for p in module.parameters() if id(p) in left)
    if mine:
        yield Unit(name=name, weights=mine, runs=runs, block=blocks.get(name))


def _blocks(model: nn.Module, family: Family) -> dict[str, tuple[int, int]]:
    """Of each block that a pipeline cuts: its stack, and its index in it."""
    return {
        name: (row, index)
        for row, beside in enumerate(family.stacks)
        for pattern in beside
        for index, (name, _) in enumerate(families.modules(model, (pattern,)))
    }


def _weights(model: nn.Module, splits: dict[int, int]) -> dict[int, Weight]:
    """Every parameter once, by its id."""
    found: dict[int, Weight] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(
                id(parameter),
                Weight(
                    shape=tuple(parameter.shape),
                    itemsize=parameter.itemsize,
                    trains=parameter.requires_grad,
                    castable=parameter.dtype == torch.float32 and isinstance(module, _CAST_BY_AUTOCAST),
                    split=splits.get(id(parameter)),
                ),
            )
    return found


def _splits(model: nn.Module, family: Family) -> tuple[dict[int, int], int]:
    """What tensor parallelism splits: ids of parameters with the dimension, and the common width."""
    splits: dict[int, int] = {}
    widths: list[int] = []
    for part in tp_plans.PLANS.get(family.name, ()):
        for _, module in families.modules(model, (part.modules,)):
            for name in part.columns:
                splits |= {id(p): 0 for p in module.get_submodule(name).parameters()}
            for name in part.rows:
                splits |= {id(p): 1 for p in module.get_submodule(name).parameters() if p.ndim > 1}
            widths.append(_width(module, part))
    return splits, math.gcd(*widths) if widths else 1


def _width(module: nn.Module, part: tp_plans.Part) -> int:
    """How many equal things of a module the ranks share: heads, or the inner width."""
    if part.heads is not None:
        return int(getattr(module, part.heads))
    first: Any = module.get_submodule(part.columns[0])
    outputs = int(first.out_features)
    return outputs if part.head_size is None else outputs // int(getattr(module, part.head_size))
