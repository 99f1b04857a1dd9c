"""One LIBERO task as a simulator that renders only when asked and resets to the same bytes every time.

Two facts about robosuite 1.4 shape this file. It renders both cameras at every step, which is nine tenths of
a step's cost on a CPU (19 ms without, 250 ms with 256 x 256 images); here `images = False` returns black
images without rendering, the physics is bit-equal, and `look` renders afterwards what the step would have
shown. And its soft reset, 0.5 s against 7 s for a hard one that rebuilds the model, leaves the solver's warm
start and the gripper's last command of the episode before; here both are zeroed, after which nothing of that
episode is left. It is a hard reset to 1e-14; to the last bit is `soft_reset`, which needs hooks in robosuite.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from somaspeed_patch.libero import bootstrap, film, substeps

Observation = dict[str, NDArray[Any]]

NO_OP = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
SETTLE_STEPS = 10  # as in LeRobot's LiberoEnv: initial states float a few millimetres above the table


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a LIBERO suite."""

    suite: str
    index: int
    language: str  # the instruction a policy is given
    bddl: str  # path of the scene's description
    init_states: NDArray[np.float64]  # [50, state], flattened mujoco states


def load_task(index: int, suite: str = "libero_spatial") -> Task:
    """Read task `index` of `suite` from the installed hf-libero.

    Raises: ValueError: there is no such task.
    """
    bootstrap.setup()
    from lerobot.envs.libero import get_task_init_states  # imports libero, so only after setup
    from libero.libero import benchmark, get_libero_path

    tasks = benchmark.get_benchmark_dict()[suite]()
    if not 0 <= index < tasks.n_tasks:
        raise ValueError(f"libero: task of {suite} must be 0 to {tasks.n_tasks - 1}, but is {index}")
    task = tasks.get_task(index)
    bddl = os.path.join(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file)
    states = get_task_init_states(tasks, index)
    return Task(suite=suite, index=index, language=task.language, bddl=bddl, init_states=states)


class Simulator:
    """A robosuite environment for one task; observations are robosuite's own dicts."""

    def __init__(self, task: Task, *, image_size: int | None = None, software_gl: bool = False) -> None:
        """Build the scene: 5 s and 2.3 GB with cameras, mostly textures.

        Args:
            task: what `load_task` returned.
            image_size: height and width of both cameras' images in pixels; None builds without cameras.
            software_gl: other, cheaper images for tests, see `film.use_software_profile`.
        """
        self.task = task
        self.images = image_size is not None
        self._env = _build(task, image_size, software_gl)
        self._sim = self._env.env.sim
        self._render, self._sim.render = self._sim.render, self._render_on_demand
        self._film, self._developing = film.Film(self._sim), False
        self._reusable = substeps.why_not(self._sim) is None
        for name, reusing in (("forward", substeps.forward), ("step", substeps.step)):
            setattr(self._sim, name, partial(reusing, getattr(self._sim, name), self._sim))

    def reset(self, init_state: int, seed: int = 0) -> Observation:
        """Put the scene into one of its initial states and let it settle.

        Args:
            init_state: index into the task's initial states.
            seed: places the fixtures (cabinet, stove), which the initial state does not contain.
        Returns: the observation after settling.
        """
        images, self.images = self.images, False
        self._env.seed(seed)
        self._env.reset()
        _forget_last_episode(self._env.env)
        self._env.set_init_state(self.task.init_states[init_state])
        for _ in range(SETTLE_STEPS - 1):
            self._step(NO_OP)
        self.images = images
        return self.step(NO_OP)[0]

    def step(self, action: Sequence[float] | NDArray[np.float32]) -> tuple[Observation, bool]:
        """Apply one action for 1/20 s; returns the observation after it, and whether the task is solved."""
        obs, _, solved, _ = self._step(action)
        return dict(obs), bool(solved)

    def look(self) -> Observation:
        """The images of the last step or reset, rendered now where they were not.

        Returns: uint8 [height, width, 3] by camera, "agentview_image" and "robot0_eye_in_hand_image"; the
            bytes are those that the step would have shown with `images`. Empty without cameras.
        """
        cameras = [one for one in self._env.env._observables.values() if one.modality == "image"]
        self._developing = not self.images
        try:
            return {one.name: np.array(one._sensor({})) if self._developing else one.obs for one in cameras}
        finally:
            self._developing = False

    @property
    def objects(self) -> tuple[str, ...]:
        """What the task is about by the scene's description, in its order: objects, fixtures, regions."""
        return tuple(self._env.obj_of_interest)

    def pose(self, name: str) -> NDArray[np.float64]:
        """Where one of `objects` is in the world: position [3] in m, then quaternion [4] as x, y, z, w."""
        import mujoco

        bodies, data = self._env.env.obj_body_id, self._sim.data
        if name in bodies:
            return np.concatenate([data.body_xpos[bodies[name]], np.roll(data.body_xquat[bodies[name]], -1)])
        site, quaternion = self._sim.model.site_name2id(name), np.empty(4)
        mujoco.mju_mat2Quat(quaternion, data.site_xmat[site].ravel())
        return np.concatenate([data.site_xpos[site], np.roll(quaternion, -1)])

    @property
    def diverged(self) -> bool:
        """Whether MuJoCo met infinite numbers since the reset, and began again from the model."""
        from mujoco import mjtWarning as kinds

        warnings = self._sim.data._data.warning
        bad = (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC)
        return any(warnings[kind].number for kind in bad)

    def close(self) -> None:
        """Free the renderer and the model."""
        self._env.close()

    def _step(self, action: Sequence[float] | NDArray[np.float32]) -> Any:
        if not self._reusable:
            return self._env.step(action)
        with substeps.reused(self._sim):
            return self._env.step(action)

    def _render_on_demand(self, width: int, height: int, camera_name: str, **kwargs: Any) -> Any:
        if self.images:
            return self._render(width=width, height=height, camera_name=camera_name, **kwargs)
        if self._developing:
            return self._film.develop(camera_name, width, height)
        self._film.expose(camera_name)
        return np.zeros((height, width, 3), np.uint8)


def _build(task: Task, image_size: int | None, software_gl: bool) -> Any:
    from libero.libero.envs.env_wrapper import ControlEnv

    cameras: dict[str, Any] = {"use_camera_obs": False, "has_offscreen_renderer": False}
    if image_size is not None:
        cameras = {"camera_heights": image_size, "camera_widths": image_size}
    env = ControlEnv(bddl_file_name=task.bddl, hard_reset=False, **cameras)
    if software_gl and image_size is not None:
        film.use_software_profile(env.env.sim)
    env.reset()  # hides the gripper's marker sites, which the first images would show
    return env


def _forget_last_episode(env: Any) -> None:
    """Zero what robosuite's soft reset leaves behind."""
    env.sim.data._data.qacc_warmstart[:] = 0
    for robot in env.robots:
        robot.gripper.current_action = np.zeros(robot.gripper.dof)
