"""The processes that train one policy together, and what they tell each other.

R ranks compute what one process would that had played all of their trajectories: advantages are normalised
over all samples, a global batch is one part of each rank's, every sample is trained on `update_epoch` times.
Each rank plays with whole weights of its own and trains on what it has played.

Everything here but the numbers is collective: all ranks call it in the same order, in their main threads. The
rollout's thread says nothing to anybody, so that no rank waits for another one's environments there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from somaspeed_patch.layouts.layout import Layout, parse
from somaspeed_patch.rl import advantages as adv
from somaspeed_patch.rl.samples import Samples
from somaspeed_patch.rl.settings import Settings

T = TypeVar("T")
_BUCKET = 1 << 26  # numbers of gradients that are averaged at once: 256 MiB beside them
_PATIENCE = 1800.0  # s that ranks wait for each other, as gloo does by itself


class Ranks:
    """One process by itself; see `Together` for several."""

    rank: int = 0
    size: int = 1
    layout: Layout = Layout()

    @property
    def sharded(self) -> bool:
        """Whether what trains is split over the ranks; else each has all of it."""
        return self.layout.dp_shard > 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    def each(self, mine: T) -> list[T]:
        """What every rank has given, in their order; picklable."""
        return [mine]

    def first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, where alone it is called.

        Raises: what it raises there; RuntimeError on the other ranks.
        """
        return make()

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Every rank takes over rank 0's numbers, in place."""

    def average(self, parameters: Iterable[Tensor]) -> None:
        """The mean over ranks of every gradient that there is, in fp32; FSDP2 has done so by itself."""

    def share(self, slots: int) -> range:
        """Which of all slots this rank plays.

        Raises: ValueError: there are fewer than ranks.
        """
        if slots < self.size:
            raise ValueError(f"env.slots: {slots} slots cannot be dealt to {self.size} ranks; start fewer")
        return share(slots, self.rank, self.size)

    def leave(self) -> None:
        """The run is over."""


class Together(Ranks):
    """Several processes, over torch's default process group."""

    def __init__(self, layout: Layout) -> None:
        """Take a layout of all ranks."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.layout = layout.on(self.size)

    def each(self, mine: T) -> list[T]:
        """See `Ranks`."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def first(self, make: Callable[[], T]) -> T:
        """See `Ranks`."""
        told: list[Any] = [None, None]
        error = None
        if self.leads:
            try:
                told[0] = make()
            except Exception as raised:  # the others wait for an answer
                error, told[1] = raised, f"rank 0: {type(raised).__name__}: {raised}"
        dist.broadcast_object_list(told, src=0)
        if error is not None:
            raise error
        if told[1] is not None:
            raise RuntimeError(told[1])
        found: T = told[0]
        return found

    @torch.no_grad()
    def same(self, tensors: Iterable[Tensor]) -> None:
        """See `Ranks`."""
        for each in tensors:
            dist.broadcast(each.detach(), src=0)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """See `Ranks`."""
        if self.sharded:
            return
        for bucket in _buckets([each.grad for each in parameters if each.grad is not None]):
            flat = torch.cat([each.reshape(-1).float() for each in bucket])
            dist.all_reduce(flat)
            flat /= self.size
            means = torch.split(flat, [each.numel() for each in bucket])
            for grad, mean in zip(bucket, means, strict=True):
                grad.copy_(mean.view_as(grad))

    def leave(self) -> None:
        """See `Ranks`."""
        dist.barrier()
        dist.destroy_process_group()


def joined(text: str | None, *, cpu: bool = False, patience: float = _PATIENCE) -> Ranks:
    """The ranks that a launcher has started (torchrun, accelerate launch), or this process alone.

    Args:
        text: of a layout; None: each rank has all weights.
        cpu: compute on CPUs, whatever there is.
        patience: seconds that ranks wait for each other; less than `_PATIENCE` is not waited.
    Raises: ValueError: the layout is none, is of another number of ranks, or cannot be trained under here.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = checked(text).on(size) if text else Layout(dp_replicate=size)
    if size == 1:
        return Ranks()
    gpus = torch.cuda.is_available() and not cpu
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        limit = timedelta(seconds=max(patience, _PATIENCE))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=limit)
    return Together(layout)


def checked(text: str) -> Layout:
    """A layout that a learner can be spread by.

    Raises: ValueError: it is none, or has what is not for here; says what to do.
    """
    layout = parse(text)
    for axis in ("tp", "pp"):
        if getattr(layout, axis) > 1:
            raise ValueError(
                f"layout: {axis}={getattr(layout, axis)}: RL trains over dp_shard and dp_replicate only; "
                f"use {axis}=1"
            )
    if layout.frozen != "whole":
        raise ValueError(
            f"layout: frozen={layout.frozen}: each rank acts with a whole policy, whose frozen weights the "
            "learner shares; use frozen=whole"
        )
    return layout


def share(slots: int, number: int, of: int) -> range:
    """One of several shares of all slots; they differ by a slot at most, the first ones are larger."""
    size, more = divmod(slots, of)
    begin = number * size + min(number, more)
    return range(begin, begin + size + (number < more))


@dataclass(frozen=True, kw_only=True)
class Union:
    """The samples of all ranks, one rank's behind the other's: N."""

    counts: tuple[int, ...]
    """of each rank"""
    rank: int
    """this one's number"""
    advantages: Tensor
    """[N] fp32, not normalised"""
    values: Tensor
    """[N] fp32"""
    returns: Tensor
    """[N] fp32"""
    version: Tensor
    """[N] int64"""
    weights: Tensor
    """[N] fp32 with mean 1"""

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def mine(self) -> slice:
        """Where this rank's are."""
        begin = sum(self.counts[: self.rank])
        return slice(begin, begin + self.counts[self.rank])

    def rounds(self, size: int) -> int:
        """How many parts of a size the samples of the rank with the most make."""
        return -(-max(self.counts) // size)


def union(ranks: Ranks, found: Samples, *, equal_weight: bool) -> Union:
    """What is computed over all ranks' samples.

    Args: equal_weight: see `samples.collate`.
    """
    names = ("advantages", "values", "returns", "version", "trajectory", "weights")
    told = ranks.each({name: getattr(found, name) for name in names})
    every = {name: torch.cat([each[name] for each in told]) for name in names if name != "trajectory"}
    if equal_weight and len(told) > 1:  # a rank's have mean 1 over its own
        every["weights"] = adv.trajectory_weights(_numbered([each["trajectory"] for each in told]))
    return Union(counts=tuple(len(each["values"]) for each in told), rank=ranks.rank, **every)


def _numbered(trajectories: Sequence[Tensor]) -> Tensor:
    """[N] int64: those of one rank are none of another's."""
    begin, found = 0, []
    for each in trajectories:
        found.append(each + begin)
        begin += int(each.max()) + 1
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A microbatch of a rank's samples."""

    index: Tensor
    """[b] int64, which of them"""
    share: float
    """of the step's loss, times the number of ranks: gradients are averaged over them"""


def dealt(order: Tensor, counts: Sequence[int], rank: int, settings: Settings) -> Iterator[list[Part]]:
    """A rank's microbatches of each optimizer step of an epoch, the same number on every rank.

    Args:
        order: [n] int64, the rank's samples in the order they are trained on.
        counts: n of each rank.
    """
    begin = 0
    for sizes in turns(counts, settings.global_batch):
        mine = order[begin : begin + sizes[rank]]
        begin += sizes[rank]
        parts = [
            Part(index=each, share=len(counts) * (len(each) / sum(sizes)))
            for each in (torch.split(mine, settings.micro_batch) if len(mine) else ())
        ]
        # who has none left computes one that weighs nothing: the others' gathers wait for it
        idle = Part(index=order[:1], share=0.0)
        most = -(-max(sizes) // settings.micro_batch)
        yield [*parts, *[idle] * (most - len(parts))]


def turns(counts: Sequence[int], global_batch: int) -> list[list[int]]:
    """How many samples of each rank are in each optimizer step: together `global_batch`, the last one less.

    Each rank's samples are spread evenly over the epoch: its part of a step is within one sample of its part
    of all.
    """
    places = torch.cat([(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in counts])
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    in_turn = owners[torch.argsort(places, stable=True)]
    return [part.bincount(minlength=len(counts)).tolist() for part in torch.split(in_turn, global_batch)]


def mean(ranks: Ranks, metrics: Mapping[str, float]) -> dict[str, float]:
    """Of each rank's metrics, which all have the same ones."""
    told = ranks.each(dict(metrics))
    if len(told) == 1:
        return told[0]
    return {name: sum(each[name] for each in told) / len(told) for name in metrics}


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors one behind the other, cut where `_BUCKET` numbers are full."""
    bucket: list[Tensor] = []
    for each in tensors:
        if bucket and sum(one.numel() for one in (*bucket, each)) > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(each)
    if bucket:
        yield bucket
