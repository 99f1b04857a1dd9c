r"""What a layout costs and gains at full size: the same step with and without it, on any number of ranks.

    torchrun --nproc_per_node 2 -m somaspeed_patch.layouts.bench_ranks pi05_libero --batch 256 \
        --layout dp_shard=2 --out FILE

Each rank holds two models of the recipe's `synthetic` section, one of them through the layout, both patched
and compiled. They take turns on the same batches, A B B A: "without" is this rank alone, talking to nobody,
"with" all ranks together; the slowest counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from somaspeed_patch import patched
from somaspeed_patch.ab import (
    machine,
    ratios,
    results,
    synthetic,
    synthetic_measure,
    synthetic_profile,
    synthetic_recipe,
)
from somaspeed_patch.ab.synthetic_measure import TARGETS
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.ab.synthetic_subject import Subject
from somaspeed_patch.layouts import families, launch
from somaspeed_patch.layouts.layout import Layout, parse

log = logging.getLogger(__name__)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; rank 0 logs a line and writes the results. See the module.

    Raises: ValueError: the layout does not fit the ranks or the model, or has stages (`pp`), for which the
        step belongs to the trainer.
    """
    args = _parser().parse_args(words)
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        found = _measure(args, device)
        first = dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
    line = {key: found[key] for key in ("model", "batch", "layout", "what", "samples_per_second", "ratio")}
    if first:
        log.info("%s", json.dumps(line))
    if first and args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_ranks")
    parser.add_argument("recipe", help="with a section `synthetic`")
    parser.add_argument("--batch", type=int, required=True, help="samples of each replica")
    parser.add_argument("--layout", type=parse, default=Layout(), help="for example dp_shard=2")
    parser.add_argument("--alone", action="store_true", help="only the arm with the layout")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--profile", action="store_true", help="one more update of each arm, for its kernels")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--out", type=Path)
    return parser


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda")


def _measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    recipe = synthetic_recipe.load(args.recipe)
    layout = args.layout.on(dist.get_world_size())
    if layout.pp > 1:
        raise ValueError(f"bench_ranks: {args.layout} has stages; measure pp through the trainer")
    with ExitStack() as stack:
        stack.enter_context(patched(recipe.model, *TARGETS, compile=not args.eager))
        arms = {} if args.alone else {"without": synthetic.SUBJECTS[recipe.model](recipe, device)}
        arms["with"] = synthetic.SUBJECTS[recipe.model](recipe, device)
        what = _spread(arms["with"], recipe, layout, device)
        for subject in arms.values():
            stack.enter_context(subject.optimized())
        seed = 1 + dist.get_rank() // layout.tp
        data = {name: subject.batch(args.batch, seed=seed) for name, subject in arms.items()}
        ran = {name: _warm(subject, data[name]) for name, subject in arms.items()}
        seconds = _seconds(arms, data, args)
        profiles = {
            name: synthetic_profile.largest(subject, data[name], statistics.median(seconds[name]))
            for name, subject in arms.items()
            if args.profile
        }
    speeds = _speeds(seconds, args.batch, layout)
    compared = None if args.alone else ratios.ratio(speeds["with"], speeds["without"])
    return {
        **results.head("layout on ranks"),
        "machine": {**machine.processor(), **machine.accelerators()},
        "model": recipe.model,
        "batch": args.batch,
        "updates": args.updates,
        "compiled": not args.eager,
        "ranks": dist.get_world_size(),
        "layout": str(layout),
        "what": what,
        "samples_per_second": {name: ratios.spread(found) for name, found in speeds.items()},
        "peak_gib": synthetic_measure.peak(device),  # of this rank, with two models of both
        "ratio": compared,
        "sites": ran,
        "profiles": profiles,
    }


def _spread(subject: Subject, recipe: Synthetic, layout: Layout, device: torch.device) -> str:
    """Put the policy on the ranks, in place; what became of it."""
    family = families.of(subject.policy)
    if family is None:
        raise ValueError(f"bench_ranks: the recipe's {recipe.model} is of no known family")
    return launch.spread(subject.policy, family, layout, device)


def _warm(subject: Subject, data: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Two updates, which compile and allocate the moments; per site, what ran in them."""
    before = synthetic_measure.counts()
    for _ in range(2):
        subject.update(data)
    return synthetic_measure.ran_since(before)


def _seconds(
    arms: dict[str, Subject], data: dict[str, dict[str, Tensor]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Of each repeat: the median of its updates, each as long as the slowest rank's."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for name in _order(list(arms), args.repeats):
        updates = [_slowest(arms[name].update(data[name])["total"]) for _ in range(args.updates)]
        seconds[name].append(statistics.median(updates))
    return seconds


def _speeds(seconds: dict[str, list[float]], batch: int, layout: Layout) -> dict[str, list[float]]:
    """Samples a second of each repeat: of this rank alone, or of all replicas."""
    replicas = {"without": 1, "with": layout.dp_replicate * layout.dp_shard}
    return {name: [batch * replicas[name] / each for each in found] for name, found in seconds.items()}


def _slowest(seconds: float) -> float:
    """The longest of all ranks; also lets them begin the next update together."""
    value = torch.tensor(seconds, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _order(names: list[str], repeats: int) -> Iterator[str]:
    for index in range(repeats):
        yield from (names if index % 2 == 0 else reversed(names))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
