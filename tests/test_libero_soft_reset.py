"""A soft reset leaves what a hard one leaves: every array of MuJoCo's, in the real simulator."""

import threading
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

import somaspeed_patch
from somaspeed_patch.libero import bootstrap, soft_reset
from somaspeed_patch.testing_libero import make_env

# Solver's scratch memory behind the constraints of the moment, which MuJoCo does not clear.
SCRATCH = ("efc_", "iefc_")


def arrays(found, prefix):
    """MuJoCo's arrays by name, copied; those of meshes and textures, which nothing writes to, left out."""
    named = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    kept = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
    scratch = [name for name in kept if name.startswith(SCRATCH) or "island" in name]
    small = [name for name, value in kept.items() if value.nbytes < 2e6 and name not in scratch]
    return {f"{prefix}.{name}": kept[name].copy() for name in small}


def simulation(scene):
    """MuJoCo's model and data."""
    return arrays(scene.sim.model._model, "model") | arrays(scene.sim.data._data, "data")


def everything(scene):
    """The simulation, and what the arm's controller and gripper remember."""
    robot = scene.robots[0]
    own = {
        "base": robot.base_pos, "controller": robot.controller.ee_pos, "goal": robot.controller.goal_pos,
        "gripper": robot.gripper.current_action, "random": np.random.random(3),
    }  # fmt: skip
    return simulation(scene) | {name: np.array(value) for name, value in own.items()}


@pytest.fixture
def libero(monkeypatch, tmp_path):
    """LIBERO's config in a folder of its own; the user's stays as it is."""
    if find_spec("libero") is None:
        pytest.skip("needs the simulator: pip install hf-libero==0.1.4 mujoco==3.3.2")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    bootstrap.setup("osmesa")


def wear(scene, seed):
    """Leave traces: random steps with a closed gripper, the stove's knob turned, its mark shown."""
    scene.object_states_dict["flat_stove_1"].set_joint(1.0)
    for action in np.random.default_rng(seed).uniform(-1, 1, (8, 7)):
        scene.step(np.append(action[:6], 1.0))
    scene.visualize(dict.fromkeys(scene._visualizations, True))


def test_every_array_is_a_hard_resets(libero):
    """At the reset's end, and before anything is placed: where the solver starts and the arm is measured."""
    with somaspeed_patch.patched("lerobot_libero"):
        env = make_env("libero_spatial", 0, image_size=64)
        env._ensure_env()
        scene, begun, ended = env._env.env, [], []
        references = scene._setup_references
        scene._setup_references = lambda: (begun.append(simulation(scene)), references())
        for soft in (True, False, True):
            wear(scene, len(ended))
            np.random.seed(9)
            with soft_reset.soft(scene) if soft else nullcontext():
                scene.reset()
            ended.append(everything(scene))
        assert scene.hard_reset and "reset" not in vars(scene.sim)
        env.close()
    assert {"model.body_pos", "data.qpos", "data.qacc_warmstart", "data.xpos", "data.ctrl"} <= set(ended[0])
    for first, hard, last in (begun, ended):
        assert different(first, hard) == different(last, hard) == []


def different(one, other):
    """Names of what is not equal to the last bit."""
    return [name for name in one if not np.array_equal(one[name], other[name], equal_nan=True)]


class Scene:
    """As much of robosuite's environment as `why_not` asks for."""

    hard_reset, deterministic_reset = True, False

    def __init__(self):
        arrays = {name: np.zeros(3) for name in ("body_pos", "body_quat", "site_rgba")}
        self.object_property_initializers = []
        self.sim = type("Sim", (), {"model": SimpleNamespace(_model=SimpleNamespace(**arrays))})()


def test_a_renderer_of_another_thread_is_made_anew_by_a_hard_reset():
    scene = Scene()
    thread = threading.Thread(target=lambda: (soft_reset.loaded(scene, 0), soft_reset.compiled(scene)))
    assert "before patch()" in soft_reset.why_not(scene)
    thread.start()
    thread.join()
    assert soft_reset.why_not(scene) == "another thread than the one that made the renderer"
    soft_reset.compiled(scene)
    assert soft_reset.why_not(scene) is None
    scene.deterministic_reset = True
    assert soft_reset.why_not(scene) == "robosuite was told not to reset hard"
