"""`somaspeed rl` under torchrun, on two gloo ranks: what is written, resumes, signals, a rank that fails."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from somaspeed_patch.cli import main
from somaspeed_patch.rl_run import checkpoints
from somaspeed_patch.testing_rl_ranks import far
from somaspeed_patch.testing_rl_reach_world import MORTAL

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.usefixtures("steps_by_torch")
QUICK = (
    "rollout.episodes=3", "rollout.init_states=20", "ppo.global_batch=64", "ppo.micro_batch=8",
    "ppo.update_epoch=2", "ppo.eps=1e-3", "checkpoint.every=1", "checkpoint.keep=0", "evaluate.every=0",
)  # fmt: skip


def words(out, *settings, ranks=2, more=()):
    """Of a run on some ranks; of one process without a launcher where it is one."""
    given = [f"--set={each}" for each in (*QUICK, *settings)]
    ours = ["-m", "somaspeed_patch", "rl", "rl_reach", "--out", str(out), *given, *more]
    if ranks == 1:
        return [sys.executable, *ours]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", str(ranks), *ours]


def environment(**more):
    """Without the interpreter of Triton's kernels, and without looking the machine's name up."""
    kept = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


def done(out, *settings, ranks=2, more=(), **variables):
    """A whole run; what it said."""
    ended = subprocess.run(
        words(out, *settings, ranks=ranks, more=more), env=environment(**variables), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    return ended.stderr


def lines(out, kind="iteration"):
    file = out / "metrics.jsonl"
    found = [json.loads(each) for each in file.read_text().splitlines()] if file.exists() else []
    return [each for each in found if each["kind"] == kind]


def state(out, number):
    return torch.load(out / f"checkpoints/{number:06d}/training_state/state.pt", weights_only=True)


def numbers(out):
    return [int(each.name) for each in checkpoints.finished(out / "checkpoints")]


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three iterations of one process, with evaluations."""
    out = tmp_path_factory.mktemp("whole")
    given = [f"--set={each}" for each in (*QUICK, "iterations=3", "evaluate.every=1", "evaluate.episodes=2")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("somaspeed_patch.kernels.adamw.INTERPRETED", False)
        assert main(["rl", "rl_reach", "--out", str(out), *given]) == 0
    return out


def test_a_run_goes_from_one_process_to_two_ranks_and_back(whole, tmp_path):
    """1 -> 2 sharded -> 1: all episodes, what is learned and written are those of one process.

    One step an epoch: the order of samples is a rank's own. Rollouts round otherwise in batches of two.
    """
    settings = ("iterations=3", "evaluate.every=1", "evaluate.episodes=2")
    done(tmp_path, *settings, ranks=1, more=("--iterations", "1"))
    said = done(
        tmp_path, *settings, "layout.dp_shard=2", more=("--resume", "--iterations", "2", "--set=lag=none")
    )
    assert "2 ranks, layout dp_replicate=1,dp_shard=2" in said and "going on behind iteration 1" in said
    assert said.count("iteration 2/2  success") == said.count("written: ") == 1
    done(tmp_path, *settings, ranks=1, more=("--resume",))
    assert numbers(tmp_path) == numbers(whole) == [1, 2, 3]
    for number in (1, 2, 3):
        mine, expected = state(tmp_path, number), state(whole, number)
        assert not far(mine["learner"], expected["learner"], at_most=1e-4)
        assert not far(mine["heads"], expected["heads"], at_most=1e-4)
        assert mine["backbone"] == expected["backbone"]
        assert mine["progress"]["played"] == expected["progress"]["played"] == (3 * number,) * 4
        assert mine["progress"]["env_steps"] == expected["progress"]["env_steps"]
        policy = load_file(tmp_path / f"checkpoints/{number:06d}/pretrained_model/model.safetensors")
        trained = {name: each for name, each in mine["heads"].items() if name in policy}
        assert len(trained) == 8 and not far({n: policy[n] for n in trained}, trained, at_most=0)
    told = ("iteration", "success", "return", "env_steps", "episodes", "lost", "tasks", "charts/samples")
    for mine, expected in zip(lines(tmp_path), lines(whole), strict=True):
        assert {name: mine[name] for name in told} == {name: expected[name] for name in told}
    evaluated = [(e["iteration"], e["success"], e["episodes"]) for e in lines(tmp_path, "evaluation")]
    assert evaluated == [(e["iteration"], e["success"], e["episodes"]) for e in lines(whole, "evaluation")]
    assert json.loads((tmp_path / "results.json").read_text())["recipe"]["layout"] is None


def test_side_by_side_on_replicas_with_evaluations_and_films(tmp_path):
    """lag 1, where rollouts and evaluations take turns on each rank; only rank 0 films its slots."""
    pytest.importorskip("av")
    (tmp_path / "painted.py").write_text(
        textwrap.dedent("""
        import numpy as np
        from somaspeed_patch.testing_rl_reach_world import ReachWorld

        class PaintedWorld(ReachWorld):
            def observe(self):
                return {**super().observe(), "image": np.full((16, 16, 3), 90, np.uint8)}
        """)
    )
    out = tmp_path / "run"
    said = done(
        out, "iterations=3", "lag=1", "evaluate.every=2", "evaluate.videos=2",
        "env.factory=painted:PaintedWorld", PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert "2 ranks, layout dp_replicate=2" in said and numbers(out) == [1, 2, 3]
    assert [each["iteration"] for each in lines(out)] == [1, 2, 3]
    assert all(each["episodes"] == 12 and each["lag"] <= 1 for each in lines(out))
    evaluated = lines(out, "evaluation")
    assert [each["iteration"] for each in evaluated] == [0, 2, 3]
    assert all(each["episodes"] == 16 and len(each["videos"]) == 2 for each in evaluated)
    assert {Path(film).name[:6] for each in evaluated for film in each["videos"]} == {"slot_0", "slot_1"}


def begun(out, *settings, **variables):
    """A run without an end that has finished two iterations, and all of its processes."""
    endless = ("iterations=100000", "checkpoint.every=1000")
    process = subprocess.Popen(
        words(out, *settings, *endless), env=environment(**variables), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: len(lines(out)) >= 2 or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()
    return process, psutil.Process(process.pid).children(recursive=True)


def test_a_signal_ends_all_ranks_behind_one_checkpoint(tmp_path):
    process, children = begun(tmp_path, "lag=1", "layout.dp_shard=2")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and not psutil.wait_procs(children, timeout=10)[1]
    last = lines(tmp_path)[-1]["iteration"]
    assert numbers(tmp_path) == [last] and said.count("stopped by SIGTERM; the last checkpoint is") == 1
    assert state(tmp_path, last)["learner"]["version"] == last
    goal = str(last + 1)
    done(tmp_path, "lag=1", "layout.dp_shard=2", more=("--resume", "--iterations", goal))
    assert [each["iteration"] for each in lines(tmp_path)] == list(range(1, last + 2))


def test_a_rank_that_fails_ends_the_run_and_is_named(tmp_path):
    """The second rank's environments end at their eighth step of every life."""
    settings = (f"env.factory={MORTAL}", "rollout.episodes=8", "lag=1", "iterations=9")
    begun_at = time.monotonic()
    ended = subprocess.run(
        words(tmp_path / "run", *settings), env=environment(), capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode != 0 and time.monotonic() - begun_at < 60
    assert "rank 1 of 2: iteration 1 failed at its rollout" in ended.stderr
    assert "exited with code 7" in ended.stderr and "rank      : 1" in ended.stderr


def test_what_ranks_cannot_run_is_refused(tmp_path, capsys):
    for settings, words_ in (
        (("layout.tp=2",), "layout: layout: tp=2: RL trains over dp_shard and dp_replicate only"),
        (("layout.frozen=sharded",), "use frozen=whole"),
        (("layout.dp_shrad=2",), "did you mean dp_shard"),
        (("layout.dp_shard=2",), "= 2 ranks, but 1 was started"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["rl", "rl_reach", "--out", str(tmp_path), *(f"--set={each}" for each in settings)])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and words_ in said
    ended = subprocess.run(
        words(tmp_path, "env.slots=1"), env=environment(), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0 and "1 slots cannot be dealt to 2 ranks" in ended.stderr
