"""Seconds of GPU work and of communication in what torch.profiler saw.

On a GPU work is every kernel, fill, and copy within the device; copies from and to the host leave the
processors free and do not count. Communication is NCCL's kernels, whose time includes the wait for the
slowest rank. On a CPU gloo's work appears as events `gloo:all_reduce` and the like, from the moment that a
thread of gloo takes it up to its end. O(n log n) in the number of events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from somaspeed_patch.ab.intervals import Interval, length_without, union_length

_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
_MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Of one stretch of time on one rank."""

    busy_seconds: float | None
    """during which the GPU had at least one kernel; None on a CPU"""
    communication_seconds: float
    """of all NCCL kernels, or of gloo's work, added up"""
    exposed_communication_seconds: float | None
    """of communication during which no other kernel ran; None on a CPU"""


def measure(events: Iterable[Any], *, cuda: bool) -> KernelTime | None:
    """Add up the events of one profile.

    Args:
        events: FunctionEvents of torch.profiler.
        cuda: the work was done on a GPU.

    Returns: None where a GPU was at work and the profiler saw no kernel: it may not count there.
    """
    if cuda:
        return _on_gpu([event for event in events if is_gpu_work(event)])
    gloo = [_interval(event) for event in events if event.name.startswith("gloo:")]
    return KernelTime(
        busy_seconds=None, communication_seconds=_total(gloo), exposed_communication_seconds=None
    )


def is_gpu_work(event: Any) -> bool:
    """Whether an event is work of the GPU: no operator, annotation, or copy from or to the host."""
    if event.device_type.name != "CUDA" or event.is_user_annotation:
        return False
    return not event.name.startswith(_HOST_COPIES)


def _on_gpu(kernels: list[Any]) -> KernelTime | None:
    if not kernels:
        return None
    nccl = [_interval(kernel) for kernel in kernels if _is_nccl(kernel)]
    others = [_interval(kernel) for kernel in kernels if not _is_nccl(kernel)]
    return KernelTime(
        busy_seconds=union_length([*nccl, *others]),
        communication_seconds=_total(nccl),
        exposed_communication_seconds=length_without(nccl, others),
    )


def _is_nccl(kernel: Any) -> bool:
    return "nccl" in kernel.name.lower()


def _interval(event: Any) -> Interval:
    """In seconds."""
    return event.time_range.start * _MICROSECOND, event.time_range.end * _MICROSECOND


def _total(intervals: Iterable[Interval]) -> float:
    return float(sum(end - start for start, end in intervals))
