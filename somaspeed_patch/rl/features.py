"""What the trainable part of a policy reads of an observation, computed once by the frozen part.

Shapes: B samples, N tokens of the longest of them, L layers. A record is one sample's, on the CPU, without
its padding; a batch is many of them side by side, each sample's valid tokens first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from somaspeed_patch import facts


@dataclass(frozen=True, kw_only=True)
class Tag:
    """What a record holds for; records with other tags are refused."""

    model: str
    """the family, and what of its configuration decides the features' layout"""
    backbone: str
    """digest of the frozen weights, see `digest`"""
    augmentation: str = "none"
    """of the observation: only `none` can be computed once and trained on again"""

    def check(self, other: Tag, where: str) -> None:
        """Raises: ValueError: the other tag is not this one, in words."""
        for name in ("model", "backbone", "augmentation"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"{where}: cached features are of {name} {theirs}, but here it is {mine}; "
                    "encode the observations again"
                )


@dataclass(frozen=True, kw_only=True)
class Features:
    """Of a batch, on one device."""

    tokens: Mapping[str, Tensor]
    """[L, B, N, ...] each: a value of every token and layer; valid tokens come first"""
    length: Tensor
    """[B] int32, valid tokens of each sample"""
    fixed: Mapping[str, Tensor]
    """[B, ...] each: a value of every sample"""

    def __post_init__(self) -> None:
        if self.length.ndim != 1 or any(len(each) != len(self.length) for each in self.fixed.values()):
            raise ValueError("features: `length` and `fixed` must have one entry a sample")
        if any(each.shape[1] != len(self.length) for each in self.tokens.values()):
            raise ValueError("features: `tokens` must be [L, B, N, ...] with one B for all")

    @property
    def tokens_per_sample(self) -> int:
        """N."""
        return next((each.shape[2] for each in self.tokens.values()), 0)

    def records(self, tag: Tag) -> list[Record]:
        """Each sample by itself, copied to the CPU without its padding."""
        tokens = {name: each.cpu() for name, each in self.tokens.items()}
        fixed = {name: each.cpu() for name, each in self.fixed.items()}
        return [
            Record(
                tokens={name: each[:, i, :size].clone() for name, each in tokens.items()},
                fixed={name: each[i].clone() for name, each in fixed.items()},
                tag=tag,
            )
            for i, size in enumerate(self.length.tolist())
        ]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of one sample, on the CPU."""

    tokens: Mapping[str, Tensor]
    """[L, n, ...] each"""
    fixed: Mapping[str, Tensor]
    """[...] each"""
    tag: Tag

    @property
    def length(self) -> int:
        """n."""
        return next((each.shape[1] for each in self.tokens.values()), 0)

    @property
    def bytes(self) -> int:
        """What it takes to keep."""
        return sum(each.nbytes for each in (*self.tokens.values(), *self.fixed.values()))


def batch(records: Sequence[Record], tag: Tag, *, tokens: int | None = None) -> Features:
    """Records side by side, on the CPU.

    Args:
        tag: what they must be of.
        tokens: N, at least the longest; None: the longest. A fixed one keeps shapes, and so compiled graphs
            and the last bits of a sum, independent of which records meet.
    Raises: ValueError: there is none, one is of another tag, layout or longer than `tokens`.
    """
    if not records:
        raise ValueError("features: a batch needs at least one record")
    longest = max(record.length for record in records)
    if tokens is not None and longest > tokens:
        raise ValueError(f"features: a record has {longest} tokens, more than the {tokens} of a batch")
    first = records[0]
    for record in records:
        tag.check(record.tag, "features")
        _check_layout(record, first)
    return Features(
        tokens={name: _side_by_side(records, name, tokens or longest) for name in first.tokens},
        length=torch.tensor([record.length for record in records], dtype=torch.int32),
        fixed={name: torch.stack([record.fixed[name] for record in records]) for name in first.fixed},
    )


def _side_by_side(records: Sequence[Record], name: str, size: int) -> Tensor:
    """[L, B, N, ...], zeros behind each sample's tokens: garbage there could be NaN."""
    like = records[0].tokens[name]
    found = like.new_zeros(like.shape[0], len(records), size, *like.shape[2:])
    for index, record in enumerate(records):
        found[:, index, : record.length] = record.tokens[name]
    return found


def _check_layout(record: Record, first: Record) -> None:
    for kind in ("tokens", "fixed"):
        mine, other = getattr(record, kind), getattr(first, kind)
        if mine.keys() != other.keys() or any(mine[name].dtype != other[name].dtype for name in mine):
            raise ValueError(f"features: records differ in their {kind}: {_shown(mine)} and {_shown(other)}")


def _shown(values: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {each.dtype}" for name, each in values.items()) or "none"


def moved(found: Features, device: torch.device, *, non_blocking: bool = False) -> Features:
    """The same on another device; masks and lengths keep a twin on the CPU, which no step has to wait for."""

    def move(each: Tensor) -> Tensor:
        there = each.to(device, non_blocking=non_blocking)
        facts.moved(each, there)
        return there

    return Features(
        tokens={name: move(each) for name, each in found.tokens.items()},
        length=move(found.length),
        fixed={name: move(each) for name, each in found.fixed.items()},
    )


def leading(length: Tensor, size: int) -> Tensor:
    """[B, size] bool, True for the first `length` [B] of each sample's tokens."""
    return torch.arange(size, device=length.device) < length[:, None]


def packed(values: Tensor, valid: Tensor) -> Tensor:
    """[L, B, N, ...] with each sample's valid tokens moved to the front, in their order.

    Args:
        values: [L, B, N, ...].
        valid: [B, N] bool.
    """
    order = torch.argsort((~valid).to(torch.uint8), dim=1, stable=True)
    index = order.view(1, *order.shape, *(1,) * (values.ndim - 3)).expand(values.shape)
    return values.gather(2, index)
