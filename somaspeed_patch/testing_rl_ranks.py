"""What the tests of RL on several ranks share: learners that are given trajectories, on gloo, and alone.

    CASES = (Case(name="plain"), Case(name="stale", stale=True))
    RUNS = {"two": GivenRun(policy="state", ranks=2, layout="dp_shard=2", cases=CASES)}
    found = run_all(__file__, tmp_path)["two"][0]["plain"]     # what rank 0 of that run found in that case

The test file is also the script whose forks are the ranks, see testing_ranks.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import torch
from torch import Tensor

import somaspeed_patch
from somaspeed_patch import testing_ranks
from somaspeed_patch.rl import heads, spread
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.collect import Collector, Plan
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.player import LocalPlayer
from somaspeed_patch.rl.ppo import Clips
from somaspeed_patch.rl.ranks import Ranks, joined
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.trajectory import Trajectory
from somaspeed_patch.testing_rl import state_policy, trajectories, value_head
from somaspeed_patch.testing_rl_reach import ACTIONS, OBSERVED, ReachInterface
from somaspeed_patch.testing_rl_reach_world import SPEC

LIMIT = 120.0  # seconds a run may take; they need 1 to 5
ITERATIONS = 3
HOSTS = ("pi05", "groot", "molmoact2")
SETTINGS = Settings(
    flow=Flow(steps=3, noise_level=0.5), executed=2, global_batch=64, micro_batch=4, actor_lr=1e-3,
    critic_lr=1e-3, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5, clips=Clips(behaviour=None),
)  # fmt: skip
"""One step an iteration, so that the order of samples does not matter; an eps that small gradients feel;
no sample is left out, for what is left of a microbatch weighs more then."""
_LENGTHS = (3, 3, 1, 1, 2, 2, 2, 3)
"""chunks of each trajectory of an iteration; ranks get the first ones of them, and the rest"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one learner does."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    """of PPO, over SETTINGS"""
    stale: bool = False
    """all trajectories are of version 0"""
    work: str = "iterate"
    """a key of WORKS"""
    lag: int = 0
    """of a run side by side"""
    resumes: tuple[str, str] | None = None
    """run and case whose state it begins with"""


@dataclass(frozen=True, kw_only=True)
class GivenRun:
    """Cases on some ranks, one behind the other, over trajectories that all runs of a policy share."""

    policy: str
    """a key of POLICIES"""
    cases: tuple[Case, ...]
    ranks: int = 1
    layout: str | None = None


def run_all(script: str, folder: Path, *names: str, device: str = "cpu") -> dict[str, list[Any]]:
    """What each rank of each run has found; a text where the run failed."""
    ranks = testing_ranks.run_script(script, folder, *names, timeout=900, device=device)
    return {name: _left(folder, name, count) for name, count in ranks.items()}


def _left(folder: Path, name: str, ranks: int) -> Any:
    error = folder / f"{name}.error"
    if error.exists():
        return [error.read_text()] * ranks
    return [torch.load(folder / f"{name}.rank{rank}", weights_only=False) for rank in range(ranks)]


def serve_runs(runs: Mapping[str, GivenRun]) -> None:
    """In the script of `run_all`."""
    testing_ranks.import_once(
        *(f"somaspeed_patch.rl.{name}_flow" for name in HOSTS),
        *(f"lerobot.policies.{name}.modeling_{name}" for name in HOSTS),
        *("somaspeed_patch.layouts.shard", "somaspeed_patch.layouts.states", "somaspeed_patch.optim"),
        *(f"somaspeed_patch.testing_{name}" for name in HOSTS),
    )
    del sys.modules["__main__"].__file__  # else environments import it, and with it torch, in their processes
    testing_ranks.serve(runs, _one_rank, before=lambda *_: None, limit=LIMIT)


def _one_rank(rank: int, run: GivenRun, folder: Path, name: str) -> None:
    with somaspeed_patch.patched(run.policy) if run.policy in HOSTS else nullcontext():
        ranks = joined(run.layout, cpu=testing_ranks.device() == "cpu")
        found = {case.name: _done(run, case, ranks, folder) for case in run.cases}
        ranks.leave()
        torch.save(found, folder / f"{name}.rank{rank}")


def _done(run: GivenRun, case: Case, ranks: Ranks, folder: Path) -> dict[str, Any]:
    policy = POLICIES[run.policy]()
    doing = Doing(
        learner=made(policy, replace(SETTINGS, **dict(case.settings)), ranks),
        ranks=ranks, run=run, case=case,
        folder=folder,
    )  # fmt: skip
    return WORKS[case.work](doing)


def made(policy: FlowPolicy, settings: Settings, ranks: Ranks) -> Learner:
    """A learner over the ranks; those behind the first have begun with other weights."""
    critic = value_head(policy)
    if ranks.rank:
        with torch.no_grad():
            for each in (*policy.trainable().values(), *critic.parameters()):
                each.add_(0.1)
    spread.spread(policy, critic, ranks)
    return Learner(policy, critic, settings, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class Doing:
    """A case on one rank."""

    learner: Learner
    ranks: Ranks
    run: GivenRun
    case: Case
    folder: Path
    """of all runs"""

    def iterate(self) -> dict[str, float]:
        """The learner's next iteration, on this rank's part of the trajectories."""
        every = given(self.run.policy, self.learner.version, stale=self.case.stale)
        return self.learner.iterate(part(every, self.ranks))

    def state(self) -> dict[str, Any]:
        """Whole weights and the state dict."""
        learner = self.learner
        return {
            "weights": heads.snapshot(learner.policy, learner.value_head),
            "state": copy.deepcopy(learner.state_dict()),
        }


def given(name: str, iteration: int, *, stale: bool = False) -> list[Trajectory]:
    """An iteration's trajectories, the same on every rank: of the policy as all begin with it."""
    policy = POLICIES[name]()
    critic, found = value_head(policy), []
    for number, length in enumerate(_LENGTHS):
        rng = torch.Generator().manual_seed(1000 * iteration + number)
        batch = OBSERVATIONS[name](policy, length, 100 * iteration + number)
        found += trajectories(
            policy, critic, batch, SETTINGS.flow, rng, length=length, reward=lambda each: float(each.sum()),
            version=0 if stale else iteration,
        )  # fmt: skip
    return found


def part(every: Sequence[Trajectory], ranks: Ranks) -> list[Trajectory]:
    """A rank's: with two ranks five and three of eight, with three most of them."""
    cuts = {1: (0, 8), 2: (0, 5, 8), 3: (0, 6, 7, 8), 4: (0, 1, 4, 6, 8)}[ranks.size]
    return list(every[cuts[ranks.rank] : cuts[ranks.rank + 1]])


def iterate(doing: Doing) -> dict[str, Any]:
    """Iterations up to the third; weights, metrics, and the learner's whole state behind them."""
    metrics = [doing.iterate() for _ in range(ITERATIONS)]
    return {"metrics": metrics, **doing.state()}


def iterate_once(doing: Doing) -> dict[str, Any]:
    """The first iteration, or the next one of the case that this resumes."""
    before = _resumed(doing)
    return {"metrics": [doing.iterate()], **before, **doing.state()}


def _resumed(doing: Doing) -> dict[str, Any]:
    """Begin with what another case has left on rank 0; what the learner says of itself then."""
    if doing.case.resumes is None:
        return {}
    run, case = doing.case.resumes
    saved = torch.load(doing.folder / f"{run}.rank0", weights_only=False)[case]
    doing.learner.load_state_dict(saved["state"])
    heads.load(doing.learner.policy, doing.learner.value_head, saved["weights"])
    return {"resumed": doing.state()}


def counted(doing: Doing) -> dict[str, Any]:
    """One iteration; which samples each optimizer step had, with the share of each microbatch."""
    learner = doing.learner
    steps: list[list[tuple[float, list[int]]]] = []
    chosen: list[list[int]] = []
    done: list[Any] = []
    update, there = learner._update, learner._there

    def seen(batches: Any) -> dict[str, Tensor]:
        every = list(batches)
        told = zip(every, chosen[len(done) : len(done) + len(every)], strict=True)
        done.extend(every)
        steps.append([(float(batch.share), index) for batch, index in told])
        return update(every)

    def taken(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        chosen.extend(part.tolist() for part in parts)
        return there(parts)

    with replaced.object(learner, "_update", seen), replaced.object(learner, "_there", taken):
        metrics = doing.iterate()
    return {"steps": steps, "metrics": metrics, "made": learner.steps}


def kept(doing: Doing) -> dict[str, Any]:
    """One iteration and its checkpoint, in LeRobot's format."""
    from somaspeed_patch.rl_run.checkpoints import Keeper, Progress
    from somaspeed_patch.rl_run.recipe_file import load

    host: Any = doing.learner.policy.policy
    names = list(host.state_dict())
    found = iterate_once(doing)
    keeper = Keeper(
        doing.folder / f"kept {doing.run.layout}", load("rl_reach"), host.save_pretrained, doing.ranks
    )
    path, again = (keeper.write(doing.learner, Progress(iteration=1, played=(3, 3))) for _ in range(2))
    return {**found, "path": path, "again": again, "names": names}


def side_by_side(doing: Doing) -> dict[str, Any]:
    """Four iterations in the reach world, of four slots in all; what was played and learned."""
    from somaspeed_patch.rl.run import SideBySide

    slots = doing.ranks.share(4)
    twin = _reach()
    actor = Actor(twin, value_head(twin), ReachInterface(), flow=SETTINGS.flow, executed=2)
    with EnvPool([SPEC] * len(slots), start_timeout=60, step_timeout=20) as pool:
        collector = Collector(pool, Plan(episodes=3))
        collector.first_slot = slots.start
        player = LocalPlayer(collector, actor)
        with SideBySide(doing.learner, player, lag=doing.case.lag, stall=60) as running:
            found = list(itertools.islice(running, 4))
    return {
        "played": [
            [(one.env, one.episode, one.version, one.success, len(one)) for one in each.rollout.trajectories]
            for each in found
        ],
        "metrics": [dict(each.metrics) for each in found],
        **doing.state(),
    }


WORKS: Mapping[str, Callable[[Doing], dict[str, Any]]] = {
    "iterate": iterate, "once": iterate_once, "counted": counted, "kept": kept, "side by side": side_by_side,
}  # fmt: skip


def _pi05() -> FlowPolicy:
    from somaspeed_patch.rl.pi05_flow import PI05Flow
    from somaspeed_patch.testing_pi05 import make_policy

    return PI05Flow(make_policy(train_expert_only=True, cameras=1, device=testing_ranks.device()))


def _pi05_batch(policy: FlowPolicy, count: int, seed: int) -> dict[str, Tensor]:
    from somaspeed_patch.testing_pi05 import make_batch

    return make_batch(policy.policy, batch_size=count, seed=seed, language_lengths=[9 + seed % 7] * count)


def _state_batch(policy: FlowPolicy, count: int, seed: int) -> dict[str, Tensor]:
    return {"observation": torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))}


def _reach() -> FlowPolicy:
    return state_policy(observed=OBSERVED, horizon=3, actions=ACTIONS)


def _groot() -> FlowPolicy:
    from somaspeed_patch import testing_groot
    from somaspeed_patch.rl.groot_flow import GrootFlow

    return GrootFlow(testing_groot.make_policy())


def _groot_batch(policy: FlowPolicy, count: int, seed: int) -> dict[str, Any]:
    from somaspeed_patch import testing_groot

    found: dict[str, Any] = testing_groot.make_batch(
        policy.policy, images=2, tasks=["pick up the bowl"] * count, seed=seed
    )
    return found


def _molmoact2() -> FlowPolicy:
    from somaspeed_patch import testing_molmoact2
    from somaspeed_patch.rl.molmoact2_flow import MolmoAct2Flow

    host = testing_molmoact2.make_policy(
        cameras=1, train_action_expert_only=True, action_mode="continuous", num_inference_steps=3
    )
    return MolmoAct2Flow(host)


def _molmoact2_batch(policy: FlowPolicy, count: int, seed: int) -> dict[str, Any]:
    from somaspeed_patch import testing_molmoact2

    found: dict[str, Any] = testing_molmoact2.make_batch(
        policy.policy, tasks=["pick up the bowl"] * count, seed=seed
    )
    return found


POLICIES: Mapping[str, Callable[[], FlowPolicy]] = {
    "state": state_policy, "reach": _reach, "pi05": _pi05, "groot": _groot, "molmoact2": _molmoact2,
}  # fmt: skip
OBSERVATIONS: Mapping[str, Callable[[FlowPolicy, int, int], dict[str, Any]]] = {
    "state": _state_batch, "pi05": _pi05_batch, "groot": _groot_batch, "molmoact2": _molmoact2_batch,
}  # fmt: skip


def far(found: Any, expected: Any, where: str = "", *, at_most: float = 1e-5) -> str:
    """Where two nests of dicts, tensors and numbers differ by more; nothing if nowhere."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return f"{where}: {found if not isinstance(found, Mapping) else found.keys() ^ expected.keys()}"
        each = (far(found[n], expected[n], f"{where}/{n}", at_most=at_most) for n in expected)
        return next(filter(None, each), "")
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{where}: {len(found)} entries, expected {len(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        return next(filter(None, (far(a, b, f"{where}/{n}", at_most=at_most) for n, (a, b) in pairs)), "")
    if isinstance(expected, Tensor):
        same = found.shape == expected.shape and found.dtype == expected.dtype
        off = (found.cpu() - expected.cpu()).abs().max().item() if same and found.numel() else 0.0
        return "" if same and off <= at_most else f"{where}: off by {off}"
    if isinstance(expected, float):
        return (
            ""
            if abs(found - expected) <= at_most * max(1.0, abs(expected))
            else f"{where}: {found}, {expected}"
        )
    return "" if found == expected else f"{where}: {found}, expected {expected}"
