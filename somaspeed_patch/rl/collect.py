"""Rollouts: every slot plays the same number of episodes, all with one version of the policy.

What an episode is like depends on seed, slot and number alone: its initial state, its draws, and in lockstep
also who is beside it in a batch, so that a rollout can be repeated bit for bit. Without lockstep slots that
are ready act at once; sums may round otherwise then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from somaspeed_patch.rl import env_process, flow_sde
from somaspeed_patch.rl.actor import Acts, Decision
from somaspeed_patch.rl.env_pool import EnvPool, Failed
from somaspeed_patch.rl.env_process import Observation
from somaspeed_patch.rl.flow_sde import Draws
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.trajectory import Chunk, Trajectory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rollout plays."""

    episodes: int = 1
    """of every slot"""
    init_states: Sequence[int] = tuple(range(50))
    """of the task, to choose from"""
    seed: int = 0
    lockstep: bool = True
    noise: bool = True
    """False: without the stochastic step, as for an evaluation"""
    ignore_last: bool = False
    shared_step: bool = False
    """all that act at once have the same stochastic step, as in RLinf"""
    bootstrap: bool = False
    """an episode that is cut at the horizon is worth what comes after it; False: as if it had ended there, as
    in published runs. Where only success ends an episode, a critic that errs makes being cut attractive: the
    test world's success fell from 0.75 to 0 with it, and rose to 0.8 without"""
    films: int = 0
    """episodes of each rollout that are filmed, the first ones, dealt round the slots"""

    def __post_init__(self) -> None:
        if self.episodes < 1 or not self.init_states:
            raise ValueError("rollout: needs at least one episode a slot and one initial state")


@dataclass
class _Seat:
    """One slot's episode."""

    slot: int
    number: int
    """of the slot, among those of all pools"""
    episode: int
    rng: torch.Generator
    seen: Observation | None = None
    decision: Decision | None = None
    chunks: list[Chunk] = field(default_factory=list)
    cut: bool = False
    """the episode is over, but what comes after it needs a value"""
    film: list[NDArray[np.uint8]] | None = None
    """what was seen so far of an episode that is filmed"""
    instruction: str = ""


@dataclass(frozen=True, kw_only=True)
class Film:
    """Of one episode."""

    slot: int
    episode: int
    success: bool
    instruction: str
    """of the task; "" where the environment gives none"""
    pictures: list[NDArray[np.uint8]]
    """[H, W, 3] each: after the reset and after every environment step; empty without images"""


@dataclass
class Rollout:
    """What was played."""

    trajectories: list[Trajectory]
    failures: list[Failed]
    state: list[int] = field(default_factory=list)
    """of the collector behind it, see `Collector.resume`"""
    films: list[Film] = field(default_factory=list)

    @property
    def success(self) -> float:
        """Share of episodes that solved the task."""
        return float(np.mean([each.success for each in self.trajectories]))

    @property
    def env_steps(self) -> int:
        """Of all episodes that are in it."""
        return sum(each.env_steps for each in self.trajectories)


class Collector:
    """Plays episodes in a pool of environments."""

    def __init__(self, pool: EnvPool, plan: Plan) -> None:
        self._pool, self._plan = pool, plan
        self._played = [0] * len(pool)
        self.first_slot = 0
        """number of the pool's first slot among those of all pools: it decides draws and initial states"""
        self._left = [0] * len(pool)
        self._stopping = False

    def collect(self, actor: Acts, phases: Phases | None = None) -> Rollout:
        """One rollout, with the actor's version.

        Raises: RuntimeError: an environment was lost too often, see `EnvPool`, or `stop` was called.
        """
        phases = phases or Phases("rollout")
        rollout = Rollout([], [])
        while self._pool.owed:  # of a rollout that was stopped
            self._pool.ready()
        self._left = [self._plan.episodes] * len(self._pool)
        seats = {slot: self._begin(slot) for slot in range(len(self._pool))}
        while seats:
            with phases.of("env"):
                results = self._results()
            for slot, result in results:
                seat = seats[slot]
                if isinstance(result, Failed):
                    rollout.failures.append(replace(result, slot=seat.number))
                    seats[slot] = self._begin(slot, seat)
                else:
                    self._take(seat, result)
            self._finish(actor, seats, rollout)
            with phases.of("predict"):
                self._decide(actor, seats, rollout)
        rollout.trajectories.sort(key=lambda each: (each.episode, each.env))
        rollout.state = self.state
        return rollout

    @property
    def state(self) -> list[int]:
        """Episodes that each slot has begun, see `resume`."""
        return list(self._played)

    def stop(self) -> None:
        """Let `collect`, in another thread, end with an error before its next chunk."""
        self._stopping = True

    def resume(self, state: Sequence[int]) -> None:
        """Go on behind the rollout whose `state` this is."""
        if len(state) != len(self._played):
            raise ValueError(f"rollout: a state of {len(state)} slots for {len(self._played)}")
        self._played = list(state)

    def _begin(self, slot: int, again: _Seat | None = None) -> _Seat:
        """A slot's next episode, or the one again that its worker was lost in."""
        if again is None:
            episode = self._played[slot]
            self._played[slot] += 1
            self._left[slot] -= 1
        else:
            episode = again.episode
        number = self.first_slot + slot
        seeds = np.random.SeedSequence([self._plan.seed, number, episode])
        rng = torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
        choice = int(torch.randint(len(self._plan.init_states), (), generator=rng))
        filmed = again.film is not None if again else self._filmed(slot)
        self._pool.submit_reset(slot, self._plan.init_states[choice], filmed=filmed)
        return _Seat(slot, number, episode, rng, film=[] if filmed else None)

    def _filmed(self, slot: int) -> bool:
        """Whether the episode that this slot begins is one of the rollout's first `films`."""
        nth = self._plan.episodes - 1 - self._left[slot]  # of this slot in this rollout
        return nth * len(self._pool) + slot < self._plan.films

    def _results(self) -> list[tuple[int, Observation | env_process.Chunk | Failed]]:
        """Those that are in; in lockstep those of all slots that play, in order."""
        if self._stopping:
            raise RuntimeError("rollout: stopped")
        found = list(self._pool.ready())
        while self._plan.lockstep and self._pool.owed:
            found += self._pool.ready()
        return sorted(found, key=lambda each: each[0])

    def _decide(self, actor: Acts, seats: dict[int, _Seat], rollout: Rollout) -> None:
        """All that have seen something act; those that were cut are only valued."""
        waiting = [seat for seat in seats.values() if seat.seen is not None]
        if not waiting:
            return
        observations = [seat.seen for seat in waiting if seat.seen is not None]
        draws = [self._draws(actor, seat) for seat in waiting]
        if self._plan.shared_step:
            draws = [replace(each, k=draws[0].k) for each in draws]
        decisions = actor.act(observations, draws)
        for seat, decision in zip(waiting, decisions, strict=True):
            if seat.cut:
                self._end(seat, seats, rollout, actor.version, decision.value)
            else:
                seat.decision, seat.seen = decision, None
                self._pool.submit_step(seat.slot, decision.actions)

    def _finish(self, actor: Acts, seats: dict[int, _Seat], rollout: Rollout) -> None:
        """Episodes that are over and need no value."""
        over = [seat for seat in seats.values() if seat.seen is not None and _ended(seat) and not seat.cut]
        for seat in over:
            self._end(seat, seats, rollout, actor.version, None)

    def _end(
        self, seat: _Seat, seats: dict[int, _Seat], rollout: Rollout, version: int, value: float | None
    ) -> None:
        """Keep an episode, and begin the slot's next one if there is any."""
        rollout.trajectories.append(_trajectory(seat, version, value))
        if seat.film is not None:
            rollout.films.append(_film(seat, seat.film, rollout.trajectories[-1].success))
        if self._left[seat.slot] > 0:
            seats[seat.slot] = self._begin(seat.slot)
        else:
            del seats[seat.slot]

    def _draws(self, actor: Acts, seat: _Seat) -> Draws:
        drawn = flow_sde.draw(1, actor.shape, actor.flow, seat.rng, ignore_last=self._plan.ignore_last)
        if self._plan.noise:
            return drawn
        return Draws(noise=drawn.noise, step_noise=drawn.step_noise, k=torch.full_like(drawn.k, -1))

    def _take(self, seat: _Seat, result: Observation | env_process.Chunk) -> None:
        """What a slot answered: the first observation, or what became of its chunk."""
        if not isinstance(result, env_process.Chunk):
            seat.seen = result
            _watch_reset(seat, result)
            return
        if seat.decision is None:
            raise RuntimeError(f"rollout: slot {seat.slot} answered a step that it was not asked for")
        seat.chunks.append(_chunk(seat.decision, result))
        if seat.film is not None:
            seat.film.extend(result.pictures)
        seat.seen, seat.cut = result.observation, bool(result.truncated.any()) and self._plan.bootstrap


def _watch_reset(seat: _Seat, seen: Observation) -> None:
    """The first picture of a film."""
    shown = env_process.picture(seen)
    if seat.film is not None and shown is not None:
        seat.film.append(shown)
    if seat.film is not None and env_process.INSTRUCTION in seen:
        seat.instruction = str(seen[env_process.INSTRUCTION])


def _film(seat: _Seat, pictures: list[NDArray[np.uint8]], success: bool) -> Film:
    return Film(
        slot=seat.number,
        episode=seat.episode,
        success=success,
        instruction=seat.instruction,
        pictures=pictures,
    )


def _chunk(decision: Decision, result: env_process.Chunk) -> Chunk:
    dones = np.maximum.accumulate(result.terminated | result.truncated)
    return decision.chunk(torch.from_numpy(result.rewards.copy()), torch.from_numpy(dones))


def _trajectory(seat: _Seat, version: int, value: float | None) -> Trajectory:
    """Of an episode that ended (no value), or was cut where this is what comes after it."""
    return Trajectory(
        env=seat.number,
        episode=seat.episode,
        version=version,
        chunks=seat.chunks,
        terminated=value is None,
        final_value=0.0 if value is None else value,
        success=any(bool((chunk.rewards > 0).any()) for chunk in seat.chunks),
    )


def _ended(seat: _Seat) -> bool:
    return bool(seat.chunks) and bool(seat.chunks[-1].dones.any())
