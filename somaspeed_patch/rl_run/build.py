"""From a recipe to what runs: policy, critic, learner, environments, collector, actor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from somaspeed_patch.rl import heads, spread, stores
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.collect import Collector, Plan
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.env_process import EnvSpec, Observation
from somaspeed_patch.rl.features import Features, Record, Tag
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.interface import Interface
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.player import LocalPlayer, Player
from somaspeed_patch.rl.ranks import Ranks, share
from somaspeed_patch.rl.stores import Kept, Store
from somaspeed_patch.rl.trajectory import Trajectory
from somaspeed_patch.rl.value_head import ValueHead
from somaspeed_patch.rl_run.recipe import Recipe
from somaspeed_patch.rl_run.turns import TurnPlayer

_EVALUATION = 1_000_003  # added to the seed: evaluations are not played where the policy was trained


class Parts(Protocol):
    """What `policy.factory`, called with the recipe, gives for a policy of your own."""

    @property
    def policy(self) -> FlowPolicy:
        """The policy; random weights of it come from torch's seed, which is set."""

    @property
    def interface(self) -> Interface:
        """Between the environments' numbers and the policy's."""

    def save(self, directory: Path) -> None:
        """Write the policy into an existing folder, for whoever loads it; resuming does not need it."""


class WatchedLearner(Learner):
    """Says when it begins to change the weights."""

    watch: Callable[[], None] = staticmethod(lambda: None)

    def iterate(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """See `Learner`."""
        self.watch()
        return super().iterate(trajectories)


class NothingKept(Store):
    """Of evaluations, whose features nobody trains on: 512 episodes of pi0.5 would take 238 GiB."""

    mode = "host"

    def keep(self, encoded: Features, tag: Tag, observations: Sequence[Observation]) -> Sequence[Record]:
        """Records without anything in them."""
        return [Record(tokens={}, fixed={}, tag=tag) for _ in observations]

    def read(self, kept: Sequence[Kept], tag: Tag, tokens: int | None) -> Features:
        """Raises: RuntimeError: always."""
        raise RuntimeError(
            "rl: features of an evaluation are not kept, so that nothing can be trained on them"
        )


@dataclass(kw_only=True)
class Built:
    """Everything that a run is made of."""

    recipe: Recipe
    parts: Parts
    learner: WatchedLearner
    store: Store
    pool: EnvPool | None
    """this rank's; None: the rollouts' environments are elsewhere"""
    ranks: Ranks = field(default_factory=Ranks)
    whole: tuple[FlowPolicy, ValueHead] | None = None
    """what acts where the learner's weights are sharded; None: they are not"""

    @property
    def slots(self) -> range:
        """Which of the recipe's slots are played here."""
        return self.ranks.share(self.recipe.env.slots)

    def actor(self, *, twin: bool = False) -> Actor:
        """With the learner's weights, or others that follow them."""
        policy, critic = self.whole or (self.parts.policy, self.learner.value_head)
        if twin and self.whole is None:
            policy = policy.twin()
            critic = _critic(self.recipe, policy)
        return _actor(self.recipe, policy, critic, self.parts.interface, self.store)

    def evaluator(self) -> Actor:
        """With the learner's weights as they are now, keeping no features. All ranks call it.

        Where they are sharded it takes the rollout's copy, so none is played meanwhile.
        """
        learner, store = self.learner, NothingKept(self.parts.policy)
        policy, critic = self.whole or (self.parts.policy, learner.value_head)
        if self.whole is not None:
            heads.load(policy, critic, heads.whole(learner.policy, learner.value_head))
        return _actor(self.recipe, policy, critic, self.parts.interface, store)

    def collector(self) -> Collector:
        """Of the rollouts that are trained on."""
        if self.pool is None:
            raise RuntimeError("rl: the environments are not in this process")
        return self._playing(plan(self.recipe), self.pool)

    def _playing(self, wanted: Plan, pool: EnvPool) -> Collector:
        found = Collector(pool, wanted)
        found.first_slot = self.slots.start
        return found

    @contextmanager
    def evaluating(self, player: Player | None) -> Iterator[Collector]:
        """What plays evaluations, in the rollouts' environments between two of them, or else in its own."""
        recipe = self.recipe
        wanted = evaluation(recipe) if self.ranks.leads else replace(evaluation(recipe), films=0)
        turn = player.paused(recipe.timeouts.stall) if isinstance(player, TurnPlayer) else nullcontext()
        with turn:
            if self.pool is not None:
                yield self._playing(wanted, self.pool)
                return
            with pool(recipe) as own:
                yield self._playing(wanted, own)


def built(recipe: Recipe, saved: Path | None = None, ranks: Ranks | None = None) -> Built:
    """Policy, critic, learner, and the environments unless they are elsewhere; close the pool in the end.

    Args:
        saved: a LeRobot policy as a checkpoint has it, in place of the recipe's path.
        ranks: those that train together, all of which call this; None: this process alone.
    Raises: ValueError: the policy cannot be made, cannot be trained from cached features, or not on so many
        ranks. RuntimeError: an environment does not start.
    """
    ranks = ranks or Ranks()
    _check_backend(recipe, ranks)
    slots = ranks.share(recipe.env.slots)
    parts = make_parts(recipe, saved)
    torch.manual_seed(recipe.seed + 1)  # what the policy drew for random weights does not matter
    critic = _critic(recipe, parts.policy)
    whole = _whole(recipe, parts.policy) if ranks.sharded else None
    spread.spread(parts.policy, critic, ranks)
    store = _store(recipe, parts)
    learner = WatchedLearner(parts.policy, critic, recipe.ppo, store=store, ranks=ranks)
    processes = recipe.backend == "processes"
    made = pool(recipe, recipe.env.specs()[slots.start : slots.stop]) if processes else None
    return Built(
        recipe=recipe, parts=parts, learner=learner, store=store, pool=made, ranks=ranks, whole=whole
    )


def _check_backend(recipe: Recipe, ranks: Ranks) -> None:
    if recipe.backend == "ray":
        if ranks.size > 1:
            raise ValueError(
                f"backend: ray plays for one learner, but {ranks.size} ranks were started; use backend: "
                "processes, of which each rank has its share"
            )
        _ray()


def _whole(recipe: Recipe, policy: FlowPolicy) -> tuple[FlowPolicy, ValueHead]:
    """What acts beside a learner whose weights are about to be sharded; the frozen ones are one."""
    spread.freeze_unused(policy)
    twin = policy.twin()
    return twin, _critic(recipe, twin)


def make_parts(recipe: Recipe, saved: Path | None = None) -> Parts:
    """The recipe's policy and its interface."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.policy.plugin is not None:
        importlib.import_module(recipe.policy.plugin)
    torch.manual_seed(recipe.seed)
    if recipe.policy.factory is not None:
        return cast(Parts, _named(recipe.policy.factory, "policy.factory")(recipe))
    from somaspeed_patch.rl_run import lerobot_policy

    return lerobot_policy.make(recipe, saved)


def _named(name: str, where: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise ValueError(f"{where}: expected module:name of a function, but {name!r} is none")
    return cast("Callable[..., Any]", found)


def _critic(recipe: Recipe, policy: FlowPolicy) -> ValueHead:
    return ValueHead(policy.value_width, recipe.policy.critic).to(policy.device)


def _store(recipe: Recipe, parts: Parts) -> Store:
    """Where features wait for the learner: of rollout and learner together."""
    return stores.make(recipe.memory, parts.policy, parts.interface)


def _actor(
    recipe: Recipe, policy: FlowPolicy, critic: ValueHead, interface: Interface, store: Store
) -> Actor:
    return Actor(policy, critic, interface, flow=recipe.ppo.flow, executed=recipe.ppo.executed, store=store)


def plan(recipe: Recipe) -> Plan:
    """Of the rollouts that are trained on."""
    wanted = recipe.rollout
    return Plan(
        episodes=wanted.episodes,
        init_states=wanted.init_states,
        seed=recipe.seed,
        lockstep=wanted.lockstep,
        ignore_last=wanted.ignore_last,
        shared_step=wanted.shared_step,
        bootstrap=wanted.bootstrap,
    )


def evaluation(recipe: Recipe) -> Plan:
    """Of the evaluations: always the same episodes, in lockstep, without noise."""
    return Plan(
        episodes=recipe.evaluate.episodes,
        init_states=recipe.rollout.init_states,
        seed=_EVALUATION + recipe.seed,
        noise=False,
        films=recipe.evaluate.videos,
    )


def pool(recipe: Recipe, specs: list[EnvSpec] | None = None) -> EnvPool:
    """The recipe's environments, or some of them."""
    times = recipe.timeouts
    return EnvPool(specs or recipe.env.specs(), step_timeout=times.step, start_timeout=times.start)


def player(recipe: Recipe, saved: Path | None = None, number: int = 0, workers: int = 1) -> LocalPlayer:
    """A player with everything of its own, for another process: its environments are one share of the slots.

    Args:
        saved: see `built`.
        number, workers: which of how many shares; they differ by a slot at most, the first ones are larger.
    """
    parts = make_parts(recipe, saved)
    critic, store = _critic(recipe, parts.policy), _store(recipe, parts)
    actor = _actor(recipe, parts.policy, critic, parts.interface, store)
    slots = share(recipe.env.slots, number, workers)
    own = pool(recipe, recipe.env.specs()[slots.start : slots.stop])
    return LocalPlayer(Collector(own, plan(recipe)), actor)


def make_player(recipe: Recipe, found: Built, saved: Path | None) -> Player:
    """Who plays while the learner trains."""
    if recipe.backend == "ray":
        return _ray_player(recipe, saved)
    return TurnPlayer(found.collector(), found.actor(twin=True))


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError("backend: ray needs Ray: pip install 'somaspeed-patch[ray]'") from error


def _ray_player(recipe: Recipe, saved: Path | None) -> Player:
    from somaspeed_patch.rl.ray_player import RayPlayer, WorkerOptions

    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    options = WorkerOptions(num_cpus=recipe.ray.num_cpus, num_gpus=recipe.ray.num_gpus)
    return RayPlayer(partial(player, recipe, saved), recipe.ray.workers, options=options)
