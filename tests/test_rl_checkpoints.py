"""Checkpoints of whole runs: exact resumes, a full disk, a failing learner, flat memory. No simulator."""

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch

from somaspeed_patch.rl_run import checkpoints, session
from somaspeed_patch.rl_run.recipe_file import load
from somaspeed_patch.testing_rl_reach_world import MORTAL

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.usefixtures("steps_by_torch", "unpatched")

QUICK = (
    "env.slots=2", "rollout.episodes=3", "rollout.init_states=20", "ppo.global_batch=16",
    "ppo.micro_batch=8", "ppo.update_epoch=2", "checkpoint.every=1", "checkpoint.keep=0", "evaluate.every=0",
)  # fmt: skip


def recipe(iterations, *settings):
    return load("rl_reach", [*QUICK, f"iterations={iterations}", *settings])


def lines(out, kind="iteration"):
    found = [json.loads(each) for each in (out / "metrics.jsonl").read_text().splitlines()]
    return [each for each in found if each["kind"] == kind]


def state(out, number):
    return torch.load(out / f"checkpoints/{number:06d}/training_state/state.pt", weights_only=True)


def numbers(out):
    return [int(each.name) for each in checkpoints.finished(out / "checkpoints")]


def same(one, other):
    """Bit for bit, whatever is nested in what."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def learned(out, number):
    """All of a checkpoint but the time it took."""
    found = state(out, number)
    return {**found, "progress": {**found["progress"], "seconds": 0}}


def told(out):
    """What metrics.jsonl says of iterations, but for time and memory."""
    clocks = ("time", "seconds", "phases", "env_steps_per_second", "samples_per_second", "memory_mib")
    return [
        {n: v for n, v in each.items() if n not in clocks and not n.startswith(("perf/", "charts/SPS"))}
        for each in lines(out)
    ]


def orphans():
    children = psutil.Process().children(recursive=True)
    return [each for each in children if "spawn_main" in " ".join(each.cmdline())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four iterations one behind the other, without an evaluation."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("somaspeed_patch.kernels.adamw.INTERPRETED", False)
        assert session.run(recipe(4), out) == 0
    return out


@pytest.mark.parametrize("lag", ["none", "0"])
def test_a_resumed_run_is_the_whole_one_bit_for_bit(whole, tmp_path, lag):
    """Two iterations, then two more of what the checkpoint has; with evaluations, which change nothing."""
    settings = (f"lag={lag}", "evaluate.every=1", "evaluate.episodes=2")
    assert session.run(recipe(2, *settings), tmp_path) == 0
    assert session.run(recipe(4, *settings), tmp_path, resume=True) == 0
    assert numbers(tmp_path) == numbers(whole) == [1, 2, 3, 4]
    for number in numbers(whole):
        assert same(learned(tmp_path, number), learned(whole, number))
    found = told(tmp_path)
    assert [each["iteration"] for each in found] == [1, 2, 3, 4]
    ours = [{name: value for name, value in each.items() if "queue" not in name} for each in found]
    assert ours == told(whole)
    evaluated = lines(tmp_path, "evaluation")
    assert [each["iteration"] for each in evaluated] == [0, 1, 2, 3, 4]
    assert all(each["episodes"] == 4 for each in evaluated) and not orphans()
    assert not same(learned(whole, 3)["heads"], learned(whole, 4)["heads"])


def test_a_resume_with_lag_neither_loses_nor_repeats_a_sample(tmp_path):
    """What was played ahead is played again: 3 episodes of each slot an iteration, and no other."""
    assert session.run(recipe(3, "lag=1"), tmp_path) == 0
    assert session.run(recipe(6, "lag=1"), tmp_path, resume=True) == 0
    found = lines(tmp_path)
    for number, line in enumerate(found, start=1):
        progress = state(tmp_path, number)["progress"]
        assert progress["played"] == (3 * number,) * 2 and progress["iteration"] == number
        assert progress["env_steps"] == line["env_steps"] and line["lag"] <= 1
    assert len(found) == 6 and found[3]["lag"] == 0  # nothing of the first run is trained on in the second
    assert all(later["env_steps"] > line["env_steps"] for line, later in zip(found, found[1:], strict=False))


def test_a_changed_recipe_is_not_gone_on_with(whole):
    with pytest.raises(ValueError, match=r"the recipe has changed.*ppo.gamma: 0.99, now 0.5.*seed: 0, now 3"):
        session.run(recipe(5, "ppo.gamma=0.5", "seed=3"), whole, resume=True)
    with pytest.raises(ValueError, match="has a run in it; go on with --resume, or name another --out"):
        session.run(recipe(5), whole)


def test_a_run_that_is_done_has_nothing_to_resume(whole):
    before = (whole / "metrics.jsonl").read_text()
    assert session.run(recipe(4, "log.tensorboard=true"), whole, resume=True) == 0
    assert (whole / "metrics.jsonl").read_text() == before and numbers(whole) == [1, 2, 3, 4]


def test_old_checkpoints_go_and_half_ones_are_cleared(tmp_path):
    left = tmp_path / "checkpoints" / ".writing-000007" / "pretrained_model"
    left.mkdir(parents=True)
    assert session.run(recipe(4, "checkpoint.keep=2"), tmp_path, resume=True) == 0
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["000003", "000004", "last"]
    assert (tmp_path / "checkpoints" / "last").resolve().name == "000004"


def test_other_frozen_weights_are_not_gone_on_with(whole, tmp_path, monkeypatch):
    """The policy's frozen part is its normalisation."""
    (tmp_path / "otherwise.py").write_text(
        textwrap.dedent("""
        from somaspeed_patch.rl.state_flow import StateFlow
        from somaspeed_patch.rl_run import reach

        def make(recipe):
            parts = reach.make(recipe)
            parts.policy.policy.mean += 1
            return reach.StateParts(StateFlow(parts.policy.policy), parts.interface)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = checkpoints.load(whole / "checkpoints" / "000002")
    from somaspeed_patch.rl_run import build

    made = build.make_parts(recipe(5, "policy.factory=otherwise:make"))
    learner = build.Learner(made.policy, build.ValueHead(4, (32,)), recipe(5).ppo)
    with pytest.raises(ValueError, match="the frozen weights have digest .*policy.path must give the same"):
        found.restore(learner)
    assert learner.version == 0


@pytest.fixture
def disk(tmp_path):
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Take the room that is left; the file that takes it."""
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    return ballast


def test_a_full_disk_leaves_the_finished_checkpoints(whole, disk):
    out = disk / "run"
    assert session.run(recipe(2), out) == 0
    ballast = fill(disk)
    with pytest.raises(session.RunFailed, match=r"at its checkpoint.*the last one could not.*000002; go on"):
        session.run(recipe(3), out, resume=True)
    assert numbers(out) == [1, 2] and (out / "checkpoints" / "last").resolve().name == "000002"
    assert not list((out / "checkpoints").glob(".*")) and not orphans()
    assert same(learned(out, 2), learned(whole, 2))
    ballast.unlink()
    assert session.run(recipe(3), out, resume=True) == 0
    assert same(learned(out, 3), learned(whole, 3))
    assert [each["iteration"] for each in lines(out)] == [1, 2, 3]


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """The name of a factory whose policy cannot be saved at the times that fails.txt names."""
    (tmp_path / "failing.py").write_text(
        textwrap.dedent(f"""
        import errno
        from pathlib import Path
        from somaspeed_patch.rl_run import reach

        class Parts(reach.StateParts):
            times = 0

            def save(self, directory):
                self.times += 1
                super().save(directory)
                if str(self.times) in Path({str(tmp_path / "fails.txt")!r}).read_text().split():
                    raise OSError(errno.ENOSPC, "No space left on device")

        def make(recipe):
            parts = reach.make(recipe)
            return Parts(parts.policy, parts.interface)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    return "policy.factory=failing:make"


def test_a_run_goes_on_without_a_checkpoint(failing, tmp_path, caplog):
    (tmp_path / "fails.txt").write_text("1 2")
    assert session.run(recipe(4, failing), tmp_path / "run") == 0
    assert numbers(tmp_path / "run") == [3, 4] and not list((tmp_path / "run/checkpoints").glob(".*"))
    assert caplog.text.count("could not be written: OSError: [Errno 28] No space left") == 2


def test_three_checkpoints_in_a_row_that_fail_end_the_run(failing, tmp_path):
    (tmp_path / "fails.txt").write_text("2 3 4")
    with pytest.raises(session.RunFailed, match=r"iteration 5 failed at its checkpoint: OSError.*3 in a row"):
        session.run(recipe(9, failing), tmp_path / "run")
    assert numbers(tmp_path / "run") == [1] and len(lines(tmp_path / "run")) == 4 and not orphans()


def test_a_learner_that_fails_says_at_which_iteration(tmp_path):
    """Its first optimizer step of the actor leaves nothing finite: a step of 1e30."""
    settings = ("ppo.actor_lr=1e30", "ppo.critic_warmup=4", "ppo.global_batch=8")
    with pytest.raises(
        session.RunFailed, match=r"iteration \d failed at its train: ValueError: learner: the"
    ) as it:
        session.run(recipe(9, *settings), tmp_path)
    done = len(lines(tmp_path))
    assert f"iteration {done + 1} failed" in str(it.value)
    assert numbers(tmp_path) == list(range(1, done + 1)) and not orphans()


@pytest.mark.parametrize("lag", ["none", "1"])
def test_a_rollout_that_fails_says_so(tmp_path, lag):
    """An environment that ends at its eighth step of every life, too often by the second iteration."""
    settings = (f"env.factory={MORTAL}", "env.slots=1", "rollout.episodes=2", f"lag={lag}")
    with pytest.raises(session.RunFailed, match=r"iteration \d failed at its rollout: RuntimeError: ") as it:
        session.run(recipe(9, *settings), tmp_path / "run")
    found = lines(tmp_path / "run")
    assert "env 0 (reach task 0) was lost 4 times" in str(it.value) and "exited with code 7" in str(it.value)
    assert f"iteration {len(found) + 1} failed" in str(it.value)
    assert found[0]["lost"] == 1 and numbers(tmp_path / "run") == [each["iteration"] for each in found]
    assert not orphans()


def test_memory_is_flat(tmp_path):
    """Over 200 iterations side by side, with a checkpoint at every tenth."""
    settings = ("lag=1", "rollout.episodes=1", "checkpoint.every=10", "checkpoint.keep=2")
    assert session.run(recipe(200, *settings), tmp_path) == 0
    found = [each["memory_mib"] for each in lines(tmp_path)]
    assert len(found) == 200 and all(map(math.isfinite, found))
    middle, end = sorted(found[80:120])[20], sorted(found[160:])[20]
    assert end - middle < 4, (middle, end)


def test_an_evaluation_keeps_no_features():
    """It plays as the training's actor without noise would, to the bit."""
    from somaspeed_patch.rl.collect import Collector
    from somaspeed_patch.rl_run import build

    found = build.built(recipe(1, "evaluate.episodes=2"))
    with found.pool as pool:
        plan = build.evaluation(found.recipe)
        played = [Collector(pool, plan).collect(each) for each in (found.evaluator(), found.actor())]
    chunks = [[each for one in rollout.trajectories for each in one.chunks] for rollout in played]
    assert [each.record.bytes for each in chunks[0]] == [0] * len(chunks[0]) and chunks[1][0].record.bytes > 0
    assert all(torch.equal(one.x, other.x) for one, other in zip(*chunks, strict=True))
    assert {each.k for each in chunks[0]} == {-1}
    with pytest.raises(RuntimeError, match="features of an evaluation are not kept"):
        found.evaluator().store.read([], found.parts.policy.tag, None)


FAMILIES = {
    "pi05": {
        "dtype": "bfloat16", "chunk_size": 10, "n_action_steps": 10, "max_state_dim": 8, "max_action_dim": 8,
        "image_resolution": [56, 56], "tokenizer_max_length": 192,
    },
    "groot": {
        "base_model_path": "somaspeed/tiny-groot", "embodiment_tag": "libero_sim", "max_state_dim": 16,
        "max_action_dim": 16, "use_bf16": False, "chunk_size": 16, "n_action_steps": 16,
    },
    "molmoact2": {
        "checkpoint_path": "somaspeed/tiny-molmoact2", "model_dtype": "float32", "chunk_size": 10,
        "discrete_action_tokenizer": "somaspeed/tiny-molmoact2-fast", "num_flow_timesteps": 2,
        "n_action_steps": 10,
    },
}  # fmt: skip
LOADED_AGAIN = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from somaspeed_patch.rl import flow_sde
from somaspeed_patch.rl_run import build
from somaspeed_patch.rl_run.recipe_file import load

def acts(parts, flow):
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 255, (64, 64, 3), dtype=np.uint8) for name in ("image", "image2")}
    state = rng.uniform(-1, 1, 8).astype(np.float32)
    seen = {**images, "state": state, "instruction": np.array("pick up the bowl")}
    draws = flow_sde.draw(1, parts.policy.shape, flow, torch.Generator().manual_seed(3))
    chunk = parts.policy.sample(parts.policy.encode(parts.interface.batch([seen])), flow, draws).action
    return parts.interface.actions(chunk[:, :8, : parts.policy.action_dim])

folder, *settings = sys.argv[1:]
recipe = load("rl_libero_tiny", settings)
first = build.make_parts(recipe)
with torch.no_grad():
    for each in first.policy.trainable().values():
        each.add_(torch.randn_like(each) * 0.01)  # as after training
first.save(Path(folder))
again = build.make_parts(recipe, Path(folder))
assert again.policy.tag == first.policy.tag
mine, theirs = first.policy.trainable(), again.policy.trainable()
assert mine.keys() == theirs.keys() and len(mine) > 10
assert all(torch.equal(mine[name], theirs[name]) for name in mine)
one, other = (acts(each, recipe.ppo.flow) for each in (first, again))
assert one.shape == (1, 8, 7) and one.std() > 0.01 and (one == other).all(), (one, other)
"""


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_lerobots_policies_are_built_saved_and_loaded(tmp_path, kind):
    """In a process of its own, for the tiny models' plugins change it; pi0.5 in bf16."""
    pytest.importorskip("lerobot")
    numbers = {"min": -1.0, "max": 1.0, "mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
    stats = {
        name: {each: [value] * size for each, value in numbers.items()}
        for name, size in (("observation.state", 8), ("action", 7))
    }
    settings = (
        f"policy.type={kind}", f"policy.plugin=somaspeed_patch.tiny_{kind}.activate",
        f"policy.config={json.dumps(FAMILIES[kind])}", f"policy.stats={json.dumps(stats)}",
    )  # fmt: skip
    words = [sys.executable, "-c", LOADED_AGAIN, str(tmp_path / "saved"), *settings]
    (tmp_path / "saved").mkdir()
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["policy.config={chunk_sise: 4}"],
            r"policy.config: pi05 has no field chunk_sise; did you mean chunk_size",
        ),
        (["policy.path=/nowhere/at/all"], r"a LeRobot checkpoint's folder, but there is no /nowhere/at/all"),
        (
            ["policy.path={here}"],
            r"has no config.json and no model.safetensors; expected a LeRobot checkpoint",
        ),
        (["policy.path={here}/other"], r"expected a checkpoint of pi05, but .*other is of act"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused(tmp_path, settings, words):
    pytest.importorskip("lerobot")
    from somaspeed_patch.rl_run import build

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"type": "act"}')
    (other / "model.safetensors").touch()
    given = [each.replace("{here}", str(tmp_path)) for each in settings]
    with pytest.raises(ValueError, match=words):
        build.make_parts(load("rl_libero_tiny", ["policy.plugin=none", *given]))
