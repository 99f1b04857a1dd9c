"""Where observations' features wait for the learner, and how they get to it: the memory mode of a run.

host       page-locked host memory, copied to the GPU while the microbatch before is computed
device     the GPU's own memory: no copy, for small features or few samples
recompute  the observations themselves; the learner runs the backbone again each time, as trainers do that
           keep no features. For what fits nowhere else
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch

from somaspeed_patch.rl import features, streams
from somaspeed_patch.rl.env_process import Observation
from somaspeed_patch.rl.features import Features, Record, Tag
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.interface import Interface
from somaspeed_patch.rl.pinned import Ring

Mode = Literal["host", "device", "recompute"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An observation that is encoded anew each time."""

    observation: Observation
    tag: Tag

    @property
    def bytes(self) -> int:
        """What it takes to keep."""
        return sum(each.nbytes for each in self.observation.values())


Kept = Record | Seen


class Store(ABC):
    """Keeps what the rollout has encoded, and gives it back in batches."""

    mode: ClassVar[Mode]

    def __init__(self, policy: FlowPolicy) -> None:
        """Take the policy that learns."""
        self.policy = policy

    @abstractmethod
    def keep(self, encoded: Features, tag: Tag, observations: Sequence[Observation]) -> Sequence[Kept]:
        """One for each observation of a batch that was encoded; of any thread."""

    @abstractmethod
    def read(self, kept: Sequence[Kept], tag: Tag, tokens: int | None) -> Features:
        """A batch on the policy's device; arguments as of `features.batch`."""

    def ahead(self, batches: Iterable[Sequence[Kept]], tag: Tag, tokens: int | None) -> Iterator[Features]:
        """`read` for one batch after the other."""
        for each in batches:
            yield self.read(each, tag, tokens)


class HostStore(Store):
    """See the module."""

    mode = "host"

    def __init__(self, policy: FlowPolicy, *, limit: int | None = None) -> None:
        """Take the policy that learns, and how many bytes may wait at once."""
        super().__init__(policy)
        self._cuda = policy.device.type == "cuda"
        self.ring = Ring(limit=limit, pin=self._cuda)

    def keep(self, encoded: Features, tag: Tag, observations: Sequence[Observation]) -> Sequence[Record]:
        """See `Store`."""
        found = [self.ring.keep(each) for each in encoded.views(tag)]
        streams.wait(encoded.length.device)  # the copies are done
        return found

    def read(self, kept: Sequence[Kept], tag: Tag, tokens: int | None) -> Features:
        """See `Store`."""
        return features.batch(_records(kept), tag, tokens=tokens, device=self.policy.device)

    def ahead(self, batches: Iterable[Sequence[Kept]], tag: Tag, tokens: int | None) -> Iterator[Features]:
        """See `Store`; the next batch is under way while one is used."""
        if not self._cuda:
            yield from super().ahead(batches, tag, tokens)
            return
        copying = streams.another(self.policy.device)
        upcoming = (self._sent(each, tag, tokens, copying) for each in batches)
        following = next(upcoming, None)
        while following is not None:
            found, there = following
            following = next(upcoming, None)
            yield streams.taken_over(found, there)

    def _sent(
        self, kept: Sequence[Kept], tag: Tag, tokens: int | None, copying: torch.cuda.Stream
    ) -> tuple[Features, torch.cuda.Event]:
        """A batch that is being copied, and what says when it is there."""
        with torch.cuda.stream(copying):
            found = self.read(kept, tag, tokens)
            return found, streams.mark(copying)


class DeviceStore(Store):
    """See the module."""

    mode = "device"

    def keep(self, encoded: Features, tag: Tag, observations: Sequence[Observation]) -> Sequence[Record]:
        """See `Store`."""
        found = [each.copied(torch.Tensor.clone) for each in encoded.views(tag)]
        streams.wait(encoded.length.device)  # another stream reads them
        return found

    def read(self, kept: Sequence[Kept], tag: Tag, tokens: int | None) -> Features:
        """See `Store`."""
        return features.batch(_records(kept), tag, tokens=tokens, device=self.policy.device)


class RecomputeStore(Store):
    """See the module."""

    mode = "recompute"

    def __init__(self, policy: FlowPolicy, interface: Interface) -> None:
        """Take the policy that learns, and the interface of the rollout: a copy is used, for it has state."""
        super().__init__(policy)
        self._interface = copy.deepcopy(interface)

    def keep(self, encoded: Features, tag: Tag, observations: Sequence[Observation]) -> Sequence[Seen]:
        """See `Store`."""
        return [Seen(observation=each, tag=tag) for each in observations]

    def read(self, kept: Sequence[Kept], tag: Tag, tokens: int | None) -> Features:
        """See `Store`; as many tokens as the backbone gives."""
        seen = [each for each in kept if isinstance(each, Seen)]
        if len(seen) != len(kept):
            raise ValueError("rl: memory mode recompute needs observations, but features were kept")
        for each in seen:
            tag.check(each.tag, "rl")
        return self.policy.encode(self._interface.batch([each.observation for each in seen]))


def make(mode: Mode, policy: FlowPolicy, interface: Interface, **options: Any) -> Store:
    """The store of a memory mode.

    Args: options: `limit` of a HostStore.
    Raises: ValueError: no such mode.
    """
    if mode == "host":
        return HostStore(policy, **options)
    if mode == "device":
        return DeviceStore(policy)
    if mode == "recompute":
        return RecomputeStore(policy, interface)
    raise ValueError(f"rl: memory must be one of {', '.join(get_args(Mode))}, but is {mode!r}")


def _records(kept: Sequence[Kept]) -> list[Record]:
    found = [each for each in kept if isinstance(each, Record)]
    if len(found) != len(kept):
        raise ValueError("rl: observations were kept, not features; only memory mode recompute reads them")
    return found
