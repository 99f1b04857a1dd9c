"""What LeRobot's LiberoEnv, hf-libero, robosuite and mujoco do that the adapter relies on.

A red line here after an upgrade means: look at what the host does now; do not simply update the assertion.
"""

import inspect
from importlib.util import find_spec

import pytest

from somaspeed_patch.libero import bootstrap

if find_spec("libero") is None:
    pytest.skip("needs the simulator: pip install hf-libero==0.1.4 mujoco==3.3.2", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def hosts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBERO_CONFIG_PATH", str(tmp_path_factory.mktemp("libero")))
        bootstrap.setup("osmesa")
        yield


def in_order(source, *parts):
    """Whether the parts are in the source, each behind the one before."""
    places = [source.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def lerobot_env():
    from lerobot.envs.libero import LiberoEnv

    return LiberoEnv


def test_liberoenv_resets_seeded_then_by_its_initial_state_then_settles():
    source = inspect.getsource(lerobot_env().reset)
    assert in_order(
        source,
        "_ensure_env()",
        "_env.seed(seed)",
        "_env.reset()",
        "set_init_state(",
        "num_steps_wait",
        "step(",
    )
    assert "return observation, info" in source


def test_liberoenv_builds_resets_and_only_then_keeps_its_scene():
    source = inspect.getsource(lerobot_env()._ensure_env)
    assert in_order(
        source, "OffScreenRenderEnv(", "hard_reset=self.hard_reset", "env.reset()", "self._env = env"
    )


def test_liberoenv_steps_once_and_never_truncates_itself():
    source = inspect.getsource(lerobot_env().step)
    assert source.count("self._env.step(") == 1
    assert "truncated = False" in source


def test_liberoenv_shows_what_robosuite_sampled_and_renders_nothing_for_a_video():
    env = lerobot_env()
    assert "_get_observations()" in inspect.getsource(env.render)
    assert "raw_obs[camera_name]" in inspect.getsource(env._format_raw_obs)
    assert {"camera_name", "camera_name_mapping", "hard_reset"} <= set(inspect.signature(env).parameters)


def test_hard_resets_are_the_default_and_always_handed_over():
    from lerobot.envs.configs import LiberoEnv as Config

    assert Config().hard_reset is True
    assert Config().gym_kwargs["hard_reset"] is True  # so a value given by hand is not to be told from it


def test_rollouts_end_at_the_number_of_steps_that_the_env_names():
    from lerobot.scripts import lerobot_eval

    source = inspect.getsource(lerobot_eval.rollout)
    assert 'env.call("_max_episode_steps")' in source
    assert "step < max_steps" in source


def test_a_hard_reset_loads_compiles_and_forwards_once_a_soft_one_clears():
    from robosuite.environments.base import MujocoEnv

    source = inspect.getsource(MujocoEnv.reset)
    assert in_order(
        source,
        "_destroy_sim()",
        "_load_model()",
        "_initialize_sim()",
        "else",
        "self.sim.reset()",
        "_reset_internal()",
    )
    made = inspect.getsource(MujocoEnv._initialize_sim)
    assert made.count("self.sim.forward()") == 1 and "MjSim.from_xml_string" in made


def test_the_renderer_forwards_once_when_it_is_made_and_only_then():
    from robosuite.environments.base import MujocoEnv
    from robosuite.utils.binding_utils import MjRenderContext, MjRenderContextOffscreen

    assert inspect.getsource(MjRenderContext.__init__).count("sim.forward()") == 1
    assert "forward" not in inspect.getsource(MjRenderContextOffscreen)
    source = inspect.getsource(MujocoEnv._reset_internal)
    assert in_order(
        source, "_render_context_offscreen is None", "MjRenderContextOffscreen(", "_setup_references()"
    )


def test_rendering_is_a_scene_from_the_data_then_its_drawing():
    from robosuite.utils.binding_utils import MjRenderContext

    source = inspect.getsource(MjRenderContext.render)
    assert in_order(source, "mjv_updateScene(", "mjr_render(")
    assert "MjvScene(sim.model._model, maxgeom=1000)" in inspect.getsource(MjRenderContext.__init__)
    assert "mjr_readPixels" in inspect.getsource(MjRenderContext.read_pixels)


def test_observables_keep_their_value_and_their_sensor_where_images_are_put():
    from robosuite.utils.observables import Observable

    assert "self._current_observed_value if self._active" in inspect.getsource(Observable.obs.fget)
    assert "self._sensor(obs_cache)" in inspect.getsource(Observable.update)


def test_cameras_are_rendered_by_keywords_without_a_cache():
    from robosuite.environments.robot_env import RobotEnv

    source = inspect.getsource(RobotEnv._create_camera_sensors)
    assert in_order(
        source, "self.sim.render(", "camera_name=cam_name", "width=cam_w", "height=cam_h", "depth=cam_d"
    )
    assert 'f"{cam_name}_image"' in source


def test_liberos_joints_to_open_are_appended_at_each_load_and_drawn_at_each_reset():
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain

    assert "_setup_placement_initializer" in inspect.getsource(BDDLBaseDomain._load_model)
    placed = inspect.getsource(BDDLBaseDomain._add_placement_initializer)
    assert placed.count("self.object_property_initializers.append(") == 2
    assert "object_property_initializers" not in inspect.getsource(BDDLBaseDomain._load_model)
    assert "object_property_initializer.sample()" in inspect.getsource(BDDLBaseDomain._reset_internal)


def test_grippers_begin_at_zero():
    from robosuite.models.grippers.gripper_model import GripperModel

    assert "self.current_action = np.zeros(self.dof)" in inspect.getsource(GripperModel.__init__)


def test_the_simulator_is_the_one_that_was_measured():
    from importlib.metadata import version

    found = {name: version(name) for name in ("hf-libero", "robosuite", "mujoco")}
    assert found == {"hf-libero": "0.1.4", "robosuite": "1.4.0", "mujoco": "3.3.2"}
