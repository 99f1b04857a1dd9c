"""How many samples a second the learner trains, by memory mode and batch, with graphs and without.

    python -m somaspeed_patch.rl_bench.learner --out FILE

pi0.5 at full size with random weights, random images; a sample is trained on once an iteration, optimizer
steps included. `recompute` runs the frozen backbone in the learner, through the same patched forward that
rollouts encode with.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch import patched
from somaspeed_patch.ab.ratios import ratio, spread
from somaspeed_patch.rl import stores
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl_bench import parts

log = logging.getLogger(__name__)

ARMS = ("recompute", "host_eager", "host", "device")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """See the module; also returns what it writes."""
    args = _parser().parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with patched("pi05", compile=args.compile):
        subject = parts.subject(args.size, device)
        cells = [cell for batch in args.batches for cell in _cells(subject, batch, args)]
    found = {**parts.head("RL learner", args), "cells": cells, "ratios": list(_ratios(cells))}
    for each in found["ratios"]:
        log.info("%s", each)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl_bench.learner")
    parser.add_argument("--size", default="full")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128], help="samples of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of an optimizer step")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps an iteration")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--executed", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="the patched layers, too")
    parser.add_argument("--out", type=Path)
    return parser


def _cells(subject: parts.Subject, batch: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every arm, in turns over the repeats; the first iteration of each is not counted."""
    arms = {name: _Arm(name, subject, batch, args) for name in ARMS}
    for arm in arms.values():
        arm.iterate()
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(args.repeats):
        for name in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
            rates[name].append(arms[name].iterate())
    for name, arm in arms.items():
        cell = {"arm": name, "batch": batch, "samples_per_second": spread(rates[name]), **arm.facts()}
        log.info("%s", cell)
        yield cell


class _Arm:
    """A learner with samples in one memory mode."""

    def __init__(self, name: str, subject: parts.Subject, batch: int, args: argparse.Namespace) -> None:
        mode, _, eager = name.partition("_")
        self._store = stores.make(mode, subject.policy, subject.interface)  # type: ignore[arg-type]
        settings = parts.settings(args, micro_batch=batch, global_batch=batch * args.microbatches)
        critic = subject.value_head()
        self._learner = Learner(subject.policy, critic, settings, store=self._store, graphs=not eager)
        actor = subject.actor(subject.policy, critic, settings, graphs=False)
        count = batch * args.microbatches * args.updates
        self._episodes = parts.episodes(actor, count, self._store, args.image_size)
        self._trained = [*subject.policy.trainable().values(), *critic.parameters()]
        self._gradients: list[torch.Tensor | None] = [None for _ in self._trained]

    def iterate(self) -> float:
        """Samples a second."""
        self._exchange()
        episodes = [replace(each, version=self._learner.version) for each in self._episodes]
        begun = time.perf_counter()
        self._learner.iterate(episodes)
        seconds = time.perf_counter() - begun
        self._exchange()
        return sum(map(len, episodes)) / seconds

    def _exchange(self) -> None:
        """The arms train one policy, each with gradients of its own: graphs know where theirs are."""
        for index, each in enumerate(self._trained):
            each.grad, self._gradients[index] = self._gradients[index], each.grad

    def facts(self) -> dict[str, Any]:
        """What else there is to say."""
        kept = self._episodes[0].chunks[0].record
        return {"bytes_per_sample": kept.bytes, "replays": self._learner.replays}


def _ratios(cells: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Cached over recomputed, and graphs over none, at the same batch."""
    speeds = {(cell["arm"], cell["batch"]): cell["samples_per_second"]["repeats"] for cell in cells}
    for batch in sorted({cell["batch"] for cell in cells}):
        for arm, against in (("host", "recompute"), ("device", "recompute"), ("host", "host_eager")):
            found = ratio(speeds[arm, batch], speeds[against, batch])
            yield {"arm": arm, "against": against, "batch": batch, **found}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    main()
