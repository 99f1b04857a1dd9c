"""RL with images, whole: `somaspeed rl rl_libero_tiny`, a tiny pi0.5 in four real LIBERO environments."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("lerobot", reason="needs lerobot")
if find_spec("libero") is None:
    pytest.skip("needs the simulator: pip install hf-libero==0.1.4 mujoco==3.3.2", allow_module_level=True)

import somaspeed_patch
from somaspeed_patch.rl import flow_sde
from somaspeed_patch.rl_run import build, checkpoints
from somaspeed_patch.rl_run.recipe_file import load
from somaspeed_patch.tiny_pi05 import byte_tokenizer
from somaspeed_patch.tiny_pi05.shrink import shrunk
from somaspeed_patch.tiny_pi05.sizes import SIZES

pytestmark = pytest.mark.timeout(1500)  # two runs, each of which builds four scenes
NOT_PLUGGED = ("policy.plugin=none",)  # what the plugin does is undone here after each test


def somaspeed(*words, config):
    """Run the command in a process of its own; what it said."""
    environment = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"LIBERO_CONFIG_PATH": str(config), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "somaspeed_patch", "rl", "rl_libero_tiny", *words],
        env=environment, stderr=subprocess.PIPE, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Two iterations and both evaluations, then a third one behind a resume; the folder and what was said."""
    out, config = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("libero")
    first = somaspeed("--out", str(out), config=config)
    more = ("--iterations", "3", "--resume", "--set", "evaluate.every=0", "--set", "checkpoint.keep=0")
    return out, first, somaspeed("--out", str(out), *more, config=config)


@pytest.fixture
def tiny():
    """pi0.5 is shrunk and patched, as in the run."""
    byte_tokenizer.install()
    try:
        with shrunk(SIZES["micro"]), somaspeed_patch.patched("pi05"):
            yield
    finally:
        byte_tokenizer.uninstall()


def lines(out, kind):
    found = [json.loads(each) for each in (out / "metrics.jsonl").read_text().splitlines()]
    return [each for each in found if each["kind"] == kind]


def folder(out, number):
    return out / "checkpoints" / f"{number:06d}"


def test_rollouts_are_collected_trained_on_and_published(ran):
    out, first, second = ran
    found = lines(out, "iteration")
    assert [each["iteration"] for each in found] == [1, 2, 3]
    assert all(
        each["env_steps"] == 4 * 32 * each["iteration"] for each in found
    )  # nobody solves it by chance
    assert all(each["charts/samples"] == 4 * 4 and each["lag"] <= 1 for each in found)
    assert found[0]["lag"] == 0 and found[2]["lag"] == 0  # the first of each run has nothing to be behind
    assert all(abs(each["losses/old_approx_kl"]) < 0.1 for each in found)
    assert all(each["perf/rollout/env"] > 0 and each["perf/learner/train"] > 0 for each in found)
    assert "pi05/frozen_prefix" in first and "task x slots: 0 x2, 5 x2" in first
    assert "going on behind iteration 2" in second


def test_the_expert_was_trained_and_the_backbone_was_not(ran):
    one, two, three = (checkpoints.load(folder(ran[0], number)) for number in (1, 2, 3))
    assert one.backbone == two.backbone == three.backbone
    assert one.heads.keys() == two.heads.keys()
    moved = [name for name in one.heads if not torch.equal(one.heads[name], two.heads[name])]
    assert any("action_out_proj" in name for name in moved) and any("value_head" in name for name in moved)
    assert any(not torch.equal(two.heads[name], three.heads[name]) for name in moved)
    assert [each.progress.played for each in (one, two, three)] == [(1,) * 4, (2,) * 4, (3,) * 4]
    assert [each.learner["steps"] for each in (one, two, three)] == [4, 8, 12]


def test_an_evaluation_is_filmed_at_every_step(ran):
    av = pytest.importorskip("av")
    out = ran[0]
    found = lines(out, "evaluation")
    assert [each["iteration"] for each in found] == [0, 2]
    for each in found:
        assert each["episodes"] == 4 and set(each["tasks"]) == {"0", "5"}
        [name] = each["videos"]
        assert "slot_0-episode_0-failure-pick_up_the_black_bowl_between" in name
        with av.open(str(out / name)) as video:
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert len(frames) == 33 and {frame.shape for frame in frames} == {(64, 128, 3)}
        assert frames[0].std() > 20 and (frames[0] != frames[-1]).any()


def test_a_checkpoint_is_lerobots(ran, tiny):
    """Loaded by its classes it has the weights that were trained, and acts as the run's policy does."""
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.pi05 import PI05Policy

    saved = folder(ran[0], 3)
    policy = PI05Policy.from_pretrained(saved / "pretrained_model").eval()
    weights, trained = dict(policy.named_parameters()), checkpoints.load(saved).heads
    ours = {name: each for name, each in trained.items() if not name.startswith("value_head.")}
    assert len(ours) > 10 and all(torch.equal(weights[name], each) for name, each in ours.items())
    pre, post = make_pre_post_processors(policy.config, pretrained_path=str(saved / "pretrained_model"))
    recipe = load("rl_libero_tiny", NOT_PLUGGED)
    parts = build.make_parts(recipe, saved / "pretrained_model")
    seen = observation()
    batch = parts.interface.batch([seen])
    flow, draws = recipe.ppo.flow, drawn(parts.policy, recipe.ppo.flow)
    chunk = parts.policy.sample(parts.policy.encode(batch), flow, draws).action[:, :, :7]
    theirs = pre({**raw(seen), "task": str(seen["instruction"])})
    policy.config.num_inference_steps = flow.steps
    with torch.no_grad():
        expected = policy.predict_action_chunk(theirs, noise=draws.noise.clone(), num_steps=flow.steps)
    torch.testing.assert_close(chunk, expected, rtol=0, atol=1e-5)
    assert post(expected).shape == (1, 10, 7)


def drawn(policy, flow):
    from dataclasses import replace

    found = flow_sde.draw(1, policy.shape, flow, torch.Generator().manual_seed(3))
    return replace(found, k=torch.full_like(found.k, -1))


def observation():
    import numpy as np

    from somaspeed_patch.rl.env_process import INSTRUCTION

    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 255, (64, 64, 3), dtype=np.uint8) for name in ("image", "image2")}
    state = rng.uniform(-1, 1, 8).astype(np.float32)
    return {**images, "state": state, INSTRUCTION: np.array("pick up the bowl")}


def raw(seen):
    """An observation as LeRobot's evaluation gives it to the preprocessor."""
    images = {
        f"observation.images.{name}": torch.from_numpy(seen[name]).permute(2, 0, 1).float() / 255
        for name in ("image", "image2")
    }
    return {**images, "observation.state": torch.from_numpy(seen["state"])}


EVALUATION = """
from somaspeed_patch.libero import bootstrap

bootstrap.setup("osmesa")  # LIBERO's meshes are not in its wheel
from lerobot.scripts.lerobot_eval import main

main()
"""


def test_lerobots_own_evaluation_takes_a_checkpoint(ran, tmp_path):
    """One short episode by lerobot-eval, in its own environment."""
    done = subprocess.run(
        [
            sys.executable, "-c", EVALUATION, "--tiny.discover_packages_path=somaspeed_patch.tiny_pi05",
            f"--policy.path={folder(ran[0], 3) / 'pretrained_model'}", "--policy.n_action_steps=8",
            "--env.type=libero", "--env.task=libero_spatial", "--env.task_ids=[0]", "--env.episode_length=8",
            "--env.observation_height=64", "--env.observation_width=64", "--eval.n_episodes=1",
            "--eval.batch_size=1", f"--output_dir={tmp_path / 'out'}",
        ],
        env={**os.environ, "LIBERO_CONFIG_PATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "eval_info.json").read_text())
    assert found["overall"]["n_episodes"] == 1 and found["overall"]["pc_success"] == 0
