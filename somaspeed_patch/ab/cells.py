"""What a cell of results.json is: one arm at one batch, as plain data. Read here, and nowhere twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from somaspeed_patch.ab import steps

Cell = Mapping[str, Any]

SCHEMA = 2
"""of results.json"""
PHASES = (*steps.PHASES, "communication")


def stands(cell: Cell) -> bool:
    """Whether a claim may be made of it: it ran, and nothing is withheld."""
    return "samples_per_second" in cell and not cell["withheld"] and not cell["failure"]


def speed(cell: Cell) -> float:
    """Samples a second of one that was measured, the median over repeats."""
    return float(cell["samples_per_second"]["median"])


def speeds(cell: Cell) -> Sequence[float]:
    """The same by repeat."""
    repeats: Sequence[float] = cell["samples_per_second"]["repeats"]
    return repeats


def cell_name(arm: str, batch: int | None) -> str:
    """As it is called in sentences."""
    return arm if batch is None else f"{arm} at batch {batch}"


def phases_of(cells: Sequence[Cell]) -> list[str]:
    """The phases that any of the cells has, in order."""
    return [phase for phase in PHASES if any(phase in cell.get("phase_seconds", {}) for cell in cells)]
