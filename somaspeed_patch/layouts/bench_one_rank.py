"""What a layout's machinery costs where it has nothing to split: one rank, the same step with and without it.

    torchrun --nproc_per_node 1 -m somaspeed_patch.layouts.bench_one_rank pi05_libero --batch 256 --out FILE

Two models of the recipe's `synthetic` section, one of them through `layouts.shard` (FSDP2 on a mesh of one
rank), both patched and compiled, take turns on the same batch: A B B A. Units are gathered and freed,
gradients reduced, as on many ranks, with nobody to talk to; what remains is hooks and copies.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from somaspeed_patch import patched
from somaspeed_patch.ab import machine, ratios, results, synthetic, synthetic_recipe
from somaspeed_patch.ab.synthetic_measure import TARGETS
from somaspeed_patch.ab.synthetic_subject import Subject
from somaspeed_patch.layouts import families, mesh
from somaspeed_patch.layouts.layout import Layout, parse
from somaspeed_patch.layouts.shard import shard

log = logging.getLogger(__name__)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, log a line and write the results; see the module."""
    parser = argparse.ArgumentParser(prog="bench_one_rank")
    parser.add_argument("recipe", help="with a section `synthetic`")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument(
        "--layout", type=parse, default=Layout(), help="for one rank, for example frozen=sharded"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        found = _measure(args, device)
    finally:
        dist.destroy_process_group()
    line = {key: found[key] for key in ("model", "batch", "what", "samples_per_second", "ratio")}
    log.info("%s", json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    recipe = synthetic_recipe.load(args.recipe)
    with ExitStack() as stack:
        stack.enter_context(patched(recipe.model, *TARGETS, compile=not args.eager))
        arms = {name: synthetic.SUBJECTS[recipe.model](recipe, device) for name in ("without", "with")}
        policy = arms["with"].policy
        family = families.of(policy)
        if family is None:
            raise ValueError(f"bench_one_rank: {args.recipe}'s model is of no known family")
        what = shard(policy, family, args.layout, mesh.build(args.layout, device.type))
        for subject in arms.values():
            stack.enter_context(subject.optimized())
        speeds = _speeds(arms, args)
    compared = ratios.ratio(speeds["with"], speeds["without"])
    return {
        **results.head("layout on one rank"),
        "machine": {**machine.processor(), **machine.accelerators()},
        "model": recipe.model,
        "batch": args.batch,
        "updates": args.updates,
        "compiled": not args.eager,
        "what": str(what),
        "samples_per_second": {name: ratios.spread(found) for name, found in speeds.items()},
        "ratio": compared,
    }


def _speeds(arms: dict[str, Subject], args: argparse.Namespace) -> dict[str, list[float]]:
    """Samples a second of each repeat, the median of its updates."""
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    data = {name: subject.batch(args.batch) for name, subject in arms.items()}
    for name in (*arms, *arms):  # compiles; allocates the moments
        arms[name].update(data[name])
    for name in _order(list(arms), args.repeats):
        seconds = [arms[name].update(data[name])["total"] for _ in range(args.updates)]
        speeds[name].append(args.batch / statistics.median(seconds))
    return speeds


def _order(names: list[str], repeats: int) -> Iterator[str]:
    for index in range(repeats):
        yield from (names if index % 2 == 0 else reversed(names))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
