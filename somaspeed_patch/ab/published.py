"""The fields under which SomaSpeed publishes its comparisons, so that the two can be laid side by side.

Names as in the `comparisons` of the results.json on somaspeed.github.io. One entry for every patched arm at
its fastest batch, against the baseline: batches may differ, as theirs do; `comparison` keeps that apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from somaspeed_patch.ab.cells import Cell, speed, stands


def entries(cells: Sequence[Cell], *, baseline: str, target_steps: int) -> list[dict[str, Any]]:
    """One for each arm of ours with a speed; [] without one of the baseline."""
    native = _fastest(cells, baseline)
    ours = dict.fromkeys(cell["arm"] for cell in cells if not cell["native"])
    pairs = [(native, _fastest(cells, arm)) for arm in ours]
    return [
        {
            "world_size": theirs["world_size"],
            "native": _side(theirs, target_steps),
            "somaspeed": _side(mine, target_steps),
            "speedup": speed(mine) / speed(theirs),
        }
        for theirs, mine in pairs
        if theirs is not None and mine is not None
    ]


def _fastest(cells: Sequence[Cell], arm: str) -> Cell | None:
    mine = [cell for cell in cells if cell["arm"] == arm and stands(cell)]
    return max(mine, key=speed, default=None)


def _side(cell: Cell, target_steps: int) -> dict[str, Any]:
    samples, seconds = sum(cell["measured_samples"]), sum(cell["slowest_rank_seconds"])
    return {
        "config": cell["arm"],
        "microbatch_per_gpu": cell["batch"],
        "global_batch": cell["global_batch"],
        "summary": {
            "completed_steps": cell["completed_steps"],
            "target_steps": target_steps,
            "setup_seconds": statistics.median(cell["setup_seconds"]["repeats"]),
            "samples_per_second_steady": speed(cell),
            "measured_steps": cell["completed_steps"] - cell["discarded"],
        },
        "measured_samples": samples,
        "measured_seconds": seconds,
        "peak_allocated_gib": cell["peak_allocated_gib"],
    }
