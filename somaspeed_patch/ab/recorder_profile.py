"""Inside a training process: torch.profiler around one update; what goes wrong leaves the run as it is."""

from __future__ import annotations

import atexit
import logging
from dataclasses import asdict

import torch
from torch.profiler import ProfilerActivity, profile

from somaspeed_patch import sites
from somaspeed_patch.ab import kernel_time

log = logging.getLogger(__name__)


class UpdateProfile:
    """A profiler, running from here to `finish`, unless it could not be started: the report then says why.

    Args:
        cuda: watch the GPU, and not the host's operators.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._running = _started(cuda)
        atexit.register(self.finish)  # a crash inside the update would end in one of torch, and hide itself

    def finish(self) -> dict[str, float | None] | None:
        """Stop it; the fields of KernelTime, or None where nothing was measured."""
        atexit.unregister(self.finish)
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            running.stop()
            found = kernel_time.measure(running.events(), cuda=self._cuda)  # type: ignore[no-untyped-call]
        except Exception as error:  # never break the host for a figure
            _failed(error)
            return None
        if found is None:
            _site().declined("torch.profiler saw no kernel on the GPU")
            return None
        _site().ran()
        return asdict(found)


def _started(cuda: bool) -> profile | None:
    if torch._C._autograd._profiler_enabled():  # a second one starts without a word, and ends the first
        _site().declined("the host profiles itself")
        return None
    try:
        running = profile(
            activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU],
            acc_events=True,  # else it warns that several cycles would be cleared
        )
        running.start()
    except Exception as error:  # never break the host for a figure
        _failed(error)
        return None
    return running


def _failed(error: Exception) -> None:
    _site().failed(error)
    log.warning("torch.profiler failed, the update has no profile", exc_info=error)


def _site() -> sites.Site:
    return sites.site("step_recorder/record_profile")
