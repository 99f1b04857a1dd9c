"""Players for tests of Ray workers, made in the workers' processes: healthy ones, and every fault of one.

As a program, `python -m somaspeed_patch.testing_rl_ray FOLDER RAY_INIT_AS_JSON`, a driver for tests to kill.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from somaspeed_patch.rl import heads
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.collect import Collector, Plan, Rollout
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.env_process import Observation
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.player import LocalPlayer
from somaspeed_patch.rl.ray_player import RayPlayer
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.value_head import ValueHead
from somaspeed_patch.testing_rl import state_policy
from somaspeed_patch.testing_rl_reach import ACTIONS, OBSERVED, ReachInterface
from somaspeed_patch.testing_rl_reach_world import SPEC

FLOW = Flow(steps=3, noise_level=0.5)
EXECUTED, CRITIC = 2, (32,)
SETTINGS = Settings(
    flow=FLOW, executed=EXECUTED, global_batch=64, micro_batch=64, update_epoch=4,
    actor_lr=3e-3, critic_lr=3e-3, weight_decay=0.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MakeReach:
    """Makes players in the reach world."""

    slots: Sequence[int] = (4,)
    """of each worker"""
    plan: Plan = Plan(episodes=4)
    width: int = OBSERVED
    """numbers of an observation: those of the world, then zeros"""
    report: Path | None = None
    """folder for a file a process: `WORKER-ITS_ID`, holding its environments' ids"""
    dies: int = 0
    """how many times worker 0 is killed in its third decision; needs `report`"""
    slow: float = 0.0
    """seconds of each decision"""
    hangs: bool = False
    """worker 1 never gets its player"""
    late: bool = False
    """play under the version before the one asked for"""

    def __call__(self, worker: int, workers: int) -> LocalPlayer:
        """See `ray_worker.MakePlayer`."""
        if workers != len(self.slots):
            raise ValueError(f"made for {len(self.slots)} workers, not {workers}")
        pool = EnvPool([SPEC] * self.slots[worker], start_timeout=60, step_timeout=20)
        killed = 0
        if self.report is not None:
            killed = len(list(self.report.glob("0-*")))
            environments = " ".join(str(each.process.pid) for each in pool._workers if each.process)
            (self.report / f"{worker}-{os.getpid()}").write_text(environments)
        if self.hangs and worker == 1:
            time.sleep(600)
        interface = Reach(self.width, self.slow, dies=worker == 0 and killed < self.dies)
        return (Late if self.late else LocalPlayer)(Collector(pool, self.plan), self.actor(interface))

    def actor(self, interface: ReachInterface) -> Actor:
        """With weights of its own, the same in each process."""
        policy = state_policy(observed=self.width, horizon=3, actions=ACTIONS, seed=5)
        return Actor(policy, ValueHead(self.width, CRITIC), interface, flow=FLOW, executed=EXECUTED)


def learned(width: int = OBSERVED) -> Learner:
    """A learner of the reach world, the same each time."""
    torch.manual_seed(1)
    policy = state_policy(observed=width, horizon=3, actions=ACTIONS)
    return Learner(policy, ValueHead(width, CRITIC), SETTINGS)


class Reach(ReachInterface):
    """The reach world's interface, wide, slow and mortal as asked for."""

    def __init__(self, width: int = OBSERVED, slow: float = 0.0, *, dies: bool = False) -> None:
        self._width, self._slow, self._left = width, slow, 3 if dies else -1

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """{"observation": [B, width]}."""
        time.sleep(self._slow)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        states = np.stack([each["state"] for each in observations])
        return {"observation": torch.from_numpy(np.pad(states, ((0, 0), (0, self._width - OBSERVED))))}


class Late(LocalPlayer):
    """Plays under the version before the one asked for."""

    def play(self, weights: Mapping[str, Tensor], version: int, phases: Phases) -> Rollout:
        """See `Player`."""
        return super().play(weights, version - 1, phases)


def gives_none(worker: int, workers: int) -> Any:
    """No player."""
    return (worker, workers)


def raises(worker: int, workers: int) -> LocalPlayer:
    """As a factory does whose checkpoint is not on that machine."""
    raise FileNotFoundError(f"no checkpoint for worker {worker}")


def reported(folder: Path, worker: int = 0) -> list[tuple[int, list[int]]]:
    """Ids of a worker's processes, in turn, each with those of its environments."""
    files = sorted(folder.glob(f"{worker}-*"), key=lambda each: each.stat().st_mtime_ns)
    return [(int(each.name.split("-")[1]), [int(i) for i in each.read_text().split()]) for each in files]


def processes(folder: Path, workers: int = 1) -> list[int]:
    """Ids of all that have reported."""
    found = [each for worker in range(workers) for each in reported(folder, worker)]
    return [each for worker, environments in found for each in (worker, *environments)]


def alive(process: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(found: Sequence[int], seconds: float = 30.0) -> bool:
    """Whether these processes end within that time."""
    until = time.monotonic() + seconds
    while any(alive(each) for each in found) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(alive(each) for each in found)


def drive(folder: Path, how: dict[str, Any]) -> None:
    """Play for a minute; says `started` when the worker is there."""
    ray: Any = importlib.import_module("ray")
    ray.init(**how)
    make = MakeReach(slots=(2,), plan=Plan(episodes=99), slow=0.2, report=folder)
    player, actor = RayPlayer(make), make.actor(ReachInterface())
    print("started", flush=True)
    player.play(heads.of(actor.policy, actor.value_head), 0, Phases("rollout"))


if __name__ == "__main__":
    # imported anew, for what belongs to `__main__` would travel by value
    importlib.import_module("somaspeed_patch.testing_rl_ray").drive(
        Path(sys.argv[1]), json.loads(sys.argv[2])
    )
