"""The stages of a pipeline, as `layouts.pipeline` cuts the model: who has which blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from somaspeed_patch.layouts.partition import split
from somaspeed_patch.layouts_plan.sizes import Census

_TRAINS = 4  # as in `layouts.pipeline`: a number that trains weighs as much as four frozen ones


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage has."""

    census: Census
    """its blocks, and all that is no block"""
    shares: tuple[float, ...]
    """of each stack the part that is its own"""


def stages(census: Census, count: int) -> list[Stage]:
    """The stages of a pipeline; one: the whole model.

    Raises: ValueError: there are more stages than blocks.
    """
    costs: Counter[tuple[int, int]] = Counter()
    for unit in census.units:
        if unit.block is not None:
            costs[unit.block] += sum(w.numbers() * (_TRAINS if w.trains else 1) for w in unit.weights)
    blocks = sorted(costs)
    owners = split([costs[block] for block in blocks], count, f"{census.family}'s stacks") if blocks else []
    owner = dict(zip(blocks, owners, strict=True))
    return [
        Stage(
            census=replace(
                census, units=tuple(u for u in census.units if u.block is None or owner[u.block] == stage)
            ),
            shares=_shares(owner, stage),
        )
        for stage in range(count)
    ]


def _shares(owner: dict[tuple[int, int], int], stage: int) -> tuple[float, ...]:
    all_, own = (
        Counter(row for row, index in owner if wanted in (None, owner[row, index]))
        for wanted in (None, stage)
    )
    return tuple(own[row] / all_[row] for row in sorted(all_))
