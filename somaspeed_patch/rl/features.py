"""What the trainable part of a policy reads of an observation, computed once by the frozen part.

Shapes: B samples, N tokens of the longest of them, L layers. A record is one sample's, on the CPU, without
its padding; a batch is many of them side by side, each sample's valid tokens first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name: what a graph has to be given."""
        return {
            **{f"tokens/{name}": each for name, each in self.tokens.items()},
            **{f"fixed/{name}": each for name, each in self.fixed.items()},
            "length": self.length,
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Features:
        """What `tensors` gave, among others."""
        return cls(tokens=below("tokens/", tensors), length=tensors["length"], fixed=below("fixed/", tensors))

    def padded(self, rows: int, tokens: int) -> Features:
        """With more samples, copies of the last one, and with more tokens, zeros that are not valid."""
        more, size = rows - len(self.length), self.tokens_per_sample
        if more < 0 or (self.tokens and tokens < size):
            raise ValueError(f"features: {len(self.length)} samples of {size} tokens are not padded by less")
        return Features(
            tokens={n: _longer(repeated(each, rows, 1), tokens) for n, each in self.tokens.items()},
            length=repeated(self.length, rows),
            fixed={name: repeated(each, rows) for name, each in self.fixed.items()},
        )

    def first(self, count: int) -> Features:
        """The first samples."""
        return Features(
            tokens={name: each[:, :count] for name, each in self.tokens.items()},
            length=self.length[:count],
            fixed={name: each[:count] for name, each in self.fixed.items()},
        )

    def records(self, tag: Tag) -> list[Record]:
        """Each sample by itself, copied to the CPU without its padding."""
        tokens = {name: each.cpu() for name, each in self.tokens.items()}
        fixed = {name: each.cpu() for name, each in self.fixed.items()}
        there = Features(tokens=tokens, length=self.length, fixed=fixed)
        return [each.copied(torch.Tensor.clone) for each in there.views(tag)]

    def views(self, tag: Tag) -> list[Record]:
        """Each sample by itself without its padding, where it is; not copied."""
        return [
            Record(
                tokens={name: each[:, i, :size] for name, each in self.tokens.items()},
                fixed={name: each[i] for name, each in self.fixed.items()},
                tag=tag,
            )
            for i, size in enumerate(self.length.tolist())
        ]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of one sample, on one device."""

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

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Record:
        """The same of copies."""
        return Record(
            tokens={name: copy(each) for name, each in self.tokens.items()},
            fixed={name: copy(each) for name, each in self.fixed.items()},
            tag=self.tag,
        )


def batch(
    records: Sequence[Record], tag: Tag, *, tokens: int | None = None, device: torch.device | None = None
) -> Features:
    """Records side by side.

    Args:
        tag: what they must be of.
        tokens: N, at least the longest; None: the longest. A fixed one keeps shapes, and so compiled graphs
            and the last bits of a sum, independent of which records meet.
        device: where to; None: where the first is. What is pinned is copied without waiting for it.
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
    length = torch.tensor([record.length for record in records], dtype=torch.int32)
    if device is None and first.tokens:
        device = next(iter(first.tokens.values())).device
    return Features(
        tokens={name: _side_by_side(records, name, tokens or longest, device) for name in first.tokens},
        length=_moved(length, device),
        fixed={n: _moved(torch.stack([each.fixed[n] for each in records]), device) for n in first.fixed},
    )


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def repeated(values: Tensor, rows: int, dim: int = 0) -> Tensor:
    """With copies of the last row behind, so that there are `rows`; as it is where there are that many."""
    if values.shape[dim] == rows:
        return values
    index = torch.arange(rows, device=values.device).clamp(max=values.shape[dim] - 1)
    return values.index_select(dim, index)


def _longer(values: Tensor, tokens: int) -> Tensor:
    """[L, B, tokens, ...], zeros at the end."""
    if values.shape[2] == tokens:
        return values
    more = values.new_zeros(*values.shape[:2], tokens - values.shape[2], *values.shape[3:])
    return torch.cat([values, more], dim=2)


def _side_by_side(records: Sequence[Record], name: str, size: int, device: torch.device | None) -> Tensor:
    """[L, B, N, ...], zeros behind each sample's tokens: garbage there could be NaN.

    In memory a sample's layers lie together, as in a record: one copy each, with nothing in between.
    """
    parts = [record.tokens[name] for record in records]
    like = parts[0]
    full = all(each.shape[1] == size for each in parts)
    if full and like.device == device:
        return torch.stack(parts).transpose(0, 1)
    new = like.new_empty if full else like.new_zeros
    found = new((len(parts), like.shape[0], size, *like.shape[2:]), device=device)
    for place, each in zip(found.unbind(), parts, strict=True):
        (place if each.shape[1] == size else place[:, : each.shape[1]]).copy_(each, non_blocking=True)
    return found.transpose(0, 1)


def _moved(values: Tensor, device: torch.device | None) -> Tensor:
    """On another device; masks and lengths keep a twin on the CPU, which no step has to wait for."""
    if device is None:
        return values
    locked = device.type == "cuda" and values.device.type == "cpu"  # else this would wait for earlier copies
    there = (values.pin_memory() if locked else values).to(device, non_blocking=True)
    facts.moved(values, there)
    return there


def _check_layout(record: Record, first: Record) -> None:
    for kind in ("tokens", "fixed"):
        mine, other = getattr(record, kind), getattr(first, kind)
        if mine.keys() != other.keys() or any(mine[name].dtype != other[name].dtype for name in mine):
            raise ValueError(f"features: records differ in their {kind}: {_shown(mine)} and {_shown(other)}")


def _shown(values: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {each.dtype}" for name, each in values.items()) or "none"


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
