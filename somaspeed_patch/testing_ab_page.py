"""Made-up results of `somaspeed ab`, schema 2, for tests of the page: figures of the measured size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from somaspeed_patch.ab.comparison import compare
from somaspeed_patch.ab.ratios import spread

HOSTILE = """<script>alert("1 & 2")</script> 'quoted' $x_1$"""
"""a name that breaks out of HTML, attributes, SVG and mathematics where it is not escaped"""

Results = dict[str, Any]


def site(name: str, calls: int, *, fallbacks: int = 0, why: str | None = None) -> dict[str, Any]:
    """A line of the report."""
    return {
        "site": name,
        "target": "",
        "status": "patched",
        "reason": "",
        "calls": calls,
        "native_calls": 0,
        "fallbacks": fallbacks,
        "last_fallback": why,
    }


def cell(arm: str, batch: int | None, speed: float | None, **fields: Any) -> dict[str, Any]:
    """One cell; a `speed` of None leaves every figure out.

    Args:
        speed: samples a second of its middle repeat.
        fields: what is not as usual; `repeats` is the number of repeats, `phases` shares by phase.
    """
    repeats, phases = fields.pop("repeats", 3), fields.pop("phases", None)
    found: dict[str, Any] = {
        "arm": arm,
        "batch": batch,
        "native": arm.startswith("native"),
        "failure": "",
        "notes": [],
        "repeats": repeats,
        "peak_allocated_gib": None,
        "peak_counts": "CUDA allocated",
        "busy_share": None,
        "communication_seconds": None,
        "exposed_communication_seconds": None,
        "tflop_per_sample": None,
        "tflops": None,
        "mfu": None,
        "loader": None,
        "loss": [],
        "sites": [],
        "withheld": [],
    }
    if speed is not None:
        noise = [1 + 0.006 * math.sin(1.7 * speed + 2.9 * repeat) for repeat in range(repeats)]
        found |= _speeds(speed, batch or 4, noise, phases or _STEP_PHASES)
    return found | fields


_STEP_PHASES = {"forward": 0.62, "backward": 0.31, "optimizer": 0.066}
_TRAINER_PHASES = {"data": 0.021, "preprocess": 0.083, "forward": 0.41, "backward": 0.382, "optimizer": 0.098}


def _speeds(speed: float, batch: int, noise: Sequence[float], phases: Mapping[str, float]) -> dict[str, Any]:
    seconds = batch / speed
    return {
        "samples_per_second": spread([speed * factor for factor in noise]),
        "step_seconds": spread([seconds / factor for factor in noise]),
        "setup_seconds": spread([31.25 * factor for factor in noise]),
        "phase_seconds": {phase: seconds * share for phase, share in phases.items()},
    }


def results(
    kind: str,
    cells: Sequence[dict[str, Any]],
    recipe: Mapping[str, Any],
    gate: Mapping[str, Any],
    **more: Any,
) -> Results:
    """A results dict around cells, compared as `somaspeed ab` compares them."""
    arms = list(dict.fromkeys(one["arm"] for one in cells))
    references = {arm: None if arm == arms[0] else arms[0] for arm in arms}
    return {
        "schema": 2,
        "kind": kind,
        "somaspeed": "0.1.0",
        "date": "2026-11-30T05:26:00+0000",
        "command": ["python", "-m", "somaspeed_patch", "ab", recipe["name"]],
        "commit": "68922ad",
        "versions": {"python": "3.12.3", "torch": "2.11.0", "lerobot": "0.6.1", "transformers": "5.5.4"},
        "machine": _CPU,
        "recipe": {
            "steps": 24,
            "discard": 5,
            "repeats": 3,
            "baseline": arms[0],
            "ablations": {},
            "arms": {},
            **recipe,
        },
        "cells": list(cells),
        "gate": dict(gate),
        "comparison": compare(cells, baseline=arms[0], references=references),
        "published": [],
    } | more


_CPU: dict[str, Any] = {
    "cpu": "Intel(R) Xeon(R) Processor",
    "cores": 2,
    "system": "Linux-6.18.44-x86_64-with-glibc2.39",
    "variables": {"OMP_NUM_THREADS": "1"},
    "devices": ["cpu"],
    "gpus": [],
    "links": [],
}


def green(relative: float, step: int) -> dict[str, Any]:
    """A verdict of the trainer's gate."""
    far = {"relative": relative, "step": step, "baseline": 1.03125, "arm": 1.03125 * (1 + relative)}
    worst = {"loss": far, "grad_norm": {**far, "relative": relative * 7.3, "step": step + 2}}
    noise = {"loss": {**far, "relative": 0.0}, "grad_norm": {**far, "relative": 0.0}}
    return {"green": True, "reasons": [], "worst": worst, "noise": noise, "gradient": None, "notes": []}


def red(reason: str) -> dict[str, Any]:
    """A verdict that withholds everything."""
    return {"green": False, "reasons": [reason], "worst": {}, "noise": {}, "gradient": None, "notes": []}


def losses(shift: float, steps: int = 24) -> list[list[float]]:
    """A curve that falls and wobbles; all but equal for small shifts."""
    curve = (0.31 + 1.1 * math.exp(-step / 9) + 0.05 * math.sin(1.9 * step) for step in range(1, steps + 1))
    return [[step, loss * (1 + shift)] for step, loss in enumerate(curve, 1)]


def trainer() -> Results:
    """The real trainer on a CPU: native, patched, and an arm that failed."""
    ran = [site("pi05/frozen_prefix", 24), site("lerobot_workers/preprocess", 96)]
    common: dict[str, Any] = {"phases": _TRAINER_PHASES, "peak_counts": "process max RSS"}
    cells = [
        cell("native", None, 4.218, **common, peak_allocated_gib=1.913, loss=losses(0.0)),
        cell("patched", None, 8.117, **common, peak_allocated_gib=1.604, loss=losses(3.1e-7), sites=ran),
        cell(
            "patched_compiled", None, None, repeats=0, failure="run 1: exit code 1: no C++ compiler was found"
        ),
    ]
    cells[0]["loader"] = {
        "cached": "native_cached",
        "samples_per_second": cells[0]["samples_per_second"]["median"],
        "samples_per_second_cached": 4.301,
        "bound": "compute",
    }
    recipe = {"name": "pi05_libero_tiny", "description": "pi0.5 (tiny), expert only, LIBERO frames, CPU"}
    return results("trainer", cells, recipe, {"patched": green(3.1e-7, 12)})


def _step_cells() -> Iterator[dict[str, Any]]:
    """pi0.5 on an H200, as published, with ablations, a cell out of memory and one that fell back."""
    work = {"busy_share": 0.9713, "tflop_per_sample": 1.3127}
    for arm, batch, speed, peak in (
        ("native", 8, 37.911, 28.618),
        ("native", 32, 54.029, 81.196),
        ("native", 64, None, None),
        ("native_compiled", 32, 76.534, 59.26),
        ("native_compiled", 64, 79.265, 107.297),
        ("patched", 8, 48.349, 13.693),
        ("patched", 32, 105.506, 14.178),
        ("patched", 256, 157.708, 31.476),
        ("patched_compiled", 32, 147.747, 13.72),
        ("patched_compiled", 256, 197.773, 25.85),
    ):
        failed = {"failure": "out of memory", "repeats": 0} if speed is None else work
        done = {} if speed is None else {"tflops": 1.3127 * speed, "mfu": 1.3127 * speed / 989.5}
        sites = [] if arm.startswith("native") else [site(name, 18 * 7) for name in _SITES]
        yield cell(arm, batch, speed, peak_allocated_gib=peak, sites=sites, **failed, **done)


_SITES = ("pi05/frozen_prefix", "pi05/compact_tokens", "pi05/split_attention", "accelerate_clip/clip")
_ABLATIONS = (
    ("patched_no_split_attention", "split_attention", 32, 91.137),
    ("patched_no_compact_tokens", "compact_tokens", 32, 71.263),
    ("patched_torch_adamw", "optimizer", 32, 102.851),
    ("patched_no_cast_once", "cast_once", 32, 105.391),
)


def step() -> Results:
    """The training step alone on one H200."""
    cells = list(_step_cells())
    for arm, _, batch, speed in _ABLATIONS:
        cells.append(cell(arm, batch, speed, peak_allocated_gib=14.2, sites=[site(_SITES[0], 126)]))
    fell = site("pi05/split_attention", 120, fallbacks=6, why="CompilationError: at 41:17: <unknown> & more")
    cells.append(
        cell(
            "patched_padded",
            32,
            93.442,
            peak_allocated_gib=14.6,
            sites=[fell],
            withheld=[f"fallback: {fell['site']} fell back to the host 6 times: {fell['last_fallback']}"],
        )
    )
    near = {"name": "model.layers.17.mlp.down_proj.weight", "share": 0.5371, "error": 1e-5, "allowed": 1.9e-5}
    verdict = {"green": True, "reasons": [], "worst_parameter": near}
    gate = {one["arm"]: verdict for one in cells if not one["native"]}
    recipe = {
        "name": "pi05_libero",
        "description": "pi0.5, expert only, full size, one H200",
        "ablations": {arm: feature for arm, feature, _, _ in _ABLATIONS},
        "arms": {arm: {"like": "patched", "ablates": feature} for arm, feature, _, _ in _ABLATIONS},
    }
    command = ["python", "-m", "somaspeed_patch", "ab", "pi05_libero", "--synthetic", "--budget", "470"]
    return results("step", cells, recipe, gate, machine=_H200, command=command)


_H200: dict[str, Any] = {
    **_CPU,
    "cores": 32,
    "variables": {"CUDA_SCALE_LAUNCH_QUEUES": "4x"},
    "devices": ["NVIDIA H200"],
    "gpus": [{"name": "NVIDIA H200", "memory_gib": 139.811, "driver": "580.95.05"}] * 2,
    "links": [["X", "NV18"], ["NV18", "X"]],
}


def hostile() -> Results:
    """Every text is `HOSTILE`; a red gate, a withheld baseline and a loss that is no number."""
    reason = f"the parity gate is red: {HOSTILE}"
    arms = (f"native {HOSTILE}", f"patched {HOSTILE}")
    cells = [
        cell(arms[0], 4, 3.5, phases=_TRAINER_PHASES, loss=losses(0.0), notes=[HOSTILE], peak_counts=HOSTILE),
        cell(arms[1], 4, None, withheld=[reason], loss=[[1, "nan"], [2, 0.5]], sites=[site(HOSTILE, 1)]),
    ]
    recipe = {"name": HOSTILE, "description": HOSTILE, "ablations": {HOSTILE: HOSTILE}}
    machine = {**_CPU, "cpu": HOSTILE, "variables": {"NAME": HOSTILE}, "links": [[HOSTILE]]}
    command = ["somaspeed", "ab", HOSTILE]
    verdict = {arms[1]: red(HOSTILE)}
    return results("trainer", cells, recipe, verdict, machine=machine, command=command, commit=None)
