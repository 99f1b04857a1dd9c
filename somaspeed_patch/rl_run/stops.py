"""SIGTERM and SIGINT: how a run ends when somebody wants it to.

Where the main thread waits or plays, a signal ends that at once: the learner is as its last iteration left
it. In the midst of training it is not, so the iteration may end first, for up to `GRACE` seconds; if it does
not, the last checkpoint on disk stays the last. A second signal, or `LIMIT` seconds, end the process: the
kernel ends the environments with it.

Of several ranks (`RankStops`) none may leave what the others are in: a signal interrupts it only where it
waits for its environments, is noted elsewhere, and all agree where they meet next. A rank that is in a
collective does not come back for a signal, so a thread sees to the `LIMIT`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

GRACE = 30.0
LIMIT = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Somebody wants the run to end. No Exception: nobody on the way may take it for a fault."""

    def __init__(self, number: int, *, clean: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.clean = clean
        """whether the learner is as its last iteration left it"""


class Stops:
    """A context manager, for the main thread."""

    def __init__(self) -> None:
        self._training = False
        self._wanted: int | None = None
        self._before: dict[int, Any] = {}
        self._timer: tuple[float, float] | None = None  # of whoever used it before, once it is ours

    def __enter__(self) -> Stops:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)

    def listen(self) -> None:
        """Take the signals over, again where somebody else has: Ray does at its start."""
        for number in _SIGNALS:
            signal.signal(number, self._asked)

    def train(self) -> None:
        """From here on an iteration is under way, which had better end; until `done`."""
        self._training = True

    def done(self) -> None:
        """The iteration and what belongs to it are over. Raises: Stopped: somebody asked meanwhile."""
        self._training = False
        if self._wanted is not None:
            self._limit(LIMIT - GRACE)
            raise Stopped(self._wanted, clean=True)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._wanted is not None:
            os._exit(128 + self._wanted)
        self._wanted = number
        if self._training:
            self._limit(GRACE)
            return
        self._limit(LIMIT)
        raise Stopped(number, clean=True)

    def _late(self, number: int, frame: FrameType | None) -> None:
        wanted = self._wanted or signal.SIGTERM
        if not self._training:
            os._exit(128 + wanted)
        self._training = False
        self._limit(LIMIT - GRACE)
        raise Stopped(wanted, clean=False)

    def _limit(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = signal.setitimer(signal.ITIMER_REAL, 0)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, seconds)


class RankStops(Stops):
    """Of one of several ranks. A second signal is the first one, which the launcher has passed on as well."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = False
        self._over = threading.Event()

    def __enter__(self) -> RankStops:
        super().__enter__()
        told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._told_before = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(told,), name="stops", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._told_before)
        os.close(self._tell)  # the thread's last news
        super().__exit__(kind, error, trace)

    @property
    def wanted(self) -> int | None:
        """The signal that came; None: none did."""
        return self._wanted

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a signal ends what is going on. Raises: Stopped: one came, or had come."""
        self._waits = True
        try:
            if self._wanted is not None:
                raise Stopped(self._wanted, clean=True)
            yield
        finally:
            self._waits = False

    def train(self) -> None:
        """See `Stops`; nothing but `waiting` is interrupted anyhow."""

    def done(self) -> None:
        """See `Stops`; the ranks agree where they meet next."""

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._wanted is not None:
            return
        self._wanted = number
        if self._waits:
            raise Stopped(number, clean=True)

    def _watch(self, told: int) -> None:
        """End the process where a signal has not ended it."""
        while news := os.read(told, 1):
            if news[0] in _SIGNALS and not self._over.wait(LIMIT):
                os._exit(128 + news[0])
        os.close(told)
