"""The first batches of a run, again and again: an A/B of the step alone, without loader and preprocessing.

The training loader's iterator hands out each batch with a `Ticket`; `record` keeps what the preprocessor made
of it. Once there are enough, it hands out the kept batches and asks the loader no more: its workers fill
their queues and wait. The seam is torch's `DataLoader.__iter__`, below accelerate's loaders: whoever watches
those sees every batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from somaspeed_patch import features, sites

TICKET = "somaspeed_ticket"


@dataclass(frozen=True, eq=False)
class Ticket:
    """Which batch of the run it is, and whether it was there before."""

    cache: Cache
    index: int
    again: bool


class Cache:
    """The batches of one run as the preprocessor left them, on the device, by index."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Any]] = {}
        self.given = 0
        self.released = False

    def wanted(self) -> int:
        """How many batches to repeat; 0 for none."""
        return 0 if self.released else wanted()

    def rounds(self, length: int | None, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """One epoch of `length` batches; `start` begins to ask the loader, and is not called in vain."""
        loader: Iterator[Any] | None = None
        for _ in itertools.count() if length is None else range(length):
            batch = self._again()
            if batch is None:
                loader = start() if loader is None else loader
                try:
                    batch = self._with_ticket(next(loader))
                except StopIteration:
                    return
            self.given += 1
            yield batch

    def _again(self) -> dict[str, Any] | None:
        count = self.wanted()
        known = self.kept.get(self.given % count) if count and self.given >= count else None
        return None if known is None else {**known, TICKET: Ticket(self, self.given % count, again=True)}

    def _with_ticket(self, batch: Any) -> Any:
        count = self.wanted()
        if not count or not isinstance(batch, dict):
            return batch
        again = self.given >= count  # the loader is one ahead: the batch to repeat may not be done yet
        return {**batch, TICKET: Ticket(self, self.given % count, again)}


_caches: WeakKeyDictionary[Any, Cache] = WeakKeyDictionary()


def wanted() -> int:
    """The feature as a number; 0 if it is off or not a whole number of at least 1, which the report says."""
    value = features.value("cached_batches")
    if not isinstance(value, str):
        return 0
    if not value.isdecimal() or int(value) < 1:
        _site().declined(f"cached_batches must be a whole number of at least 1, but is {value!r}")
        return 0
    return int(value)


def watch(loader: Any) -> Cache:
    """`loader` is the training loader of a run that begins. Returns: its cache."""
    return _caches.setdefault(loader, Cache())


def release() -> None:
    """Let every run go on with its loader."""
    for cache in _caches.values():
        cache.released = True
    _caches.clear()


def iterate(wrapped: Any, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DataLoader.__iter__: of a training loader, the batches with tickets; read anew at each epoch."""
    cache = _caches.get(loader)
    if cache is None or not cache.wanted():
        return wrapped(*args, **kwargs)
    try:
        length: int | None = len(loader)
    except TypeError:  # a stream
        length = None
    return cache.rounds(length, wrapped)


def take_ticket(batch: dict[str, Any]) -> Ticket | None:
    """Take the ticket out of a batch."""
    ticket = batch.pop(TICKET, None)
    return ticket if isinstance(ticket, Ticket) else None


def repeated(ticket: Ticket | None) -> dict[str, Any] | None:
    """The batch that was kept, if the ticket is for one: a dict of its own with the same tensors."""
    if ticket is None or not ticket.again:
        return None
    kept = ticket.cache.kept.get(ticket.index)
    if kept is None:
        return None
    site = _site()
    site.ran()
    site.reason = f"trains on its first {len(ticket.cache.kept)} batches again and again"
    return dict(kept)


def record(ticket: Ticket | None, batch: Any) -> None:
    """Keep what the preprocessor made of a batch with a ticket."""
    if ticket is not None and isinstance(batch, dict):
        ticket.cache.kept.setdefault(ticket.index, dict(batch))


def _site() -> sites.Site:
    return sites.site("lerobot_workers/cached_batches")
