"""Bytes that each rank sends in one training step, and the least time that takes.

Ring algorithms: an all-gather or reduce-scatter over s ranks sends s - 1 shards, an all-reduce over r ranks
2 (r - 1) / r of what it sums. Weights travel in their own dtype, FSDP2's gradients in fp32 (as
`layouts.shard` sets it), DistributedDataParallel's in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from somaspeed_patch.layouts.layout import Layout
from somaspeed_patch.layouts_plan import sizes
from somaspeed_patch.layouts_plan.activations import Kept
from somaspeed_patch.layouts_plan.sizes import Census, Unit

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes a rank and step."""

    gathered: float
    """of weights, all-gathered"""
    reduced: float
    """of gradients, reduce-scattered and all-reduced"""
    states: float
    """of hidden states and their gradients: summed by tensor parallelism, handed on by a pipeline"""

    @property
    def total(self) -> float:
        """All of them."""
        return self.gathered + self.reduced + self.states

    def seconds(self, link_gbs: float) -> float:
        """The least time, if nothing else used the link and nothing waited.

        Args:
            link_gbs: GB/s (10^9 bytes) that a rank sends.
        """
        return self.total / (link_gbs * 1e9)


def of(census: Census, layout: Layout, kept: Kept, batch: int) -> Traffic:
    """The traffic of a layout.

    Args:
        census: of the rank's stage, where there is a pipeline.
        batch: samples a replica.
    """
    # A stage hands on what it computed, and behind a stack its last one sends to all.
    passed = 2 * kept.passed if layout.pp > 1 else 0
    return Traffic(
        gathered=float(sum(_gathered(unit, layout) for unit in census.units)),
        reduced=_ddp(census, layout) if not layout.shards else _fsdp(census, layout),
        states=batch * (_all_reduce(kept.reduced, layout.tp) + passed),
    )


def gatherable(unit: Unit, layout: Layout) -> tuple[sizes.Weight, ...]:
    """What of a unit lies in shards."""
    return unit.weights if layout.frozen == "sharded" else unit.of(trains=True)


def _gathered(unit: Unit, layout: Layout) -> int:
    shards = sizes.stored(gatherable(unit, layout), layout.dp_shard, layout.tp)
    return (layout.dp_shard - 1) * shards * _times(unit, layout)


def _times(unit: Unit, layout: Layout) -> int:
    """How often a unit is gathered: for its forward, and if freed in between for its backward."""
    if not unit.runs:
        return 0
    kept = unit.name == sizes.ROOT or layout.reshard == "never"
    return 1 if kept or not unit.of(trains=True) else 2


def _fsdp(census: Census, layout: Layout) -> float:
    running = [weight for unit in census.units if unit.runs for weight in unit.of(trains=True)]
    shard = _FP32 * sum(weight.numbers(layout.dp_shard, layout.tp) for weight in running)
    shared = [w for unit in census.units if unit.runs and unit.block is None for w in unit.of(trains=True)]
    over_stages = _all_reduce(sizes.stored(shared, layout.dp_shard, layout.tp), layout.pp)
    return (layout.dp_shard - 1) * shard + _all_reduce(shard, layout.dp_replicate) + over_stages


def _ddp(census: Census, layout: Layout) -> float:
    """DistributedDataParallel sums its buckets whole, with zeros for what got no gradient."""
    whole = sizes.stored(weight for unit in census.units for weight in unit.of(trains=True))
    return _all_reduce(whole, layout.dp_replicate)


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size
