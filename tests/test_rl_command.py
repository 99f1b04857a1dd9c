"""`somaspeed rl` as a process: signals, exit codes, what it writes; and films. No simulator."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from somaspeed_patch.cli import main
from somaspeed_patch.rl_run import checkpoints, stops, videos
from somaspeed_patch.rl_run.stops import Stopped, Stops

psutil = pytest.importorskip("psutil")
ENDLESS = ("iterations=100000", "env.slots=2", "checkpoint.every=1000", "evaluate.every=0")


def words(out, *settings, more=()):
    given = [f"--set={each}" for each in settings]
    return [sys.executable, "-m", "somaspeed_patch", "rl", "rl_reach", "--out", str(out), *given, *more]


def environment(**more):
    """Without the interpreter of Triton's kernels, which takes seconds a step."""
    return {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"} | more


def lines(out):
    file = out / "metrics.jsonl"
    return [json.loads(each) for each in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def begun(out, *settings, **more):
    """A run that has finished two iterations, and all of its processes."""
    process = subprocess.Popen(
        words(out, *ENDLESS, *settings), env=environment(**more), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: len(lines(out)) >= 2 or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("number", "lag", "code"),
    [(signal.SIGTERM, "none", 143), (signal.SIGINT, "1", 130)],
)
def test_a_signal_ends_a_run_behind_a_checkpoint(tmp_path, number, lag, code):
    process, children = begun(tmp_path, f"lag={lag}")
    assert sum("spawn_main" in " ".join(each.cmdline()) for each in children) == 2
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert not psutil.wait_procs(children, timeout=10)[1]
    done = lines(tmp_path)[-1]["iteration"]
    last = checkpoints.load((tmp_path / "checkpoints" / "last").resolve())
    assert last.progress.iteration == done and last.learner["version"] == done
    assert f"stopped by {number.name}" in said and "go on with --resume" in said
    again = words(tmp_path, *ENDLESS, f"lag={lag}", more=("--resume", "--iterations", str(done + 2)))
    subprocess.run(again, env=environment(), check=True, timeout=120)
    assert [each["iteration"] for each in lines(tmp_path)] == list(range(1, done + 3))


def test_a_second_signal_ends_it_at_once(tmp_path):
    """While the first one's checkpoint is being written, which takes its time here."""
    (tmp_path / "slow.py").write_text(
        textwrap.dedent("""
        import time
        from somaspeed_patch.rl_run import reach

        class Parts(reach.StateParts):
            def save(self, directory):
                time.sleep(100)

        def make(recipe):
            parts = reach.make(recipe)
            return Parts(parts.policy, parts.interface)
        """)
    )
    out = tmp_path / "run"
    process, children = begun(out, "policy.factory=slow:make", PYTHONPATH=str(tmp_path))
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: list((out / "checkpoints").glob(".writing-*")))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert not psutil.wait_procs(children, timeout=10)[1] and not checkpoints.finished(out / "checkpoints")


def test_a_killed_run_leaves_no_orphans_and_is_gone_on_with(tmp_path):
    process, children = begun(tmp_path, "checkpoint.every=1")
    process.kill()
    process.communicate(timeout=10)
    assert not psutil.wait_procs(children, timeout=10)[1]
    done = int(checkpoints.finished(tmp_path / "checkpoints")[-1].name)
    more = ("--resume", "--iterations", str(done + 1))
    again = subprocess.run(
        words(tmp_path, *ENDLESS, "checkpoint.every=1", more=more),
        env=environment(), check=True, timeout=120, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert f"going on behind iteration {done}" in again.stderr
    assert [each["iteration"] for each in lines(tmp_path)] == list(range(1, done + 2))


def test_training_may_end_before_a_signal_does(monkeypatch):
    """What is under way gets its time; what does not end in it leaves the learner as nobody knows."""
    before, timer = signal.getsignal(signal.SIGTERM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(Stopped) as ended, Stops() as stop:
        stop.train()
        os.kill(os.getpid(), signal.SIGTERM)
        trained = True
        stop.done()
    assert trained and ended.value.clean and ended.value.number == signal.SIGTERM
    monkeypatch.setattr(stops, "GRACE", 0.2)
    with pytest.raises(Stopped) as ended, Stops() as stop:
        stop.train()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    assert not ended.value.clean and signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Stopped) as ended, Stops():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
    assert ended.value.clean and ended.value.number == signal.SIGINT
    assert timer[0] == 0 or 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= timer[0]  # pytest-timeout's


@pytest.mark.usefixtures("steps_by_torch")
def test_what_a_run_writes_and_says(tmp_path, capsys):
    out = tmp_path / "run"
    settings = ("iterations=3", "env.slots=2", "evaluate.every=2", "log.tensorboard=true", "lag=1")
    given = [f"--set={each}" for each in settings]
    assert main(["rl", "rl_reach", "--out", str(out), *given]) == 0
    said = capsys.readouterr().err
    assert "state on cpu: 3,174 parameters train, and 193 of the value head" in said
    assert "memory host, backend processes, side by side, lag 1, parity none" in said
    assert "2 slots of reach; task x slots: 0 x2" in said and "iteration 3/3  success" in said
    found = json.loads((out / "results.json").read_text())
    assert [each["iteration"] for each in found["curve"]] == [1, 2, 3]
    assert [each["iteration"] for each in found["evaluations"]] == [0, 2, 3]
    assert found["recipe"]["lag"] == 1 and found["evaluations"][0]["tasks"]["0"]["episodes"] == 8
    pytest.importorskip("matplotlib")
    assert (out / "success.svg").read_text().count("<svg") == 1
    assert (out / "success.png").read_bytes()[:4] == b"\x89PNG"
    check_tensorboard(out, lines(out))


def check_tensorboard(out, told):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    iterations = [each for each in told if each["kind"] == "iteration"]
    shown = [(each.step, each.value) for each in events.Scalars("charts/success")]
    assert shown == [(each["env_steps"], pytest.approx(each["success"])) for each in iterations]
    names = set(events.Tags()["scalars"])
    assert {"losses/policy_loss", "charts/SPS", "charts/env_steps", "charts/lag"} <= names
    assert {"perf/learner/train", "perf/learner/wait", "perf/rollout/env", "perf/rollout/predict"} <= names


def test_what_cannot_be_run_is_refused(tmp_path, capsys):
    for given, said in (
        (["rl_reech"], "did you mean rl_reach"),
        (["rl_reach", "--resume"], "--resume needs --out"),
        (["rl_reach", "--out", str(tmp_path), "--set", "ppo.lamb=1"], "did you mean lam"),
        (
            ["rl_reach", "--out", str(tmp_path), "--set", "policy.factory=somaspeed_patch.cli:none"],
            "expected module:name",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["rl", *given])
        assert ended.value.code == 2 and said in capsys.readouterr().err


WORLD = """
import numpy as np
from somaspeed_patch.testing_rl_reach_world import ReachWorld

class PaintedWorld(ReachWorld):
    '''Shows its steps since the reset as a grey value, and how often it was looked at.'''

    def reset(self, init_state, seed):
        super().reset(init_state, seed)
        self._step = self._looks = 0

    def step(self, action):
        self._step += 1
        return super().step(action)

    def observe(self):
        self._looks += 1
        image = np.full((9, 15, 3), 20 * self._step, np.uint8)
        text = np.array("reach, with an image!")
        return {**super().observe(), "image": image, "looks": np.array([self._looks]), "instruction": text}
"""


@pytest.fixture
def painted(tmp_path, monkeypatch):
    """The name of a world with images."""
    (tmp_path / "painted.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    return "painted:PaintedWorld"


def test_only_a_filmed_episode_is_rendered_at_every_step(painted):
    from dataclasses import replace

    from somaspeed_patch.rl.env_pool import EnvPool
    from somaspeed_patch.testing_rl_reach_world import SPEC

    with EnvPool([replace(SPEC, factory=painted, horizon=5)] * 2, start_timeout=60) as pool:
        for slot in (0, 1):
            pool.submit_reset(slot, 0, filmed=slot == 1)
        seen = results(pool)
        chunks = []
        for _ in range(2):
            for slot in (0, 1):
                pool.submit_step(slot, np.zeros((3, 7)))
            chunks.append(results(pool))
    assert seen[0]["looks"] == seen[1]["looks"] == 1
    for (plain, filmed), executed in zip(chunks, (3, 2), strict=True):
        assert plain.executed == filmed.executed == executed and plain.pictures == ()
        assert [each.shape for each in filmed.pictures] == [(9, 15, 3)] * executed
        np.testing.assert_array_equal(filmed.observation["state"], plain.observation["state"])
        np.testing.assert_array_equal(filmed.pictures[-1], filmed.observation["image"])
    assert [int(each.observation["looks"][0]) for each in chunks[1]] == [3, 6]
    assert [int(each[0, 0, 0]) for _, filmed in chunks for each in filmed.pictures] == [20, 40, 60, 80, 100]


def results(pool):
    found = {}
    while pool.owed:
        found.update(pool.ready(60))
    return [found[slot] for slot in sorted(found)]


@pytest.mark.usefixtures("steps_by_torch")
def test_evaluations_are_filmed_whole(painted, tmp_path):
    """Two of four episodes, as videos of even sizes with a frame for the reset and one for every step."""
    av = pytest.importorskip("av")
    out = tmp_path / "run"
    settings = (
        f"env.factory={painted}", "env.slots=2", "iterations=1", "evaluate.episodes=2", "evaluate.videos=3",
        "rollout.init_states=[0]",
    )  # fmt: skip
    assert main(["rl", "rl_reach", "--out", str(out), *(f"--set={each}" for each in settings)]) == 0
    told = [each for each in lines(out) if each["kind"] == "evaluation"]
    assert [len(each["videos"]) for each in told] == [3, 3]
    names = sorted(Path(each).name for each in told[0]["videos"])
    assert [each.split("-")[:2] for each in names] == [
        ["slot_0", "episode_0"], ["slot_0", "episode_1"], ["slot_1", "episode_0"],
    ]  # fmt: skip
    assert all(each.endswith("-reach_with_an_image.mp4") for each in names)
    for name in told[0]["videos"]:
        with av.open(str(out / name)) as video:
            frames = [each.to_ndarray(format="rgb24") for each in video.decode(video=0)]
        assert {each.shape for each in frames} == {(10, 16, 3)}
        grey = [float(each.mean()) for each in frames]
        np.testing.assert_allclose(grey, 20 * np.arange(len(frames)), atol=4)
        assert ("success" in name) == (len(frames) < 7) or len(frames) == 7


def test_imageio_writes_the_same_videos(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    av = pytest.importorskip("av")
    pictures = [np.full((32, 48, 3), 30 * step, np.uint8) for step in range(6)]
    videos._by_ffmpeg(pictures, tmp_path / "one.mp4")
    with av.open(str(tmp_path / "one.mp4")) as video:
        frames = [each.to_ndarray(format="rgb24") for each in video.decode(video=0)]
    assert [each.shape for each in frames] == [(32, 48, 3)] * 6
    np.testing.assert_allclose([each.mean() for each in frames], 30 * np.arange(6), atol=4)
