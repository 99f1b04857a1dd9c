"""Whole runs in environment processes: learning, in turn and side by side, and what goes wrong."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch

from somaspeed_patch.rl import heads
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.collect import Collector, Plan
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.player import LocalPlayer
from somaspeed_patch.rl.run import SideBySide, one_behind_the_other
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.value_head import ValueHead
from somaspeed_patch.testing_rl import state_policy
from somaspeed_patch.testing_rl_env import FACTORY as FAULTY
from somaspeed_patch.testing_rl_env import HANG, KILLED
from somaspeed_patch.testing_rl_reach import ACTIONS, OBSERVED, ReachInterface
from somaspeed_patch.testing_rl_reach_world import SPEC

pytestmark = pytest.mark.usefixtures("steps_by_torch")
SLOTS = 4
SETTINGS = Settings(
    flow=Flow(steps=3, noise_level=0.5), executed=2, global_batch=64, micro_batch=64, update_epoch=4,
    actor_lr=3e-3, critic_lr=3e-3, weight_decay=0.0,
)  # fmt: skip
ONE_GOAL = Plan(episodes=8, init_states=(0,))  # 0.65 away: by chance it is reached once in 20


@pytest.fixture(scope="module")
def pool():
    with EnvPool([SPEC] * SLOTS, start_timeout=60, step_timeout=20) as made:
        yield made


def made(pool, plan=None, lag=None, **settings):
    """A learner, a collector, and an actor of its own."""
    policy = state_policy(observed=OBSERVED, horizon=3, actions=ACTIONS)
    torch.manual_seed(1)
    learner = Learner(policy, ValueHead(OBSERVED, (32,)), replace(SETTINGS, **settings))
    twin, critic = policy.twin(), ValueHead(OBSERVED, (32,))
    actor = Actor(twin, critic, ReachInterface(), flow=SETTINGS.flow, executed=2)
    return learner, Collector(pool, plan or Plan(episodes=4)), actor


def first(iterations, count):
    return list(itertools.islice(iterations, count))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights(learner):
    return heads.snapshot(learner.policy, learner.value_head)


def played(rollout):
    """What decides what comes after: all numbers of all chunks."""
    return [
        (each.env, each.episode, each.version, each.success, each.terminated, each.final_value)
        + tuple(
            (chunk.value, chunk.k, *chunk.x.flatten().tolist(), *chunk.rewards.tolist())
            for chunk in each.chunks
        )
        for each in rollout.trajectories
    ]


def test_a_rollout_is_the_same_again_and_goes_on_where_it_was(pool):
    ways = []
    for _ in range(2):
        _, collector, actor = made(pool)
        ways.append([played(collector.collect(actor)) for _ in range(2)])
    assert ways[0] == ways[1] and ways[0][0] != ways[0][1]
    _, collector, actor = made(pool)
    state = collector.collect(actor).state
    _, later, actor = made(pool)
    later.resume(state)
    assert played(later.collect(actor)) == ways[0][1]


def test_every_slot_plays_its_episodes_and_what_they_are_is_told(pool):
    _, collector, actor = made(pool, Plan(episodes=5, bootstrap=True))
    actor.version = 7
    rollout = collector.collect(actor)
    assert [(each.episode, each.env) for each in rollout.trajectories] == [
        (episode, slot) for episode in range(5) for slot in range(SLOTS)
    ]
    assert {each.version for each in rollout.trajectories} == {7} and not rollout.failures
    for each in rollout.trajectories:
        rewards = torch.cat([chunk.rewards for chunk in each.chunks])
        assert each.success == bool(rewards.sum()) and rewards.sum() in (0, 1)
        assert each.terminated == each.success  # else it was cut, and worth something
        assert (each.final_value != 0) == (not each.terminated)
        assert len(each) <= math.ceil(SPEC.horizon / 2) and each.env_steps <= SPEC.horizon
        assert not any(chunk.dones.any() for chunk in each.chunks[:-1]) and each.chunks[-1].dones.any()
    assert 0 < rollout.success < 1


def test_a_cut_episode_without_bootstrap_counts_as_ended(pool):
    _, collector, actor = made(pool, Plan(episodes=5))
    rollout = collector.collect(actor)
    assert all(each.terminated and each.final_value == 0 for each in rollout.trajectories)
    assert not all(each.success for each in rollout.trajectories)


def test_all_that_act_at_once_share_their_step_where_that_is_wanted(pool):
    _, collector, actor = made(pool, Plan(episodes=2, shared_step=True))
    for rollout in (collector.collect(actor), collector.collect(actor)):
        firsts = [each.chunks[0] for each in rollout.trajectories[:SLOTS]]
        assert len({chunk.k for chunk in firsts}) == 1
    _, collector, actor = made(pool, Plan(episodes=2))
    assert len({each.chunks[0].k for each in collector.collect(actor).trajectories}) > 1


def test_without_noise_nothing_is_scored(pool):
    _, collector, actor = made(pool, Plan(episodes=2, noise=False))
    rollout = collector.collect(actor)
    assert all(chunk.k == -1 and not chunk.log_prob.any() for e in rollout.trajectories for chunk in e.chunks)


def test_ppo_learns_to_reach(pool):
    learner, collector, actor = made(pool, ONE_GOAL, global_batch=32, micro_batch=32)
    found = [each.rollout.success for each in first(one_behind_the_other(learner, collector, actor), 24)]
    assert sum(found[:3]) / 3 < 0.3 and sum(found[-3:]) / 3 > 0.6, found


def test_side_by_side_without_lag_is_one_behind_the_other_bit_for_bit(pool):
    learner, collector, actor = made(pool)
    expected = first(one_behind_the_other(learner, collector, actor), 3)
    other, collector, actor = made(pool)
    with SideBySide(other, LocalPlayer(collector, actor), lag=0, stall=60) as run:
        found = first(iter(run), 3)
    assert [played(each.rollout) for each in found] == [played(each.rollout) for each in expected]
    assert [each.metrics["charts/lag"] for each in found] == [0, 0, 0]
    assert same(weights(other), weights(learner))


@pytest.mark.parametrize("lag", [1, 2])
def test_side_by_side_no_sample_is_older_than_the_lag(pool, monkeypatch, lag):
    learner, collector, actor = made(pool, Plan(episodes=3))
    seen, iterate = [], learner.iterate

    def slow(trajectories):
        seen.extend(id(each) for each in trajectories)
        time.sleep(0.3)  # so that the rollout gets ahead
        return iterate(trajectories)

    monkeypatch.setattr(learner, "iterate", slow)
    with SideBySide(learner, LocalPlayer(collector, actor), lag=lag, stall=60) as run:
        found = first(iter(run), 6)
    versions = [{each.version for each in one.rollout.trajectories} for one in found]
    assert all(len(each) == 1 for each in versions)
    lags = [one.number - version.pop() for one, version in zip(found, versions, strict=True)]
    assert max(lags) == lag and min(lags) >= 0
    assert len(seen) == len(set(seen)) == 6 * 3 * SLOTS
    assert all(one.metrics["charts/queue"] <= lag + 1 for one in found)
    assert all(math.isfinite(each) for one in found for each in one.metrics.values() if each == each)


def test_side_by_side_learns_too(pool):
    learner, collector, actor = made(pool, ONE_GOAL, global_batch=32, micro_batch=32)
    with SideBySide(learner, LocalPlayer(collector, actor), lag=1, stall=60) as run:
        found = [each.rollout.success for each in first(iter(run), 28)]
    assert sum(found[:3]) / 3 < 0.3 and sum(found[-3:]) / 3 > 0.6, found


def test_the_seconds_of_each_phase_are_counted(pool):
    learner, collector, actor = made(pool)
    begun = time.monotonic()
    found = first(one_behind_the_other(learner, collector, actor), 2)[1]
    whole, seconds = time.monotonic() - begun, found.seconds["run"]
    assert set(seconds) == {"env", "predict", "train", "sync", "wait"}
    assert all(seconds[name] > 0 for name in ("env", "predict", "train", "sync"))
    assert sum(seconds.values()) < whole


def faulty(code, **options):
    """A pool whose environments break at the first step of a policy that asks for it."""
    return EnvPool([replace(SPEC, suite="", factory=FAULTY)], start_timeout=60, **options)


class Breaks(ReachInterface):
    """Breaks the environment, `times` times."""

    def __init__(self, code, times):
        self.code, self.times = code, times

    def batch(self, observations):
        return {"observation": torch.zeros(len(observations), OBSERVED)}

    def actions(self, chunks):
        found = super().actions(chunks)
        found[..., 1] = self.code if self.times > 0 else 0
        self.times -= 1
        return found


def test_an_episode_whose_environment_dies_is_played_again():
    with faulty(KILLED, max_respawns=2) as pool:
        _, collector, actor = made(pool, Plan(episodes=2))
        actor.interface = Breaks(KILLED, times=1)
        rollout = collector.collect(actor)
    assert [(each.slot, each.stage) for each in rollout.failures] == [(0, "step")]
    assert "SIGKILL" in rollout.failures[0].reason
    assert [each.episode for each in rollout.trajectories] == [0, 1]


def test_a_rollout_that_fails_ends_the_run_with_its_reason():
    with faulty(KILLED, max_respawns=0) as pool:
        learner, collector, actor = made(pool, Plan(episodes=1))
        actor.interface = Breaks(KILLED, times=9)
        with (
            SideBySide(learner, LocalPlayer(collector, actor), lag=1, stall=60) as run,
            pytest.raises(RuntimeError, match="the rollout failed: EnvPool: env 0 .*SIGKILL"),
        ):
            first(iter(run), 1)


def test_a_run_that_stalls_says_where():
    with faulty(HANG, step_timeout=8, max_respawns=1) as pool:
        learner, collector, actor = made(pool, Plan(episodes=1))
        actor.interface = Breaks(HANG, times=9)
        with (
            SideBySide(learner, LocalPlayer(collector, actor), lag=1, stall=2) as run,
            pytest.raises(RuntimeError, match=r"no rollout for 2 s; the rollout is at env for [12] s"),
        ):
            first(iter(run), 1)


def test_heads_are_taken_over_whole_or_not_at_all(pool):
    learner, _, actor = made(pool)
    given = weights(learner)
    before = heads.snapshot(actor.policy, actor.value_head)
    name = next(iter(given))
    for wrong, words in (
        ({n: t for n, t in given.items() if n != name}, "is in only one"),
        ({**given, "more": torch.zeros(1)}, "more is in only one"),
        ({**given, name: torch.zeros(3)}, r"must be \["),
        ({**given, name: given[name].half()}, "float16"),
    ):
        with pytest.raises(ValueError, match=words):
            actor.load(wrong, 1)
    assert same(heads.snapshot(actor.policy, actor.value_head), before) and actor.version == 0
    actor.load(given, 4)
    assert same(heads.snapshot(actor.policy, actor.value_head), given) and actor.version == 4


def test_bad_runs_are_refused(pool):
    learner, collector, actor = made(pool)
    shared = Actor(learner.policy, learner.value_head, ReachInterface(), flow=SETTINGS.flow, executed=2)
    for call, words in (
        (lambda: SideBySide(learner, LocalPlayer(collector, actor), lag=-1), "lag must be 0 or more"),
        (lambda: SideBySide(learner, LocalPlayer(collector, shared)), "weights of their own"),
        (lambda: Plan(episodes=0), "at least one episode"),
        (lambda: Actor(actor.policy, actor.value_head, None, flow=SETTINGS.flow, executed=4), "1 to 3"),
        (lambda: collector.resume([1]), "a state of 1 slots for 4"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
