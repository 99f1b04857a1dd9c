"""Whole PPO iterations of pi0.5 with real LIBERO rollouts: recomputed or cached, in turn or side by side.

    python -m somaspeed_patch.rl_bench.iteration --out FILE

Random weights solve nothing, so every episode lasts to the horizon and all iterations have the same samples.
All arms use the same environment processes, the same patched forward and graphs; `sync_recompute` differs
from `sync_cached` by the memory mode alone, `async_cached` by playing while the learner trains. The
environments' own rate is theirs with actions that come from nowhere in no time, measured before the first and
behind every cell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch import patched
from somaspeed_patch.rl import stores
from somaspeed_patch.rl.collect import Collector, Plan
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.env_process import LIBERO, EnvSpec
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.player import LocalPlayer
from somaspeed_patch.rl.run import Iteration, SideBySide, one_behind_the_other
from somaspeed_patch.rl_bench import parts
from somaspeed_patch.rl_bench.nobody import Nobody

log = logging.getLogger(__name__)

ARMS = ("sync_recompute", "sync_cached", "async_cached")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """See the module; also returns what it writes."""
    args = _parser().parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = EnvSpec(
        suite=args.suite, task=args.task, image_size=args.image_size, horizon=args.horizon,
        software_gl_profile=args.software_gl, cores=args.env_cores, factory=args.factory,
    )  # fmt: skip
    with patched("pi05", compile=args.compile), EnvPool([spec] * args.slots) as pool:
        _env_rate(pool, args)  # the first rollout takes twice as long: new processes read their meshes
        own = [_env_rate(pool, args)]
        subject = parts.subject(args.size, device)
        found = {**parts.head("RL iteration", args), "env_steps_per_second": own, "cells": []}
        for epochs, arm in itertools.product(args.epochs, args.arms):
            found["cells"].append(_cell(subject, pool, arm, epochs, args))
            own.append(_env_rate(pool, args))  # between cells: it drifts by a fifth within minutes
            if args.out:
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    for each in _summary(found):
        log.info("%s", each)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl_bench.iteration")
    parser.add_argument("--size", default="full")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--epochs", type=int, nargs="+", default=[4, 2, 1], help="update_epoch")
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--factory", default=LIBERO)
    parser.add_argument("--slots", type=int, default=14)
    parser.add_argument("--env-cores", type=int, help="that all environments share")
    parser.add_argument("--episodes", type=int, default=1, help="of each slot and iteration")
    parser.add_argument("--horizon", type=int, default=240)
    parser.add_argument("--executed", type=int, default=5, help="steps of a chunk")
    parser.add_argument("--steps", type=int, default=3, help="K, network evaluations a chunk")
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=2048)
    parser.add_argument("--warm-up", type=int, default=2, help="iterations that are not counted")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--software-gl", action="store_true", help="other images, for a CPU")
    parser.add_argument("--compile", action="store_true", help="the patched layers, too")
    parser.add_argument("--out", type=Path)
    return parser


def _collector(pool: EnvPool, args: argparse.Namespace) -> Collector:
    return Collector(pool, Plan(episodes=args.episodes, lockstep=False))


def _env_rate(pool: EnvPool, args: argparse.Namespace) -> float:
    """Environment steps a second of a rollout, resets included, with nobody who thinks."""
    begun = time.perf_counter()
    rollout = _collector(pool, args).collect(Nobody(args.executed))
    return rollout.env_steps / (time.perf_counter() - begun)


def _cell(
    subject: parts.Subject, pool: EnvPool, arm: str, epochs: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One arm's iterations."""
    settings = parts.settings(
        args, micro_batch=args.micro_batch, global_batch=args.global_batch, update_epoch=epochs
    )
    kind, _, mode = arm.partition("_")
    store = stores.make("recompute" if mode == "recompute" else "host", subject.policy, subject.interface)
    learner = Learner(subject.policy, subject.value_head(), settings, store=store)
    with ExitStack() as stack:
        if kind == "sync":
            actor = subject.actor(subject.policy, learner.value_head, settings, store=store)
            parts.warm_up(actor, args.image_size)
            run: Iterator[Iteration] = one_behind_the_other(learner, _collector(pool, args), actor)
        else:
            actor = subject.actor(subject.policy.twin(), subject.value_head(), settings, store=store)
            parts.warm_up(actor, args.image_size)
            player = LocalPlayer(_collector(pool, args), actor)
            run = iter(stack.enter_context(SideBySide(learner, player, lag=1)))
        timed = list(_timed(run, args))
    subject.policy.policy.zero_grad(set_to_none=True)
    cell = {"arm": arm, "update_epoch": epochs, "replays": learner.replays, "iterations": timed}
    log.info("%s, update_epoch %d: %s", arm, epochs, [round(each["seconds"], 2) for each in timed])
    return cell


def _timed(run: Iterator[Iteration], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Nothing of an iteration is held while the next one is played: memory is handed on as in a real run."""
    for _ in range(args.warm_up):
        next(run)
    begun = time.perf_counter()
    for _ in range(args.iterations):
        found = _facts(next(run))
        now = time.perf_counter()
        yield {"seconds": now - begun, **found}
        begun = now


def _facts(done: Iteration) -> dict[str, Any]:
    return {
        "env_steps": done.rollout.env_steps,
        "samples": done.metrics["charts/samples"],
        "lag": done.metrics["charts/lag"],
        "failures": len(done.rollout.failures),
        "phases": done.seconds,
    }


def _summary(found: dict[str, Any]) -> Iterator[str]:
    rates = found["env_steps_per_second"]
    own = statistics.median(rates)
    yield f"environments alone: {own:.1f} env steps/s ({min(rates):.1f} to {max(rates):.1f})"
    for cell in found["cells"]:
        seconds = statistics.fmean(each["seconds"] for each in cell["iterations"])
        rate = statistics.fmean(each["env_steps"] / each["seconds"] for each in cell["iterations"])
        phases = cell["iterations"][-1]["phases"]
        split = {who: {k: round(v, 2) for k, v in each.items() if v} for who, each in phases.items()}
        yield (
            f"{cell['arm']:15s} x{cell['update_epoch']} {seconds:7.2f} s an iteration, "
            f"{rate:6.1f} env steps/s ({rate / own:.0%} of the environments' own) {split}"
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    main()
