"""A layout as the user writes it, and its arithmetic.

    dp_replicate=2,dp_shard=4,frozen=whole,reshard=default

Ranks are numbered with tp fastest, then dp_shard, dp_replicate, pp: what talks most sits closest.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

REST = -1
AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # slowest first
_CHOICES = {
    "reshard": ("default", "always", "never"),
    "frozen": ("whole", "gathered", "sharded"),
    "checkpointing": ("none", "selective", "full"),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout."""

    dp_replicate: int = 1
    """replicas that hold the same shards; 1: none"""
    dp_shard: int = 1
    """ranks over which parameters, gradients and optimizer state are split; -1: all that are left"""
    tp: int = 1
    """ranks over which the heads and the inner width of each layer are split"""
    pp: int = 1
    """ranks that hold successive layers"""
    reshard: str = "default"
    """after a unit's forward: `always` frees it and gathers it again for the backward, `never` keeps it,
    `default` frees all but the root"""
    frozen: str = "whole"
    """frozen parameters: `whole` on every rank and never sent; `gathered` from their shards once, and kept;
    `sharded` and gathered at every use"""
    checkpointing: str = "none"
    """activations of the units that train: `full` computes each unit again in the backward, `selective` every
    other one; frozen ones keep nothing anyhow. `none` leaves it to the host's own option"""

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def shards(self) -> bool:
        """Whether anything is split; without, the host's own data parallelism does it all."""
        return self.dp_replicate == 1 or self.dp_shard > 1 or self.tp > 1 or self.pp > 1

    @property
    def whole(self) -> bool:
        """Whether a rank holds its parameters whole, as one process does: one shard, and no tp."""
        return self.dp_replicate == self.dp_shard == self.tp == 1

    def on(self, ranks: int) -> Layout:
        """The layout for this many ranks.

        Raises: ValueError: the product of its axes is another number.
        """
        found = self
        if self.dp_shard == REST:
            others = self.dp_replicate * self.tp * self.pp
            found = Layout(**{**_values(self), "dp_shard": max(1, ranks // others)})
        if found.ranks != ranks:
            raise ValueError(
                f"layout: {' x '.join(f'{axis}={getattr(found, axis)}' for axis in AXES)} = {found.ranks}"
                f" ranks, but {ranks} {'was' if ranks == 1 else 'were'} started; change the layout, or start"
                f" {found.ranks} (accelerate launch --num_processes {found.ranks})"
            )
        return found

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in _values(self).items())


def parse(text: str) -> Layout:
    """A layout from `axis=number,option=word`.

    Raises: ValueError: an unknown key or word, or a number that is no size.
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (word.strip() for word in part.partition("="))
        if key in found:
            raise ValueError(f"layout: {key} is given twice in {text!r}")
        found[key] = _value(key, value, text)
    return Layout(**found)


def _value(key: str, value: str, text: str) -> int | str:
    known = [field.name for field in fields(Layout)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"layout: {key!r} in {text!r} is no key; {hint}valid: {', '.join(known)}")
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ValueError(f"layout: {key} must be one of {', '.join(_CHOICES[key])}, but is {value!r}")
        return value
    size = int(value) if value.lstrip("-").isdigit() else 0
    if size < 1 and not (key == "dp_shard" and size == REST):
        rest = ", or -1 for all that are left" if key == "dp_shard" else ""
        raise ValueError(f"layout: {key} must be a number of ranks from 1{rest}, but is {value!r}")
    return size


def _values(layout: Layout) -> dict[str, Any]:
    return {field.name: getattr(layout, field.name) for field in fields(layout)}
