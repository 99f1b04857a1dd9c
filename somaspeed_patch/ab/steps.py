"""Read what the step recorder wrote: the updates of one run, of one or several ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PHASES = ("data", "preprocess", "forward", "backward", "optimizer")
"""of an update, in order; they add up to it"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One update on one rank."""

    step: int
    """its number, from 1"""
    loss: float
    """what was given to backward"""
    grad_norm: float
    """before clipping"""
    samples: int
    """in this rank's batch"""
    seconds: Mapping[str, float]
    """of each phase, and `total`"""
    lr: float = 0.0
    """used by the update"""
    at: float = 0.0
    """when it began, Unix time"""
    peak_bytes: int = 0
    """peak memory so far"""
    peak_kind: str = ""
    """what peak_bytes counts"""
    rank: int = 0
    """of the process"""
    world: int = 1
    """number of ranks"""
    device: str = "cpu"
    """its name"""
    profile: Mapping[str, float | None] | None = None
    """of a profiled update the fields of kernel_time.KernelTime"""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of the whole run."""

    samples: int
    """over all ranks"""
    seconds: Mapping[str, float]
    """of the slowest rank"""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The updates of one run by rank."""

    ranks: Mapping[int, tuple[Step, ...]]
    """empty when nothing was recorded"""

    @property
    def completed(self) -> int:
        """Updates that every rank finished."""
        return min((len(steps) for steps in self.ranks.values()), default=0)

    def updates(self) -> list[Update]:
        """The completed updates: samples added up, seconds of the slowest rank."""
        together = zip(*self.ranks.values(), strict=False)
        return [_together(steps) for steps in together]

    def first(self, count: int) -> Series:
        """Its first `count` updates."""
        return Series(ranks={rank: steps[:count] for rank, steps in self.ranks.items()})

    def every(self) -> list[Step]:
        """All steps of all ranks."""
        return [step for steps in self.ranks.values() for step in steps]


def _together(steps: tuple[Step, ...]) -> Update:
    slowest = max(steps, key=lambda step: step.seconds["total"])
    return Update(samples=sum(step.samples for step in steps), seconds=slowest.seconds)


def read(path: Path) -> Series:
    """All files of a run: `path`, or `path.rank0`, `path.rank1`, ... A line cut off by a crash is skipped."""
    found = sorted(path.parent.glob(path.name + "*")) if path.parent.is_dir() else []
    ranks: dict[int, tuple[Step, ...]] = {}
    for file in found:
        steps = tuple(_step(line) for line in _whole_lines(file))
        if steps:
            ranks[steps[0].rank] = steps
    return Series(ranks=dict(sorted(ranks.items())))


def count(path: Path) -> int:
    """Updates recorded so far by the first rank, for a progress bar."""
    found = [file for file in (path, path.with_name(path.name + ".rank0")) if file.is_file()]
    return len(_whole_lines(found[0])) if found else 0


def _whole_lines(file: Path) -> list[str]:
    text = file.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


_FIELDS = {field.name for field in fields(Step)}


def _step(line: str) -> Step:
    data: dict[str, Any] = json.loads(line)
    return Step(**{name: value for name, value in data.items() if name in _FIELDS})
