"""Environment processes: chunks, faults and ends, with a stand-in for the simulator."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from somaspeed_patch.rl.env_pool import EnvPool, Failed
from somaspeed_patch.rl.env_process import Chunk, EnvSpec, Episodes, set_renderer
from somaspeed_patch.testing_rl_env import (
    EXIT,
    FACTORY,
    HANG,
    KILLED,
    NAN,
    NOTHING,
    RAISE,
    SOLVED,
    FaultyWorld,
)

SPEC = EnvSpec(suite="", horizon=10, factory=FACTORY)


def chunk(*codes):
    """Actions of the stand-in: 1, 2, 3, ... to add, and what happens at each."""
    actions = np.zeros((len(codes), 7), np.float32)
    actions[:, 0], actions[:, 1] = np.arange(1, len(codes) + 1), codes
    return actions


def episodes(horizon=10):
    made = Episodes(FaultyWorld(SPEC), horizon)
    made.reset(3, 5)
    return made


def flags(result):
    return [result.rewards.tolist(), result.terminated.tolist(), result.truncated.tolist(), result.executed]


@pytest.fixture
def pool():
    with EnvPool([SPEC, SPEC], step_timeout=10, start_timeout=60, max_respawns=2) as made:
        yield made


def one(pool, slot, timeout=30):
    """The result of `slot`, which is the only one that owes one."""
    [(which, result)] = pool.ready(timeout)
    assert which == slot
    return result


def started(pool, slot=0):
    pool.submit_reset(slot, init_state=1)
    return one(pool, slot)


# What a chunk is


def test_a_chunk_is_executed_and_observed_once_at_its_end():
    result = episodes().step(chunk(NOTHING, NOTHING, NOTHING))
    assert flags(result) == [[0, 0, 0], [False] * 3, [False] * 3, 3]
    assert (result.rewards.dtype, result.terminated.dtype) == (np.float32, np.bool_)
    assert result.observation["state"].tolist() == [3, 5, 6, 3]
    assert not result.done


def test_a_chunk_stops_where_the_task_is_solved():
    result = episodes().step(chunk(NOTHING, SOLVED, SOLVED, RAISE))
    assert flags(result) == [[0, 1, 0, 0], [False, True, False, False], [False] * 4, 2]
    assert result.observation["state"].tolist() == [3, 5, 3, 2]
    assert result.done


def test_the_horizon_truncates_within_a_chunk_and_the_episode_is_over():
    made = episodes(horizon=5)
    assert not made.step(chunk(*[NOTHING] * 4)).done
    result = made.step(chunk(NOTHING, RAISE))
    assert flags(result) == [[0, 0], [False, False], [True, False], 1]
    with pytest.raises(ValueError, match="no episode is on"):
        made.step(chunk(NOTHING))
    assert made.reset(0, 0)["state"].tolist() == [0, 0, 0, 0]
    assert made.step(chunk(*[NOTHING] * 5)).truncated.tolist() == [False] * 4 + [True]


def test_a_task_solved_at_the_horizon_is_terminated_not_truncated():
    result = episodes(horizon=2).step(chunk(NOTHING, SOLVED))
    assert flags(result) == [[0, 1], [False, True], [False, False], 2]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros(7), r"must be \[C, 7\], but are \[7\]"),
        (np.zeros((0, 7)), r"must be \[C, 7\], but are \[0, 7\]"),
        (np.zeros((2, 6)), r"but are \[2, 6\]"),
        (np.array([[0] * 7, [0, 0, np.inf, 0, 0, 0, 0]]), r"\[1, 2\] is inf"),
    ],
)
def test_actions_that_are_none_are_refused_before_any_step(actions, message):
    made = episodes()
    with pytest.raises(ValueError, match=message):
        made.step(actions.astype(np.float32))
    assert made.step(chunk(NOTHING)).observation["state"][3] == 1


def test_an_observation_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="state is not finite after step 2 of the chunk"):
        episodes().step(chunk(NOTHING, NAN))


@pytest.mark.parametrize("visible", [None, "", "0,1,5"])
def test_the_renderer_and_its_gpu_are_named_for_mujoco_and_robosuite(monkeypatch, visible):
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "unset")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    set_renderer(EnvSpec(gl="egl", egl_device=5))
    chosen = {
        name: os.environ.get(name) for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID")
    }
    assert chosen == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "5"}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("5" if visible else visible)


# The pool


def test_slots_answer_by_themselves(pool):
    for slot in (0, 1):
        pool.submit_reset(slot, init_state=slot, seed=7)
    seen = {}
    while pool.owed:
        seen.update(pool.ready(30))
    assert [seen[slot]["state"].tolist() for slot in (0, 1)] == [[0, 7, 0, 0], [1, 7, 0, 0]]
    assert seen[0]["process"] != seen[1]["process"]
    pool.submit_step(1, chunk(NOTHING, SOLVED))
    result = one(pool, 1)
    assert isinstance(result, Chunk) and result.done
    assert pool.ready(0) == [] and len(pool) == 2


def test_environments_keep_to_the_cores_they_are_given():
    mine = sorted(os.sched_getaffinity(0))
    with EnvPool([replace(SPEC, cores=1), SPEC]) as pool:
        theirs = [os.sched_getaffinity(worker.process.pid) for worker in pool._workers]
    assert theirs == [set(mine[:1]), set(mine)]
    with pytest.raises(ValueError, match="env.cores: expected 1 or more, or none, but is 0"):
        EnvSpec(cores=0)


def test_a_slow_slot_holds_nobody(pool):
    for slot in (0, 1):
        started(pool, slot)
    pool.submit_step(0, chunk(HANG))
    for _ in range(3):
        pool.submit_step(1, chunk(NOTHING))
        assert one(pool, 1).executed == 1
    begin = time.monotonic()
    assert pool.ready(0.2) == [] and 0.15 < time.monotonic() - begin < 2
    assert pool.owed == (0,)


def test_what_a_caller_gets_wrong_costs_no_worker(pool):
    with pytest.raises(ValueError, match="slot 0 has no episode; call submit_reset first"):
        pool.submit_step(0, chunk(NOTHING))
    before = started(pool)["process"]
    with pytest.raises(ValueError, match="must be finite, but"):
        pool.submit_step(0, np.full((1, 7), np.nan))
    pool.submit_step(0, chunk(SOLVED))
    with pytest.raises(ValueError, match="slot 0 still owes the result of its last step"):
        pool.submit_reset(0, 0)
    assert one(pool, 0).done
    with pytest.raises(ValueError, match="has no episode"):
        pool.submit_step(0, chunk(NOTHING))
    assert started(pool)["process"] == before


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (KILLED, "killed by SIGKILL"),
        (EXIT, "exited with code 7"),
        (RAISE, "ZeroDivisionError: the stand-in was told to raise"),
        (NAN, "state is not finite after step 2"),
    ],
)
def test_a_lost_worker_is_a_result_in_words_and_its_successor_goes_on(pool, code, reason):
    before = started(pool)["process"]
    pool.submit_step(0, chunk(NOTHING, code))
    result = one(pool, 0)
    assert isinstance(result, Failed) and (result.slot, result.stage) == (0, "step")
    assert reason in result.reason
    assert is_gone(before.item())
    with pytest.raises(ValueError, match="no episode"):
        pool.submit_step(0, chunk(NOTHING))
    assert started(pool)["process"] != before  # queued until the successor has started


def test_a_worker_that_hangs_is_killed_in_time():
    with EnvPool([SPEC], step_timeout=1, max_respawns=1) as pool:
        before = started(pool)["process"].item()
        begin = time.monotonic()
        pool.submit_step(0, chunk(HANG))
        result = one(pool, 0)
        assert 0.9 < time.monotonic() - begin < 8
        assert result == Failed(slot=0, stage="step", reason="did not answer within 1 s; killed")
        assert is_gone(before)


def test_a_worker_killed_from_outside_while_idle_is_found_out_at_the_next_request(pool):
    os.kill(started(pool)["process"].item(), signal.SIGKILL)
    pool.submit_reset(0, 0)
    assert one(pool, 0) == Failed(slot=0, stage="reset", reason="killed by SIGKILL")


def test_too_many_losses_end_the_pool_with_their_reasons():
    with EnvPool([SPEC], max_respawns=1) as pool:
        started(pool)
        pool.submit_step(0, chunk(KILLED))
        assert isinstance(one(pool, 0), Failed)
        started(pool)
        pool.submit_step(0, chunk(EXIT))
        with pytest.raises(
            RuntimeError, match=r"lost 2 times.*step: killed by SIGKILL; step: exited with code 7"
        ):
            pool.ready(30)


def test_a_world_that_cannot_be_built_names_itself_and_leaves_no_process():
    with pytest.raises(
        RuntimeError, match=r"env 1 \(broken task 4\) was lost 2 times(.|\n)*no renderer for task 4"
    ):
        EnvPool([SPEC, EnvSpec(suite="broken", task=4, factory=FACTORY)], max_respawns=1)
    assert children() == []


def test_a_world_that_can_be_built_at_the_second_try_is(tmp_path):
    suite = f"broken until {tmp_path / 'mended'} exists"
    with EnvPool([EnvSpec(suite=suite, factory=FACTORY)], max_respawns=1) as pool:
        assert started(pool)["state"].tolist() == [1, 0, 0, 0]


def test_a_world_that_takes_too_long_to_build_is_given_up():
    with pytest.raises(RuntimeError, match=r"start: did not answer within 0.5 s; killed"):
        EnvPool([EnvSpec(suite="slow", factory=FACTORY)], start_timeout=0.5, max_respawns=0)


def test_closing_ends_hanging_workers_too(pool):
    workers = [started(pool, slot)["process"].item() for slot in (0, 1)]
    pool.submit_step(0, chunk(HANG))
    pool.close()
    pool.close()
    assert all(map(is_gone, workers))
    with pytest.raises(RuntimeError, match="is closed"):
        pool.submit_reset(1, 0)


ORPHANS = """
import os, signal, sys, threading
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.env_process import EnvSpec
from somaspeed_patch.testing_rl_env import FACTORY, HANG

def main():
    pool = EnvPool([EnvSpec(suite="", factory=FACTORY)] * 2)
    for slot in (0, 1):
        pool.submit_reset(slot, 0)
    seen = {}
    while pool.owed:
        seen.update(pool.ready(30))
    pool.submit_step(0, [[0, HANG, 0, 0, 0, 0, 0]])
    print(*(seen[slot]["process"].item() for slot in (0, 1)), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raises":
        raise SystemExit(3)
    globals()["kept"] = pool  # what the interpreter's end finds

if __name__ == "__main__":
    if sys.argv[2] == "thread":  # where the kernel's death signal is of no use
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
    else:
        main()
"""


@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("end", ["killed", "raises", "returns"])
def test_no_worker_outlives_its_parent(tmp_path, end, thread):
    script = tmp_path / "parent.py"
    script.write_text(ORPHANS)
    done = subprocess.run(
        [sys.executable, str(script), end, thread], capture_output=True, text=True, timeout=120
    )
    expected = {"killed": -signal.SIGKILL, "raises": 0 if thread == "thread" else 3, "returns": 0}
    assert done.returncode == expected[end], done.stderr
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    until = time.monotonic() + 10
    while time.monotonic() < until and not all(map(is_gone, workers)):
        time.sleep(0.05)
    assert all(map(is_gone, workers))


def is_gone(process):
    """Whether there is no such process, or one that has ended and waits to be read."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children():
    """Processes that this one has started for environments and that still run."""
    import multiprocessing

    return [child.name for child in multiprocessing.active_children() if child.name.startswith("env-")]
