"""What is left of a run: results.json, and success drawn against environment steps and against time."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import machine
from somaspeed_patch.ab.results import head
from somaspeed_patch.rl_run.recipe import Recipe
from somaspeed_patch.rl_run.records import EVALUATION, ITERATION, Lines

log = logging.getLogger(__name__)

_CURVE = (
    "iteration",
    "env_steps",
    "seconds",
    "success",
    "standard_error",
    "episodes",
    "return",
    "lag",
    "lost",
)
_AXES = (("env_steps", "environment steps"), ("seconds", "seconds of wall time"))
Points = Sequence[Mapping[str, Any]]


def write(recipe: Recipe, out: Path, lines: Lines) -> list[Path]:
    """results.json, and success.svg and success.png where matplotlib is installed; what was written."""
    every = list(lines.read())
    curve = [{name: each[name] for name in _CURVE} for each in every if each["kind"] == ITERATION]
    names = (*_CURVE[:6], "tasks", "videos")
    evaluations = [{name: each[name] for name in names} for each in every if each["kind"] == EVALUATION]
    found = {
        **head("rl"),
        "machine": {**machine.processor(), **machine.accelerators()},
        "recipe": recipe.plain(),
        "curve": curve,
        "evaluations": evaluations,
    }
    file = out / "results.json"
    file.write_text(json.dumps(found, indent=2) + "\n")
    return [file, *draw(recipe.name, curve, evaluations, out)]


def draw(title: str, curve: Points, evaluations: Points, out: Path) -> list[Path]:
    """The plots; nothing without matplotlib, which is logged."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no plot of success: it needs matplotlib: pip install 'somaspeed-patch[ab]'")
        return []
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2, sharey=True), _AXES, strict=True):
        _band(axes, curve, name)
        _points(axes, evaluations, name)
        axes.set(xlabel=label, ylabel="success", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    files = [out / "success.svg", out / "success.png"]
    for file in files:
        figure.savefig(file)
    return files


def _band(axes: Any, curve: Points, name: str) -> None:
    """Training rollouts, with noise, and a standard error to either side."""
    x, y, error = ([each[key] for each in curve] for key in (name, "success", "standard_error"))
    axes.plot(x, y, label="rollouts, with noise")
    low = [max(a - b, 0.0) for a, b in zip(y, error, strict=True)]
    high = [min(a + b, 1.0) for a, b in zip(y, error, strict=True)]
    axes.fill_between(x, low, high, alpha=0.25)


def _points(axes: Any, evaluations: Points, name: str) -> None:
    x, y, error = ([each[key] for each in evaluations] for key in (name, "success", "standard_error"))
    axes.errorbar(x, y, error, fmt="o", capsize=3, label="evaluations, without noise")
