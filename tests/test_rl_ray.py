"""Rollouts in Ray actors of this machine: what they play, how it travels, and what goes wrong."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from somaspeed_patch.rl import heads
from somaspeed_patch.rl.collect import Plan
from somaspeed_patch.rl.phases import Phases
from somaspeed_patch.rl.player import device_of
from somaspeed_patch.rl.ray_player import RayPlayer, WorkerOptions
from somaspeed_patch.rl.ray_worker import LARGE, packed, unpacked
from somaspeed_patch.rl.run import SideBySide, one_behind_the_other
from somaspeed_patch.testing_rl_ray import (
    OBSERVED,
    MakeReach,
    alive,
    gives_none,
    gone,
    learned,
    processes,
    raises,
    reported,
)

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'somaspeed-patch[ray]'")

pytestmark = pytest.mark.usefixtures("steps_by_torch")
ONE, TWO = MakeReach(), MakeReach(slots=(3, 1), plan=Plan(episodes=4, films=1))
SINGLE = MakeReach(slots=(1,), plan=Plan(episodes=2))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, resources={"sim": 2}, object_store_memory=400_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def kept():
    """The same worker for several tests, which begin with its first episodes."""
    with RayPlayer(ONE) as player:
        yield player


@pytest.fixture
def one(kept):
    kept.resume([0] * 4)
    return kept


@pytest.fixture(scope="module")
def two():
    with RayPlayer(TWO, 2) as player:
        yield player


@pytest.fixture(scope="module")
def local():
    return MakeReach()(0, 1)


def weights(learner=None):
    learner = learner or learned()
    return heads.snapshot(learner.policy, learner.value_head)


def again(local):
    local.resume([0] * 4)
    return local


def play(player, version=3, phases=None):
    return player.play(weights(), version, phases or Phases("rollout"))


def told(rollout):
    """All numbers of all chunks."""
    return [
        (each.env, each.episode, each.version, each.success, each.terminated, each.final_value)
        + tuple((chunk.value, chunk.k, chunk.noise_level, *numbers(chunk)) for chunk in each.chunks)
        for each in rollout.trajectories
    ]


def numbers(chunk):
    tensors = (
        chunk.x,
        chunk.x_next,
        chunk.log_prob,
        chunk.rewards,
        chunk.dones,
        *chunk.record.fixed.values(),
    )
    return [tuple(each.flatten().tolist()) for each in tensors]


def which(rollout):
    return [(each.episode, each.env) for each in rollout.trajectories]


def first(iterations, count):
    return list(itertools.islice(iterations, count))


# What is played


def test_one_worker_plays_what_a_local_player_does_bit_for_bit(one, local):
    expected = [play(again(local)), play(local)]
    found = [play(one), play(one)]
    assert [told(each) for each in found] == [told(each) for each in expected]
    assert told(found[0]) != told(found[1])
    assert [each.state for each in found] == [each.state for each in expected] == [[4] * 4, [8] * 4]
    assert {each.version for each in found[0].trajectories} == {3} and not found[0].failures


def test_two_workers_play_the_episodes_of_one_pool(two, local):
    two.resume([0] * 4)
    expected, found = play(again(local)), play(two)
    assert which(found) == which(expected) == [(e, s) for e in range(4) for s in range(4)]
    assert found.state == expected.state
    assert [(each.slot, each.episode) for each in found.films] == [(0, 0), (3, 0)]  # the first of each
    for mine, other in zip(found.trajectories, expected.trajectories, strict=True):
        start, there = mine.chunks[0], other.chunks[0]
        assert torch.equal(start.record.fixed["pooled"], there.record.fixed["pooled"])  # the initial state
        assert [each.k for each in mine.chunks] == [each.k for each in other.chunks]  # the draws
        assert mine.success == other.success and len(mine) == len(other)
        for a, b in zip(mine.chunks, other.chunks, strict=True):
            for name in ("x", "x_next", "log_prob", "rewards"):
                torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-5)
            assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-5)


def test_a_state_is_split_between_workers(two, one, local):
    again(local)
    expected = [play(local) for _ in range(2)]
    two.resume(play(one).state)
    assert which(play(two)) == which(expected[1])
    two.resume([5, 0, 9, 1])
    found = play(two)
    assert found.state == [9, 4, 13, 5]
    assert {(0, 5), (1, 0), (2, 9), (3, 1)} < {(each.env, each.episode) for each in found.trajectories}
    with pytest.raises(ValueError, match="a state of 3 slots for 4"):
        two.resume([0] * 3)


def test_the_seconds_of_the_workers_are_counted_and_add_up(two):
    phases, begun = Phases("rollout"), time.monotonic()
    play(two, phases=phases)
    whole, seconds = time.monotonic() - begun, phases.taken()
    assert all(seconds[name] > 0 for name in ("env", "predict", "sync", "wait")) and seconds["train"] == 0
    assert 0.8 * whole < sum(seconds.values()) <= whole


# Runs


def test_side_by_side_without_lag_is_the_local_run_bit_for_bit(one, local):
    learner, other = learned(), learned()
    actor = MakeReach().actor(local.actor.interface)
    expected = first(one_behind_the_other(learner, again(local).collector, actor), 3)
    with RayPlayer(ONE) as player, SideBySide(other, player, lag=0, stall=60) as run:
        found = first(iter(run), 3)
    assert [told(each.rollout) for each in found] == [told(each.rollout) for each in expected]
    mine, theirs = weights(other), weights(learner)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(found[1].seconds["rollout"][name] > 0 for name in ("env", "predict", "sync"))


def test_side_by_side_no_sample_is_older_than_the_lag(monkeypatch):
    learner = learned()
    seen, iterate = [], learner.iterate

    def slow(trajectories):
        seen.extend((each.env, each.episode) for each in trajectories)
        time.sleep(0.3)  # so that the rollout gets ahead
        return iterate(trajectories)

    monkeypatch.setattr(learner, "iterate", slow)
    with RayPlayer(TWO, 2) as player, SideBySide(learner, player, lag=1, stall=60) as run:
        found = first(iter(run), 5)
    versions = [{each.version for each in each.rollout.trajectories} for each in found]
    assert all(len(each) == 1 for each in versions)
    lags = [each.number - version.pop() for each, version in zip(found, versions, strict=True)]
    assert max(lags) == 1 and min(lags) >= 0
    assert sorted(seen) == [(slot, episode) for slot in range(4) for episode in range(5 * 4)]
    assert all(each.metrics["charts/queue"] <= 2 for each in found)


def test_weights_are_staged_on_the_cpu(one):
    assert device_of(one) == torch.device("cpu")


# What travels


@pytest.mark.filterwarnings("error")
def test_large_tensors_are_read_where_ray_has_put_them():
    given = {
        "half": torch.randn(3, LARGE).bfloat16(), "turned": torch.randn(90, 80).t(),
        "small": torch.tensor(2.5), "none": torch.empty(0, 3), "bool": torch.tensor([True, False]),
        "array": np.arange(LARGE), "text": "words", "weight": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    there = ray.get(ray.put(packed(given)))
    found = unpacked(there)
    for name, value in given.items():
        same = found[name] == value
        assert same if name == "text" else bool(same.all())
    assert [found[name].dtype for name in ("half", "bool")] == [torch.bfloat16, torch.bool]
    assert [list(found[name].shape) for name in ("turned", "small", "none")] == [[80, 90], [], [0, 3]]
    assert [each.nbytes for each in there.arrays] == [3 * LARGE * 2, 90 * 80 * 4, LARGE * 8]
    assert not any(each.flags.writeable for each in there.arrays)
    addresses = [each.ctypes.data for each in there.arrays]
    assert [found["half"].data_ptr(), found["turned"].data_ptr(), found["array"].ctypes.data] == addresses


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_the_learner_reads_records_in_the_object_store_and_writes_none():
    width = 4 * LARGE
    learner = learned(width)
    with RayPlayer(MakeReach(slots=(2,), width=width, plan=Plan(episodes=2))) as player:
        rollout = player.play(weights(learner), 0, Phases("rollout"))
    records = [chunk.record for each in rollout.trajectories for chunk in each.chunks]
    before = [each.fixed["pooled"].clone() for each in records]
    learner.iterate(rollout.trajectories)  # its worker is gone by now, what it played is not
    assert learner.version == 1
    assert all(torch.equal(each.fixed["pooled"], old) for each, old in zip(records, before, strict=True))
    assert all(
        each.fixed["pooled"][:OBSERVED].any() and len(each.fixed["pooled"]) == width for each in records
    )


# Faults


def test_a_worker_that_is_killed_has_a_successor_that_plays_the_same(two, tmp_path):
    two.resume([0] * 4)
    expected = [play(two) for _ in range(2)]
    make = replace(TWO, report=tmp_path, dies=1)
    with RayPlayer(make, 2, max_restarts=1) as player:
        found = [play(player) for _ in range(2)]
    assert [told(each) for each in found] == [told(each) for each in expected]
    assert [each.state for each in found] == [[4] * 4, [8] * 4]
    lost, none = (each.failures for each in found)
    assert [(each.slot, each.stage) for each in lost] == [(slot, "play of version 3") for slot in range(3)]
    assert all("Ray worker 0 of 2 was lost: The actor" in each.reason for each in lost) and not none
    assert len(reported(tmp_path, 0)) == 2 and len(reported(tmp_path, 1)) == 1
    assert gone(processes(tmp_path, 2))


def test_a_worker_that_is_lost_too_often_ends_the_run(tmp_path):
    make = MakeReach(slots=(1,), plan=Plan(episodes=2), report=tmp_path, dies=9)
    words = (
        "the rollout failed: rl: Ray worker 0 of 1 was lost 2 times, .*; play of version 0: .*died.*; play of"
    )
    with (
        RayPlayer(make, max_restarts=1) as player,
        SideBySide(learned(), player, lag=1, stall=60) as run,
        pytest.raises(RuntimeError, match=words),
    ):
        first(iter(run), 1)
    assert len(reported(tmp_path)) == 2


def test_a_worker_that_raises_ends_the_run_with_its_reason():
    wrong = {**weights(), "more": torch.zeros(1)}
    words = "rl: Ray worker 0 of 1 failed in play of version 3: ValueError: heads: more is in only one of"
    with RayPlayer(SINGLE) as player, pytest.raises(RuntimeError, match=words):
        player.play(wrong, 3, Phases("rollout"))


def test_a_rollout_of_another_version_is_refused():
    make = MakeReach(slots=(1,), plan=Plan(episodes=1), late=True)
    words = r"rl: Ray worker 0 of 1 was asked to play version 3, but played \[2\]"
    with RayPlayer(make) as player, pytest.raises(RuntimeError, match=words):
        play(player)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (raises, {}, "worker 0 of 1 failed in start: FileNotFoundError: no checkpoint for worker 0"),
        (
            gives_none,
            {},
            "failed in start: TypeError: rl: make_player must give a LocalPlayer, but gave a tuple",
        ),
        (
            SINGLE,
            {"resources": {"sim": 3}},
            r"worker 0 of 1 has not started within 3 s; .*'sim': 3.*'sim': 2",
        ),
    ],
    ids=["raises", "no player", "no room"],
)
def test_a_worker_that_cannot_be_started_is_an_error_that_says_why(make, options, words):
    timeout = 3 if options else 60
    with pytest.raises(RuntimeError, match=words):
        RayPlayer(make, options=WorkerOptions(**options), start_timeout=timeout)


def test_a_player_that_takes_too_long_ends_all_workers(tmp_path):
    make = MakeReach(slots=(1, 1), report=tmp_path, hangs=True)
    with pytest.raises(RuntimeError, match="Ray worker 1 of 2 has not started within 15 s"):
        RayPlayer(make, 2, start_timeout=15)
    assert len(processes(tmp_path, 2)) == 4
    assert gone(processes(tmp_path, 2))


def test_stop_from_another_thread_ends_what_is_played_soon(tmp_path):
    make = MakeReach(slots=(1,), plan=Plan(episodes=50), slow=0.5, report=tmp_path)
    with RayPlayer(make) as player:
        threading.Timer(1.0, player.stop).start()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="rollout: stopped"):
            play(player)
        assert time.monotonic() - begun < 5  # the rollout takes 75
        with pytest.raises(RuntimeError, match="rollout: stopped"):
            play(player)
        assert gone(processes(tmp_path))


def test_close_ends_workers_and_environments(tmp_path):
    make = MakeReach(slots=(2,), report=tmp_path)
    player = RayPlayer(make, options=WorkerOptions(resources={"sim": 1}, placement="SPREAD"))
    assert len(processes(tmp_path)) == 3 and all(alive(each) for each in processes(tmp_path))
    player.close()
    player.close()
    assert gone(processes(tmp_path))
    with pytest.raises(RuntimeError, match="rollout: closed"):
        play(player)


def test_a_player_is_made_in_the_worker_s_environment_and_main_thread():
    options = WorkerOptions(runtime_env={"env_vars": {"SOMASPEED_TEST": "there"}})

    def make(worker, workers):
        main = threading.current_thread() is threading.main_thread()  # so that the kernel ends environments
        raise KeyError(os.environ["SOMASPEED_TEST"], main)

    with pytest.raises(RuntimeError, match=r"KeyError: \('there', True\)"):
        RayPlayer(make, options=options)


@pytest.mark.parametrize("own", [True, False], ids=["its own Ray", "a Ray that lives on"])
def test_a_driver_that_is_killed_leaves_no_orphans(tmp_path, own):
    there = {"address": ray.get_runtime_context().gcs_address}
    how = {"num_cpus": 1, "include_dashboard": False, "address": "local"} if own else there
    driver = subprocess.Popen(
        [sys.executable, "-m", "somaspeed_patch.testing_rl_ray", str(tmp_path), json.dumps(how)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert any("started" in line for line in driver.stdout)
        found = processes(tmp_path)
        assert len(found) == 3 and all(alive(each) for each in found)
        time.sleep(1)  # into the rollout
        driver.send_signal(signal.SIGKILL)
    assert gone(found, 60)


# Without Ray


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("import sys; sys.modules['ray'] = None", "needs Ray; pip install 'somaspeed-patch[ray]'"),
        ("", "needs Ray to be initialised; call ray.init() first"),
    ],
    ids=["not installed", "not initialised"],
)
def test_without_ray_there_is_the_module_and_an_error_that_says_what_to_do(first, words):
    code = (
        f"{first}\n"
        "from somaspeed_patch.rl.ray_player import RayPlayer\n"
        "try: RayPlayer(print)\n"
        "except (ImportError, RuntimeError) as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"rl: RayPlayer {words}\n"


@pytest.mark.parametrize("numbers", [{"workers": 0}, {"max_restarts": -1}])
def test_bad_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="workers of at least 1 and max_restarts of at least 0"):
        RayPlayer(ONE, **numbers)
