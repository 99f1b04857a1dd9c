"""What steps and resets of LeRobot's LIBERO environment cost the CPU, patched and not; whether they agree.

    python -m somaspeed_patch.libero.bench --out FILE [--episodes 20]

Each task is built twice, unpatched (render at every step, hard resets) and patched (soft resets, images of
the settled scene and of every 8th step), and plays the same random episodes; every other task begins with the
patched one. Compared bit for bit: states, the flag `terminated` and numpy's random numbers at every step, the
images where a policy with chunks of 8 looks. Times are CPU seconds of the process, all threads, LeRobot's own
Python around the simulator included. The first reset, which builds the scene, is timed by itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.ab import machine, results
from somaspeed_patch.ab.ratios import spread
from somaspeed_patch.libero import bootstrap
from somaspeed_patch.testing_libero import Episode, counted_renders, differences, make_env, play
from somaspeed_patch.versions import table

log = logging.getLogger(__name__)

# A plain table, an open drawer (more random numbers at each reset), a stove, and the living room.
TASKS = "libero_spatial:0,libero_spatial:4,libero_goal:7,libero_10:0"
ARMS = ("reference", "patched")


@dataclass(kw_only=True)
class Timed:
    """An environment whose calls are timed, in CPU seconds."""

    env: Any
    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def reset(self, **kwargs: Any) -> Any:
        """The environment's, timed."""
        begin = time.process_time()
        result = self.env.reset(**kwargs)
        self.resets.append(time.process_time() - begin)
        return result

    def step(self, action: Any) -> Any:
        """The environment's, timed."""
        begin = time.process_time()
        result = self.env.step(action)
        self.steps.append(time.process_time() - begin)
        return result

    def render(self) -> Any:
        """The environment's, outside the times."""
        return self.env.render()


@dataclass(kw_only=True)
class Block:
    """One arm's episodes of one task."""

    task: str
    arm: str
    build: float
    timed: Timed
    episodes: list[Episode]
    chunk: int

    def step_ms(self) -> list[float]:
        """CPU ms a step, one value a chunk."""
        chunks = np.array(self.timed.steps).reshape(-1, self.chunk)
        return [round(1000 * float(value), 3) for value in chunks.mean(axis=1)]


def run_block(task: str, arm: str, args: argparse.Namespace, count: int) -> Block:
    """Play `count` episodes of one task with one arm."""
    log.info("%s, %s: %d episodes", task, arm, count)
    if arm == "reference":
        return _play(task, arm, args, count)
    with somaspeed_patch.patched("lerobot_libero", render_every=str(args.chunk)):
        return _play(task, arm, args, count)


def _play(task: str, arm: str, args: argparse.Namespace, count: int) -> Block:
    suite, _, index = task.partition(":")
    env = make_env(suite, int(index), image_size=args.image_size)
    np.random.seed(0)
    begin = time.process_time()
    env.reset(seed=0)  # builds the scene
    build = time.process_time() - begin
    timed = Timed(env=env)
    steps = args.chunk * args.chunks
    with counted_renders() as counted:
        episodes = [play(timed, counted, seed=n, number=n, steps=steps) for n in range(count)]
    env.close()
    return Block(task=task, arm=arm, build=build, timed=timed, episodes=episodes, chunk=args.chunk)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All tasks with both arms; the results."""
    tasks = args.tasks.split(",")
    counts = [len(part) for part in np.array_split(np.arange(args.episodes), len(tasks))]
    blocks: dict[str, dict[str, Block]] = {}
    for number, (task, count) in enumerate(zip(tasks, counts, strict=True)):
        order = ARMS if number % 2 == 0 else ARMS[::-1]
        blocks[task] = {arm: run_block(task, arm, args, count) for arm in order}
    return {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "equality": equality(blocks, args.chunk),
        "step_cpu_ms": compare(
            {arm: [block[arm].step_ms() for block in blocks.values()] for arm in ARMS}, tasks
        ),
        "reset_cpu_s": compare(
            {arm: [block[arm].timed.resets for block in blocks.values()] for arm in ARMS}, tasks
        ),
        "first_reset_cpu_s": compare(
            {arm: [[block[arm].build] for block in blocks.values()] for arm in ARMS}, tasks
        ),
        "renders": {arm: renders([block[arm] for block in blocks.values()]) for arm in ARMS},
        "sites": {site.site: [site.calls, site.native_calls, site.fallbacks] for site in sites.every()},
    }


def equality(blocks: Mapping[str, Mapping[str, Block]], chunk: int) -> dict[str, Any]:
    """How many episodes were compared, and everything that differed in a bit."""
    found, episodes, states, images = [], 0, 0, 0
    for task, arms in blocks.items():
        pairs = zip(arms["patched"].episodes, arms["reference"].episodes, strict=True)
        for number, (ours, theirs) in enumerate(pairs):
            found += [f"{task}, episode {number}, {what}" for what in differences(ours, theirs, every=chunk)]
            if ours.terminated != theirs.terminated:
                found.append(f"{task}, episode {number}, terminated")
            episodes, states = episodes + 1, states + len(ours.observations)
            images += 2 * len(ours.observations[::chunk])
    return {"episodes": episodes, "states": states, "images": images, "differences": found}


def compare(values: Mapping[str, Sequence[Sequence[float]]], tasks: Sequence[str]) -> dict[str, Any]:
    """Spread of each arm over all tasks, and the reference's median over ours, of all and by task."""
    pooled = {arm: spread([float(v) for task in values[arm] for v in task]) for arm in ARMS}
    medians = {arm: [float(np.median(task)) for task in values[arm]] for arm in ARMS}
    by_task = [theirs / ours for theirs, ours in zip(*(medians[arm] for arm in ARMS), strict=True)]
    return {
        **pooled,
        "ratio": pooled["reference"]["median"] / pooled["patched"]["median"],
        "ratio_by_task": dict(zip(tasks, by_task, strict=True)),
    }


def renders(blocks: Sequence[Block]) -> dict[str, float]:
    """Images rendered in a reset and, on average, in a step."""
    episodes = [episode for block in blocks for episode in block.episodes]
    return {
        "reset": float(np.mean([episode.renders[0] for episode in episodes])),
        "step": float(np.mean([count for episode in episodes for count in episode.renders[1:]])),
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="CPU time of LeRobot's LIBERO environment, with and without."
    )
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument("--episodes", type=int, default=20, help="of all tasks together")
    parser.add_argument("--tasks", default=TASKS, help="SUITE:INDEX with commas")
    parser.add_argument("--chunk", type=int, default=8, help="steps from look to look")
    parser.add_argument("--chunks", type=int, default=3, help="of an episode")
    parser.add_argument("--image-size", type=int, default=128, help="pixels")
    parser.add_argument("--gl", default="osmesa", help="egl or osmesa")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write the results, and exit with 3 where the arms differ in a bit."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    bootstrap.setup(args.gl)
    loads = [os.getloadavg()[0]]
    found = {**results.head("libero_env"), "machine": machine.processor(), **measure(args)}
    found["load_before_and_after"] = [*loads, os.getloadavg()[0]]
    found["versions"] |= table(("hf-libero", "robosuite", "mujoco", "numpy"))
    sites.write_json(args.out, results.plain(found, {sys.executable: "python", str(Path.home()): "~"}))
    for name in ("step_cpu_ms", "reset_cpu_s", "first_reset_cpu_s"):
        medians = [found[name][arm]["median"] for arm in ARMS]
        log.info("%s: %.2f -> %.2f, %.1f times fewer", name, *medians, found[name]["ratio"])
    if found["equality"]["differences"]:
        log.error("the arms differ: %s", found["equality"]["differences"][:5])
        sys.exit(3)


if __name__ == "__main__":
    main()
