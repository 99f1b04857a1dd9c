"""One run from its recipe to its results: iterations, and between them records, checkpoints, evaluations."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import somaspeed_patch
from somaspeed_patch.rl import ranks as rl_ranks
from somaspeed_patch.rl.collect import Rollout
from somaspeed_patch.rl.player import Player
from somaspeed_patch.rl.ranks import Ranks
from somaspeed_patch.rl.run import Iteration, SideBySide, one_behind_the_other
from somaspeed_patch.rl_run import build, checkpoints, outcomes, results, screen, videos
from somaspeed_patch.rl_run.build import Built
from somaspeed_patch.rl_run.checkpoints import Keeper, Progress, Saved
from somaspeed_patch.rl_run.outcomes import Played
from somaspeed_patch.rl_run.recipe import Recipe
from somaspeed_patch.rl_run.records import EVALUATION, ITERATION, Muted, Records
from somaspeed_patch.rl_run.stops import RankStops, Stopped, Stops

log = logging.getLogger(__name__)


class RunFailed(RuntimeError):
    """An iteration could not be finished; the text says which, at what, and what is left."""


def joined(recipe: Recipe) -> Ranks:
    """The ranks that a launcher has started for a recipe, or this process alone.

    Raises: ValueError: the recipe's layout is of another number of ranks.
    """
    cpu = recipe.policy.device is not None and recipe.policy.device.startswith("cpu")
    return rl_ranks.joined(recipe.layout_text, cpu=cpu, patience=2 * recipe.timeouts.stall)


def run(recipe: Recipe, out: Path, *, resume: bool = False, ranks: Ranks | None = None) -> int:
    """The whole run, in the main thread; 0, or 128 and the number of the signal that ended it.

    Args:
        out: folder of everything that is written; the same for all ranks, which read checkpoints in it.
        resume: go on behind the last checkpoint in `out`; without one, begin.
        ranks: those that train together, all of which call this and leave in the end; None: see `joined`.
    Raises: ValueError: it cannot be begun, in words. RunFailed: it was begun, but could not be finished.
    """
    ranks = ranks or joined(recipe)
    with Stops() if ranks.size == 1 else RankStops() as stops:
        try:
            _run(recipe, out, stops, _saved(recipe, out, ranks, resume=resume), ranks)
        except Stopped as stopped:
            if ranks.leads:
                last = checkpoints.finished(out / "checkpoints")
                screen.say(f"stopped by {stopped}; {_left(last)}")
            return 128 + stopped.number
        ranks.leave()
    return 0


def _saved(recipe: Recipe, out: Path, ranks: Ranks, *, resume: bool) -> Saved | None:
    """What to go on with."""
    last = ranks.first(lambda: _last(out, resume=resume))
    if last is None:
        return None
    saved = checkpoints.load(last)
    saved.check(recipe)
    return saved


def _last(out: Path, *, resume: bool) -> Path | None:
    folder = out / "checkpoints"
    checkpoints.clean(folder)
    found = checkpoints.finished(folder)
    if not resume and (found or (out / "metrics.jsonl").exists()):
        raise ValueError(f"rl: {out} has a run in it; go on with --resume, or name another --out")
    return found[-1] if found else None


def _run(recipe: Recipe, out: Path, stops: Stops, saved: Saved | None, ranks: Ranks) -> None:
    out.mkdir(parents=True, exist_ok=True)
    policy = saved.folder / checkpoints.POLICY if saved and recipe.policy.type else None
    found = build.built(recipe, policy, ranks)
    try:
        if saved is not None:
            saved.restore(found.learner)
        Session(recipe, out, stops, found, saved, policy).go()
    finally:
        if found.pool is not None:
            found.pool.close()


class Session:
    """What goes on between two iterations."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        stops: Stops,
        found: Built,
        saved: Saved | None,
        policy: Path | None = None,
    ) -> None:
        """Take what was built, and begin or go on.

        Args: policy: the folder that the policy was loaded from in place of the recipe's.
        """
        self._recipe, self._out, self._stops, self._built = recipe, out, stops, found
        self._policy, self._ranks = policy, found.ranks
        self.progress = Progress() if saved is None else saved.progress
        self._before, self._begun = self.progress.seconds, time.monotonic()
        self._aside = 0.0  # seconds of evaluations since the last iteration
        self._keeper = Keeper(out, recipe, found.parts.save, found.ranks)
        self._records = self._begin_records()
        self._tasks = [spec.task for spec in recipe.env.specs()]
        self._stage = "start"
        found.learner.watch = self._training

    def _begin_records(self) -> Records:
        progress = self.progress
        if not self._ranks.leads:
            return Muted()
        return Records(self._recipe, self._out, iteration=progress.iteration, env_steps=progress.env_steps)

    def go(self) -> None:
        """Until the recipe's last iteration. Raises: RunFailed, Stopped."""
        if self._ranks.leads:
            self._head()
        try:
            with closing(self._records), self._iterations() as (iterations, player):
                try:
                    self._all(iterations, player)
                except Stopped as stopped:
                    if stopped.clean:
                        self._checkpoint(always=True)
                    raise
        except Exception as error:
            raise RunFailed(self._failed(error)) from error
        if self._ranks.leads:
            self._results()

    def _results(self) -> None:
        try:
            results.write(self._recipe, self._out, self._records.lines)
        except OSError as error:
            log.warning("results could not be written into %s: %s", self._out, error)

    def _all(self, iterations: Iterator[Iteration], player: Player | None) -> None:
        total = self._recipe.iterations
        self._evaluate(player)
        while self.progress.iteration < total:
            self._stage = "rollout"
            self._after(next(iterations))
            self._stops.done()
            self._evaluate(player)
        if not self._checkpoint(always=True):
            raise OSError("checkpoint: the last one could not be written; make room, then --resume")

    @contextmanager
    def _iterations(self) -> Iterator[tuple[Iterator[Iteration], Player | None]]:
        """In the recipe's way, behind the rollout that was trained on last."""
        recipe, found, learner = self._recipe, self._built, self._built.learner
        played = self.progress.played[found.slots.start : found.slots.stop]
        if recipe.lag is None and recipe.backend == "processes":
            collector = found.collector()
            if played:
                collector.resume(played)
            yield one_behind_the_other(learner, collector, found.actor(), waiting=self._waiting), None
            return
        with ExitStack() as stack:
            player = build.make_player(recipe, found, self._policy)
            self._stops.listen()
            if hasattr(player, "close"):
                stack.callback(player.close)
            if played:
                player.resume(played)
            yield _Lazily(stack, lambda: self._side_by_side(player)), player

    def _side_by_side(self, player: Player) -> SideBySide:
        recipe, learner = self._recipe, self._built.learner
        stall = recipe.timeouts.stall
        return SideBySide(learner, player, lag=recipe.lag or 0, stall=stall, waiting=self._waiting)

    def _waiting(self) -> AbstractContextManager[None]:
        """What a rank does by itself: play, or wait for its own rollout; the ranks meet behind it."""
        return self._interruptible(self._stops) if isinstance(self._stops, RankStops) else nullcontext()

    @contextmanager
    def _interruptible(self, stops: RankStops) -> Iterator[None]:
        """Raises: Stopped, on all ranks: a signal came to one of them."""
        try:
            with stops.waiting():
                yield
        except Stopped:
            log.debug("rl: rank %d was interrupted", self._ranks.rank)
        told = self._ranks.each((stops.wanted, self.progress.iteration))
        wanted = [number for number, _ in told if number is not None]
        if wanted:
            raise Stopped(wanted[0], clean=len({iteration for _, iteration in told}) == 1)

    def _training(self) -> None:
        self._stops.train()
        self._stage = "train"

    def _after(self, done: Iteration) -> None:
        """Everything that an iteration leaves."""
        self._stage = "record"
        line = self._line(done, outcomes.together(self._ranks.each(outcomes.played(done.rollout))))
        self._records.add(line, _scalars(line, done))
        if self._ranks.leads:
            self._say(line, done)
        self._checkpoint()

    def _say(self, line: Mapping[str, Any], done: Iteration) -> None:
        if line["iteration"] == 1:
            sizes = [each.bytes / len(each) for each in done.rollout.trajectories]
            screen.say(screen.sample_size(sum(sizes) / len(sizes)))
        screen.say(screen.iteration(line, self._recipe.iterations))

    def _line(self, done: Iteration, rollout: Played) -> dict[str, Any]:
        """What metrics.jsonl has of an iteration; `progress` is behind it then."""
        before = self.progress
        self.progress = Progress(
            iteration=done.number + 1,
            env_steps=before.env_steps + rollout.env_steps,
            seconds=self._seconds(),
            played=rollout.state,
        )
        now, took = self.progress, self.progress.seconds - before.seconds - self._aside
        self._aside = 0.0
        found = outcomes.of(rollout.outcomes, self._tasks)
        queue = {"queue": done.metrics["charts/queue"]} if "charts/queue" in done.metrics else {}
        return {
            "kind": ITERATION,
            "iteration": now.iteration,
            "time": time.time(),
            "seconds": now.seconds,
            "env_steps": now.env_steps,
            **found,
            "return": outcomes.mean_return(rollout.outcomes),
            "env_steps_per_second": rollout.env_steps / took,
            "samples_per_second": done.metrics["charts/samples"] / took,
            "lag": done.metrics["charts/lag"],
            **queue,
            "lost": rollout.lost,
            "memory_mib": _memory(),
            "phases": done.seconds,
        }

    def _seconds(self) -> float:
        """Of the whole run so far."""
        return self._before + time.monotonic() - self._begun

    def _checkpoint(self, *, always: bool = False) -> bool:
        """Where it is due; False where it could not be written."""
        every, behind = self._recipe.checkpoint.every, self.progress.iteration
        due = always or (every > 0 and behind % every == 0)
        if not due or behind == 0:
            return True
        self._stage = "checkpoint"
        return self._keeper.write(self._built.learner, self.progress) is not None

    def _evaluate(self, player: Player | None) -> None:
        """Where it is due, and not done before a resume."""
        every, behind = self._recipe.evaluate.every, self.progress.iteration
        due = every > 0 and (behind % every == 0 or behind == self._recipe.iterations)
        if not due or self._ranks.first(lambda: self._records.evaluated(behind)):
            return
        self._stage = "evaluation"
        begun = time.monotonic()
        rollout = self._evaluated(player)
        played = outcomes.together(self._ranks.each(outcomes.played(rollout)))
        if self._ranks.leads:
            self._record(rollout, played)
        self._aside += time.monotonic() - begun

    def _evaluated(self, player: Player | None) -> Rollout:
        """This rank's share of the episodes."""
        with ExitStack() as stack:
            with self._waiting():
                collector = stack.enter_context(self._built.evaluating(player))
            actor = self._built.evaluator()
            with self._waiting():
                rollout = collector.collect(actor)
        return rollout

    def _record(self, rollout: Rollout, every: Played) -> None:
        """What is left of an evaluation; films are of this rank's share."""
        behind = self.progress.iteration
        written = videos.write(rollout.films, self._out / "videos" / f"{behind:06d}")
        found = outcomes.of(every.outcomes, self._tasks)
        line = {
            "kind": EVALUATION,
            "iteration": behind,
            "time": time.time(),
            "seconds": self._seconds(),
            "env_steps": self.progress.env_steps,
            **found,
            "videos": [str(each.relative_to(self._out)) for each in written],
        }
        self._records.add(line, {"charts/evaluated_success": found["success"]})
        screen.say(screen.evaluation(line))

    def _head(self) -> None:
        for line in (*screen.head(self._built, self._recipe), str(somaspeed_patch.report())):
            screen.say(line)
        if self._recipe.evaluate.videos and (why := videos.why_not()) is not None:
            log.warning("%s; the run goes on without", why)
        if self.progress.iteration:
            screen.say(f"going on behind iteration {self.progress.iteration}")

    def _failed(self, error: Exception) -> str:
        nth, kind = self.progress.iteration + 1, type(error).__name__
        last = self._keeper.finished()
        who = f"rank {self._ranks.rank} of {self._ranks.size}: " if self._ranks.size > 1 else ""
        return f"rl: {who}iteration {nth} failed at its {self._stage}: {kind}: {error}; {_left(last)}"


class _Lazily:
    """Iterations side by side, which begin to be played when the first one is asked for."""

    def __init__(self, stack: ExitStack, make: Any) -> None:
        self._stack, self._make = stack, make
        self._run: Iterator[Iteration] | None = None

    def __iter__(self) -> _Lazily:
        return self

    def __next__(self) -> Iteration:
        if self._run is None:
            self._run = iter(self._stack.enter_context(self._make()))
        return next(self._run)


def _scalars(line: Mapping[str, Any], done: Iteration) -> dict[str, float]:
    """By CleanRL's names, and seconds of each thread's phases."""
    perf = {
        f"perf/{who}/{phase}": each for who, phases in done.seconds.items() for phase, each in phases.items()
    }
    return {
        **done.metrics,
        **perf,
        "charts/success": line["success"],
        "charts/episodic_return": line["return"],
        "charts/env_steps": float(line["env_steps"]),
        "charts/SPS": line["env_steps_per_second"],
        "charts/lost_environments": float(line["lost"]),
        "perf/memory_mib": line["memory_mib"],
    }


def _memory() -> float:
    """MiB of this process's resident memory; NaN where there is no /proc."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return float("nan")
    return int(file.read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def _left(finished: list[Path]) -> str:
    if not finished:
        return "there is no checkpoint yet"
    return f"the last checkpoint is {finished[-1]}; go on with --resume"
