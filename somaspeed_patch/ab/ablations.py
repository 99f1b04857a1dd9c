"""What each feature contributes: an arm against the same arm without one feature, at the same batch.

The recipe names the arms that switch a feature off (`ablations`). The intervals are those of `ratios.ratio`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from somaspeed_patch.ab.cells import Cell, speed, speeds, stands
from somaspeed_patch.ab.ratios import ratio

Results = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One feature at one batch."""

    feature: str
    """what is switched off"""
    full: Cell
    """the cell with every feature"""
    without: Cell
    """the cell without this one"""
    found: Mapping[str, Any]
    """ratio, low, high and ratio_by_repeat of full against without"""

    @property
    def gain(self) -> float:
        """Samples a second that the feature adds, between the medians; negative where it costs."""
        return speed(self.full) - speed(self.without)


def ablations(results: Results) -> list[Ablation]:
    """Every pair of cells that stand, in the cells' order; [] where the recipe has none."""
    named = ablated(results)
    cells = {(cell["arm"], cell["batch"]): cell for cell in results["cells"] if stands(cell)}
    found = []
    for (arm, batch), cell in cells.items():
        full = cells.get((_full(arm, results), batch)) if arm in named else None
        if full is not None:
            pair = ratio(speeds(full), speeds(cell))
            found.append(Ablation(feature=named[arm], full=full, without=cell, found=pair))
    return found


def ablated(results: Results) -> Mapping[str, str]:
    """The recipe's arms that lack a feature, and the feature."""
    named: Mapping[str, str] = results["recipe"]["ablations"]
    return named


def _full(arm: str, results: Results) -> str | None:
    """The arm that it is like."""
    like: str | None = results["recipe"]["arms"][arm]["like"]
    return like
