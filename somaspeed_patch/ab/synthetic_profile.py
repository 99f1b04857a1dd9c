"""Where the time of one update goes: its largest kernels, by torch.profiler."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from somaspeed_patch.ab import kernel_time
from somaspeed_patch.ab.synthetic_subject import Subject

TOP = 20


def largest(subject: Subject, batch: dict[str, Tensor], step_seconds: float) -> dict[str, Any]:
    """Total ms of one update's kernels (on a CPU: operators); the largest with ms, share and count.

    Args:
        step_seconds: what an update takes that nobody watches.
    Returns: also the seconds in which a kernel ran, and the share of `step_seconds` in which none did:
        kernels take as long as they do unwatched. Both None on a CPU, whose operators contain one another.
    """
    cuda = subject.device.type == "cuda"
    # The host's operators, some 100,000 in a native step, would be most of the work.
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        subject.update(batch)
    events = [event for event in seen.key_averages() if _milliseconds(event, cuda) > 0]
    found = kernel_time.measure(seen.events(), cuda=cuda)
    busy = None if found is None else found.busy_seconds
    total = sum(_milliseconds(event, cuda) for event in events)
    events.sort(key=lambda event: -_milliseconds(event, cuda))
    return {
        "total_ms": total,
        "busy_seconds": busy,
        "idle_share": None if busy is None else 1 - busy / step_seconds,
        "largest": [
            {
                "name": event.key[:120],
                "ms": _milliseconds(event, cuda),
                "share": _milliseconds(event, cuda) / total,
                "count": event.count,
            }
            for event in events[:TOP]
        ],
    }


def _milliseconds(event: Any, cuda: bool) -> float:
    """Its own time: a kernel's on the GPU, an operator's without what it calls on a CPU."""
    if not cuda:
        return float(event.self_cpu_time_total) / 1e3
    if event.device_type.name != "CUDA" or event.is_user_annotation:  # Optimizer.step around its kernels
        return 0.0
    return float(event.self_device_time_total) / 1e3
