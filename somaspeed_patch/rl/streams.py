"""CUDA streams of rollout and learner: on one default stream they would wait for each other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from somaspeed_patch.rl.features import Features


def own(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, this thread computes on a stream of its own; nothing on a CPU.

    Its kernels go first: environments wait for an action, while nobody waits for the learner's next step.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def wait(device: torch.device) -> None:
    """Until all that this thread has asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def another(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies beside the computation."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """What has happened once all that was asked of a stream is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def taken_over(found: Features, there: torch.cuda.Event) -> Features:
    """Features that another stream copied, for this thread's stream: from the event on."""
    mine = torch.cuda.current_stream(found.length.device)
    mine.wait_event(there)
    for each in (found.length, *found.tokens.values(), *found.fixed.values()):
        if each.is_cuda:
            each.record_stream(mine)  # its memory is not used again before this stream is done with it
    return found
