"""Inside a training process: turn the calls that adapters/step_recorder.py sees into one line an update.

An update is cut by marks into five phases that add up to it. Each begins at its own mark:

    data        the trainer asks the loader for a batch
    preprocess  it has the batch
    forward     autocast is entered
    backward    Accelerator.backward is called
    optimizer   that has returned: clip, step, zero_grad, scheduler

and the last ends where LeRobot's MetricsTracker.step, or a Trainer's callback of the step's end, is called.
Micro-batches go through the phases several times: seconds and losses add up.

Logging, checkpoints and evaluation lie between two updates and are counted in neither. On CUDA each mark
is an event on the current stream and the end is one synchronize; on a CPU the marks are wall-clock. A mark
that the host never reaches leaves its time to the phase before. Loaders used under no_grad (evaluation) are
not updates. At exit rank 0 saves the report of patched sites beside the steps.

Updates are counted from 1, the first of this run, also where the host resumes at a later step: so
`record_gradients` and `record_profile` name the one update whose gradients are saved, or that is profiled.
"""

from __future__ import annotations

import atexit
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode
from typing import IO, Any

import torch
from accelerate.state import PartialState

from somaspeed_patch import features, patching, sites
from somaspeed_patch.ab import recorder_gradients
from somaspeed_patch.ab.recorder_profile import UpdateProfile
from somaspeed_patch.ab.steps import PHASES

REPORT = "somaspeed_report.json"


@dataclass(frozen=True)
class _Mark:
    """One moment, on the CPU's clock and, where there is one, on the GPU's."""

    wall: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls) -> _Mark:
        if not _on_cuda():
            return cls(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cls(time.perf_counter(), event)

    def until(self, later: _Mark) -> float:
        """Seconds from here to `later`."""
        if self.event is not None and later.event is not None:
            return float(self.event.elapsed_time(later.event)) / 1e3
        return later.wall - self.wall


@dataclass
class _Update:
    """What is known so far of the update under way."""

    profile: UpdateProfile | None = None
    at: float = field(default_factory=time.time)
    marks: list[tuple[str, _Mark]] = field(default_factory=list)
    """the beginning of each phase, in order"""
    samples: int = 0
    loss: torch.Tensor | None = None
    grad_norm: Any = None
    lr: float | None = None
    accelerator: Any = None
    """that ran the backward"""
    gradients_complete: bool = False
    """the first call after the last backward was seen"""

    def phases(self, end: _Mark) -> dict[str, float]:
        """Seconds of each phase."""
        seconds = dict.fromkeys(PHASES, 0.0)
        later = [*(mark for _, mark in self.marks[1:]), end]
        for (phase, mark), next_mark in zip(self.marks, later, strict=True):
            seconds[phase] += mark.until(next_mark)
        return seconds


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """What the host itself knows at an update's end, where no seam saw it."""

    step: int
    loss: Any = float("nan")
    grad_norm: Any = float("nan")
    lr: float = 0.0


class Recorder:
    """Writes the updates of this process to one file; rank r of several writes to `<path>.rank<r>`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._update: _Update | None = None
        self._number = 1

    def begin(self) -> None:
        """A batch is asked for: start an update, unless one is under way."""
        if self._update is None:
            _chosen("record_gradients")  # a wrong value stops the run here, before any work is lost
            chosen = _chosen("record_profile") == self._number
            self._update = _Update(profile=UpdateProfile(cuda=_on_cuda()) if chosen else None)
        self.mark("data")

    def mark(self, phase: str) -> None:
        """A phase begins now; nothing outside an update."""
        if self._update is not None:
            self._update.marks.append((phase, _Mark.now()))

    def note(self, **known: Any) -> None:
        """Fill in fields of the update under way."""
        for name, value in known.items():
            if self._update is not None:
                setattr(self._update, name, value)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Of one micro-batch."""
        if self._update is not None:
            before = self._update.loss
            self._update.loss = loss if before is None else before + loss

    def gradients_complete(self, accelerator: Any = None) -> None:
        """Clipping or the optimizer is about to begin: save the gradients, if they are those of the update.

        Args:
            accelerator: None: the one that ran the backward.
        """
        update = self._update
        if update is None or update.gradients_complete:
            return
        accelerator = update.accelerator if accelerator is None else accelerator
        if accelerator is None or not accelerator.sync_gradients:  # of a micro-batch that is not the last
            return
        update.gradients_complete = True
        if _chosen("record_gradients") == self._number:
            recorder_gradients.save(accelerator, Path(self._path).parent)

    def end(self, known: _Ended) -> None:
        """Finish the update and write its line."""
        update, self._update = self._update, None
        if update is None:
            return
        (_, first), end = update.marks[0], _Mark.now()
        finished = end.wall
        if end.event is not None:
            torch.cuda.synchronize()
            finished = time.perf_counter()
        seconds = {**update.phases(end), "total": finished - first.wall}
        profiled = {} if update.profile is None else {"profile": update.profile.finish()}
        self._write({**_record(update, known, seconds), **profiled})
        self._number += 1

    def close(self) -> None:
        """Close the file; the next update would start it afresh."""
        update, self._update = self._update, None
        if update is not None and update.profile is not None:
            update.profile.finish()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            several = record["world"] > 1
            path = Path(f"{self._path}.rank{record['rank']}" if several else self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", buffering=1)  # by line: what a crash leaves can be read
            if record["rank"] == 0:
                atexit.register(_save_report, path.with_name(REPORT))
        self._file.write(json.dumps(record) + "\n")
        sites.site("step_recorder").ran()


def _save_report(file: Path) -> None:
    """Keep what was patched and ran beside the steps: a native run, or one without outputs, has no other."""
    if file.parent.is_dir():
        patching.snapshot().save(file)


def _record(update: _Update, known: _Ended, seconds: Mapping[str, float]) -> dict[str, Any]:
    """One line. What no seam saw is what the host knows."""
    state = PartialState()
    peak, kind = _peak()
    return {
        "step": known.step,
        "loss": float(update.loss if update.loss is not None else known.loss),
        "grad_norm": float(update.grad_norm if update.grad_norm is not None else known.grad_norm),
        "lr": update.lr if update.lr is not None else known.lr,
        "samples": update.samples,
        "seconds": seconds,
        "at": update.at,
        "peak_bytes": peak,
        "peak_kind": kind,
        "rank": state.process_index,
        "world": state.num_processes,
        "device": torch.cuda.get_device_name() if _on_cuda() else "cpu",
    }


def _chosen(feature: str) -> int | None:
    """The number of the update that a feature names, or None.

    Raises: ValueError: its value is no such number.
    """
    value = features.value(feature)
    if value is None:
        return None
    if not re.fullmatch("[1-9][0-9]*", str(value)):
        raise ValueError(
            f"step_recorder: {feature} must be the number of an update, a whole number of at least 1, but is "
            f"{value!r}; for the first update give 1"
        )
    return int(value)


def _on_cuda() -> bool:
    return bool(PartialState().device.type == "cuda")


def _peak() -> tuple[int, str]:
    """Peak bytes and what they count; LeRobot resets CUDA's peak at each update."""
    if _on_cuda():
        return torch.cuda.max_memory_allocated(), "CUDA allocated"
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process max RSS"


def _samples(batch: Any) -> int:
    """The length that most of its tensors have: of patches or images there are more than of samples."""
    lengths = [len(value) for value in _tensors(batch) if value.ndim]
    return mode(lengths) if lengths else 0


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    for value in batch.values() if isinstance(batch, Mapping) else ():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _tensors(value)


_recorders: dict[str, Recorder] = {}


def _current() -> Recorder:
    path = str(features.value("record_steps"))
    return _recorders.setdefault(path, Recorder(path))


def close() -> None:
    """Close every file."""
    while _recorders:
        _recorders.popitem()[1].close()


def _batches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    inner = wrapped(*args, **kwargs)
    while True:
        training = torch.is_grad_enabled()
        if training:
            _current().begin()
        try:
            batch = next(inner)
        except StopIteration:
            return
        if training:
            _current().mark("preprocess")
            _current().note(samples=_samples(batch))
        yield batch


def _micro_batches(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _current().begin()
    result = wrapped(*args, **kwargs)
    _current().mark("preprocess")
    _current().note(samples=sum(map(_samples, result[0])))
    return result


def _forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        _current().mark("forward")
    return wrapped(*args, **kwargs)


def _backward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    loss = args[0] if args else kwargs["loss"]
    _current().mark("backward")
    _current().add_loss(loss.detach())
    _current().note(accelerator=instance)
    result = wrapped(*args, **kwargs)
    _current().mark("optimizer")
    return result


def _clip(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _current().gradients_complete(instance)
    grad_norm = wrapped(*args, **kwargs)
    _current().note(grad_norm=grad_norm)
    return grad_norm


def _optimizer_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _current().gradients_complete()  # for hosts that do not clip
    _current().note(lr=float(instance.param_groups[0]["lr"]))
    return wrapped(*args, **kwargs)


def _update_done(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    seen = {
        name: instance.metrics[name].val for name in ("loss", "grad_norm", "lr") if name in instance.metrics
    }
    _current().end(_Ended(step=instance.steps, **seen))
    return result


def _trainers_update_done(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    state = args[1] if len(args) > 1 else kwargs["state"]
    _current().end(_Ended(step=state.global_step))
    return wrapped(*args, **kwargs)


HOOKS: Mapping[str, Callable[[Any, Any, Any, Any], Any]] = {
    "batches": _batches,
    "micro_batches": _micro_batches,
    "forward": _forward,
    "backward": _backward,
    "clip": _clip,
    "optimizer_step": _optimizer_step,
    "update_done": _update_done,
    "trainers_update_done": _trainers_update_done,
}
