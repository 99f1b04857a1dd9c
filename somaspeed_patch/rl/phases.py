"""Where the time of a run goes: env, predict, train, sync, wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASES = ("env", "predict", "train", "sync", "wait")


class Phases:
    """Seconds by phase, and what is going on now; one for each thread of work."""

    def __init__(self, who: str) -> None:
        """Take the name that errors have for this thread of work."""
        self.who = who
        self._seconds: dict[str, float] = {}
        self._now: tuple[str, float] = ("nothing", time.monotonic())
        self._lock = threading.Lock()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`; not nested."""
        begun = time.monotonic()
        self._now = (name, begun)
        try:
            yield
        finally:
            self.add({name: time.monotonic() - begun})
            self._now = ("nothing", time.monotonic())

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count seconds that were measured elsewhere, by phase."""
        with self._lock:
            for name, each in seconds.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + each

    def taken(self) -> dict[str, float]:
        """Seconds since the last call, every phase named; the count begins anew."""
        with self._lock:
            found = {name: self._seconds.pop(name, 0.0) for name in PHASES}
        return found

    def doing(self) -> str:
        """Words for an error: what is going on, and for how long."""
        name, since = self._now
        return f"the {self.who} is at {name} for {time.monotonic() - since:.0f} s"
