"""The layouts that make sense on a number of GPUs, what a rank of each needs, and which to take.

Memory of a rank, in bytes: parameters (the frozen ones with the copies that autocast's cast leaves), Adam's
two moments in the parameters' dtype, what is gathered for a moment, and the larger of gradients and
activations: one grows while the other is freed. The fp32 weights that autocast casts count as activations:
the products keep the bf16 copies, whole under FSDP2, too. Parameters that no step computes get neither
gradient nor moments. Of a pipeline the fullest stage is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from somaspeed_patch.layouts.layout import Layout
from somaspeed_patch.layouts_plan import cuts, sizes, traffic
from somaspeed_patch.layouts_plan.activations import Kept
from somaspeed_patch.layouts_plan.sizes import Census, Unit, Weight
from somaspeed_patch.layouts_plan.traffic import Traffic

GIB = 2**30
WORKSPACE = 64 * 2**20  # cuBLAS on Hopper: 32 MiB for each of two threads, the main one and autograd's
CONTEXT = 0.6 * GIB  # assumed: CUDA's context with torch's kernels, outside torch's allocator
NCCL = 0.5 * GIB  # assumed: its buffers, from two ranks on, outside torch's allocator
FRAGMENTS = 0.05  # assumed: part of the peak that the allocator holds unused
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of rank 0, the fullest."""

    trainable: float
    """parameters that learn"""
    frozen: float
    """those that do not, with their bf16 copies"""
    gradients: float
    """with DistributedDataParallel's buckets"""
    optimizer: float
    """Adam's two moments"""
    gathered: float
    """units while they run, and their gradients before they are scattered"""
    casts: float
    """bf16 copies of trainable fp32 weights, from the forward to the backward"""
    activations: float
    """of the batch"""
    each: float
    """of one sample"""
    ranks: int
    """of the layout"""

    @property
    def peak(self) -> float:
        """What torch.cuda.max_memory_allocated() would say."""
        held = self.trainable + self.frozen + self.optimizer + self.gathered
        return held + max(self.casts + self.activations, self.gradients) + WORKSPACE

    @property
    def needed(self) -> float:
        """What the device must have: the peak with reserve."""
        return self.peak * (1 + FRAGMENTS) + CONTEXT + (NCCL if self.ranks > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout."""

    name: str
    """short"""
    layout: Layout
    """to be given as the feature `layout`"""
    memory: Memory
    """of a rank"""
    traffic: Traffic
    """of a rank and step"""
    samples: int
    """of all replicas, a step"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for all layouts."""

    census: Census
    """of the model"""
    kept: Kept
    """of a sample"""
    batch: int
    """samples a replica"""
    autocast: bool
    """whether the forward runs under autocast to bf16"""
    reshard: str = "default"
    """as in Layout"""


def layouts(gpus: int, tp_width: int, blocks: int, reshard: str = "default") -> Iterator[tuple[str, Layout]]:
    """Short name and layout of all that are compared, the simplest first; beside tp and pp FSDP2 alone.

    Args:
        tp_width: see Census.
        blocks: how many a pipeline can cut; with pp the frozen parameters must be whole.
    """
    yield ("ddp" if gpus > 1 else "one process"), Layout(dp_replicate=gpus)
    for shard in reversed(_divisors(gpus)[1:]):
        name = f"fsdp2 {shard}" if shard == gpus else f"hsdp {gpus // shard}x{shard}"
        yield from _frozen_ways(name, Layout(dp_replicate=gpus // shard, dp_shard=shard, reshard=reshard))
    for tp in _divisors(gpus)[1:]:
        if tp_width % tp == 0:
            name = _beside(f"tp {tp}", gpus // tp)
            yield from _frozen_ways(name, Layout(dp_shard=gpus // tp, tp=tp, reshard=reshard))
    for pp in _divisors(gpus)[1:]:
        if pp <= blocks:
            name = _beside(f"pp {pp}", gpus // pp)
            yield f"{name} whole", Layout(dp_shard=gpus // pp, pp=pp, reshard=reshard)


def _beside(name: str, shards: int) -> str:
    return name if shards == 1 else f"{name}, fsdp2 {shards}"


def _frozen_ways(name: str, layout: Layout) -> Iterator[tuple[str, Layout]]:
    for frozen in ("whole", "sharded") if layout.dp_shard > 1 else ("whole",):
        yield f"{name} {frozen}", replace(layout, frozen=frozen)


def rows(settings: Settings, gpus: int) -> list[Row]:
    """What each layout needs.

    Raises: ValueError: no GPUs, or no samples.
    """
    for name, value in (("gpus", gpus), ("batch", settings.batch)):
        if value < 1:
            raise ValueError(f"layout plan: {name} must be at least 1, but is {value}")
    return [
        _row(settings, name, layout)
        for name, layout in layouts(
            gpus, settings.census.tp_width, _blocks(settings.census), settings.reshard
        )
    ]


def best(found: list[Row], gib: float) -> Row | None:
    """Of those that fit the one that sends least a sample, the first of equals; None: none fits.

    A pipeline last: its stages wait for each other, so they compute no faster than one GPU.
    """
    fitting = [row for row in found if fits(row, gib)]
    return min(fitting, key=lambda row: (row.layout.pp > 1, row.traffic.total / row.samples), default=None)


def fits(row: Row, gib: float) -> bool:
    """Whether a device of so many GiB has what a rank needs."""
    return row.memory.needed <= gib * GIB


def largest_batch(row: Row, gib: float) -> int:
    """Samples a replica that would fit; 0: not even one."""
    memory = row.memory
    room = (gib * GIB - CONTEXT - (NCCL if memory.ranks > 1 else 0)) / (1 + FRAGMENTS)
    held = memory.peak - max(memory.casts + memory.activations, memory.gradients)
    if held + memory.gradients > room:
        return 0
    return max(0, int((room - held - memory.casts) / memory.each))


def _blocks(census: Census) -> int:
    return len({unit.block for unit in census.units} - {None})


def _row(settings: Settings, name: str, layout: Layout) -> Row:
    """The fullest stage of the layout."""
    found = []
    for stage in cuts.stages(settings.census, layout.pp):
        own = replace(settings, census=stage.census)
        memory = _memory(own, layout, settings.kept.peak(1, layout.tp, stage.shares))
        found.append((memory, traffic.of(stage.census, layout, settings.kept, settings.batch)))
    memory, sent = max(found, key=lambda pair: pair[0].peak)
    samples = settings.batch * layout.dp_replicate * layout.dp_shard
    return Row(name=name, layout=layout, memory=memory, traffic=sent, samples=samples)


def _memory(settings: Settings, layout: Layout, each: float) -> Memory:
    units, shards, tp = settings.census.units, layout.dp_shard, layout.tp
    learning = [weight for unit in units for weight in unit.of(trains=True)]
    running = [weight for unit in units if unit.runs for weight in unit.of(trains=True)]
    gradients = sizes.stored(running, shards, tp)
    ddp = not layout.shards
    return Memory(
        trainable=sizes.stored(learning, shards, tp),
        frozen=_frozen(settings, layout),
        gradients=gradients + (sizes.stored(learning) if ddp else 0),
        optimizer=2 * gradients,
        gathered=_gathered(units, layout) if shards > 1 else 0,
        casts=sizes.cast(running, tp) if settings.autocast else 0,
        activations=settings.batch * each,
        each=each,
        ranks=layout.ranks,
    )


def _frozen(settings: Settings, layout: Layout) -> int:
    frozen = [weight for unit in settings.census.units for weight in unit.of(trains=False)]
    if layout.frozen == "sharded":  # a copy would be whole: autocast casts at every use instead
        return sizes.stored(frozen, layout.dp_shard, layout.tp)
    copies = sizes.cast(frozen, layout.tp) if settings.autocast else 0
    return sizes.stored(frozen, 1, layout.tp) + copies


def _gathered(units: tuple[Unit, ...], layout: Layout) -> int:
    """The root, whole all the time; the unit that runs and the next one; gradients that are being scattered.

    The next one is there twice: as it was received, in one piece, and as parameters.
    """
    whole = [(unit, _whole(traffic.gatherable(unit, layout), layout)) for unit in units if unit.runs]
    root = sum(size for unit, size in whole if unit.name == sizes.ROOT)
    others = [(unit, size) for unit, size in whole if unit.name != sizes.ROOT]
    largest = max((size for _, size in others), default=0)
    if layout.reshard == "never":
        return root + sum(size for _, size in others) + largest + _scattered(units, layout)
    pairs = [a + 2 * b for (one, a), (two, b) in pairwise(others) if one.stack == two.stack]
    return root + max([2 * largest, *pairs]) + _scattered(units, layout)


def _scattered(units: tuple[Unit, ...], layout: Layout) -> int:
    """Whole gradients of the root and of one unit, and the fp32 buffer that one of them is scattered from."""
    sent = [(unit, unit.of(trains=True)) for unit in units if unit.runs and unit.of(trains=True)]
    buffers = [_FP32 * layout.dp_shard * _numbers(weights, layout) for _, weights in sent]
    own = {unit.name: _whole(weights, layout) for unit, weights in sent}
    root = own.pop(sizes.ROOT, 0)
    return root + max(own.values(), default=0) + max(buffers, default=0)


def _numbers(weights: tuple[Weight, ...], layout: Layout) -> int:
    return sum(weight.numbers(layout.dp_shard, layout.tp) for weight in weights)


def _whole(weights: tuple[Weight, ...], layout: Layout) -> int:
    """Bytes of all shards of a unit, with their padding."""
    return layout.dp_shard * sizes.stored(weights, layout.dp_shard, layout.tp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
