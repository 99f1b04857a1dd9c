"""Did PPO make a policy better? Runs of several seeds, one behind the other and side by side, in one file.

    python -m somaspeed_patch.rl_run.learned RUN RUN ... --out FILE.json

Each run is a folder with a results.json whose first evaluation is of the policy before PPO and whose last
one is of the trained policy, on the same episodes without noise. Written: success before and after, of each
run and of all seeds together, by how many standard errors it rose, the curves, and FILE.svg.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from somaspeed_patch.ab.results import head, plain

log = logging.getLogger(__name__)

Run = Mapping[str, Any]
_KEPT = ("date", "command", "commit", "versions", "machine", "recipe", "curve", "evaluations")
_COLOURS = {"one behind the other": "tab:blue", "side by side": "tab:orange"}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """See the module; also returns what it writes."""
    parser = argparse.ArgumentParser(prog="learned")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    runs = [json.loads((run / "results.json").read_text()) for run in args.runs]
    found = _without_folders(
        {**head("rl learning"), **summary(runs), "runs": [{k: run[k] for k in _KEPT} for run in runs]}
    )
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    _draw(runs, args.out.with_suffix(".svg"))
    for name, way in found["ways"].items():
        log.info("%s: %s", name, {key: way[key] for key in ("before", "after", "standard_errors")})
    return found


def _without_folders(found: dict[str, Any]) -> dict[str, Any]:
    """Files by name alone: where they lay on this machine says nothing to others."""
    folders = set(re.findall(r"(?<![\w.])/(?:[^/\s\",=\[\]]+/)+", json.dumps(found)))
    short = dict.fromkeys(sorted(folders, key=len, reverse=True), "")
    changed: dict[str, Any] = plain(found, short)
    return changed


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """By way: success before and after, over all seeds and of each.

    Raises: ValueError: a run was not evaluated twice.
    """
    ways: dict[str, list[Run]] = {}
    for run in runs:
        ways.setdefault(_way(run), []).append(run)
    return {"ways": {name: _of_all(each) for name, each in ways.items()}}


def _way(run: Run) -> str:
    return "one behind the other" if run["recipe"]["lag"] is None else "side by side"


def _of_all(runs: Sequence[Run]) -> dict[str, Any]:
    seeds = [_of_one(run) for run in runs]
    before, after = (_pooled([seed[when] for seed in seeds]) for when in ("before", "after"))
    return {**_risen(before, after), "seeds": seeds}


def _of_one(run: Run) -> dict[str, Any]:
    every = run["evaluations"]
    if len(every) < 2 or every[0]["iteration"] != 0:
        raise ValueError(
            "learned: a run needs an evaluation before its first iteration and another one later"
        )
    before, after = (_share(each["success"], each["episodes"]) for each in (every[0], every[-1]))
    return {"seed": run["recipe"]["seed"], **_risen(before, after)}


def _share(success: float, episodes: float) -> dict[str, float]:
    error = math.sqrt(success * (1 - success) / episodes)
    return {"success": success, "standard_error": error, "episodes": episodes}


def _pooled(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    episodes = sum(each["episodes"] for each in shares)
    return _share(sum(each["success"] * each["episodes"] for each in shares) / episodes, episodes)


def _risen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """With the difference in standard errors of it."""
    error = math.hypot(before["standard_error"], after["standard_error"])
    gained = after["success"] - before["success"]
    return {"before": before, "after": after, "standard_errors": gained / error if error else math.inf}


def _draw(runs: Sequence[Run], file: Path) -> None:
    """Success against environment steps and against time."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        log.warning("no plot: it needs matplotlib: pip install 'somaspeed-patch[ab]'")
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for each, (name, label) in zip(
        axes, (("env_steps", "environment steps"), ("seconds", "s of wall time")), strict=True
    ):
        for run in runs:
            colour = _COLOURS[_way(run)]
            each.plot(*_points(run["curve"], name), color=colour, alpha=0.5)
            each.plot(*_points(run["evaluations"], name), "o", color=colour)
        each.set(xlabel=label, ylabel="success", ylim=(-0.02, 1.02))
        each.grid(alpha=0.3)
    axes[0].legend(
        [Line2D([], [], color=colour) for colour in _COLOURS.values()]
        + [Line2D([], [], color="black"), Line2D([], [], color="black", marker="o", linestyle="")],
        [*_COLOURS, "rollouts, with noise", "evaluations, without"],
        fontsize="small",
    )
    figure.savefig(file)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[Any], list[Any]]:
    return [each[name] for each in lines], [each["success"] for each in lines]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    main()
