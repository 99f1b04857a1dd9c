"""LIBERO for an environment process: one task in MuJoCo, seen as LeRobot's policies see it.

An observation has
    state    float32 [8]: hand position in m, its rotation as axis-angle in rad, two finger positions in m, as
             LeRobot's LiberoProcessorStep computes them
    objects  float32 [7 N]: position in m and quaternion x, y, z, w in the world's frame of everything that
             the task is about, one after the other (`Simulator.objects`: objects, fixtures and regions in the
             order of the scene's description; in LIBERO-Spatial the bowl, then the plate); for policies
             without images
    instruction  text, of the task
    image, image2  uint8 [H, W, 3]: agentview and wrist, turned by 180 degrees as LiberoProcessorStep does;
             left out without cameras
"""

from __future__ import annotations

import numpy as np
import torch
from lerobot.processor.env_processor import LiberoProcessorStep
from numpy.typing import NDArray

from somaspeed_patch.libero.sim import SETTLE_STEPS, Simulator, load_task
from somaspeed_patch.libero.sim import Observation as RawObservation
from somaspeed_patch.rl.env_process import INSTRUCTION, EnvSpec, Observation

CAMERAS = {"image": "agentview_image", "image2": "robot0_eye_in_hand_image"}
LIMIT = 1000 - SETTLE_STEPS  # robosuite's own horizon, after which it raises


class LiberoWorld:
    """One task; images are rendered when somebody observes, at no other time."""

    def __init__(self, spec: EnvSpec) -> None:
        """Build the scene of `spec`.

        Raises: ValueError: no such task, or the horizon is longer than robosuite steps.
        """
        if not 1 <= spec.horizon <= LIMIT:
            raise ValueError(f"libero: horizon must be 1 to {LIMIT} steps, but is {spec.horizon}")
        torch.set_num_threads(1)
        task = load_task(spec.task, spec.suite)
        self.sim = Simulator(task, image_size=spec.image_size, software_gl=spec.software_gl_profile)
        self.sim.images = False
        self.raw: RawObservation = {}

    def reset(self, init_state: int, seed: int) -> None:
        """Put the scene into one of its initial states, see `Simulator.reset`."""
        self.raw = self.sim.reset(init_state, seed)

    def step(self, action: NDArray[np.float32]) -> bool:
        """Apply one action [7] for 1/20 s; whether the task is solved.

        Raises: ValueError: the simulation has diverged.
        """
        self.raw, solved = self.sim.step(action)
        if self.sim.diverged:
            raise ValueError("libero: the simulation has diverged, and MuJoCo began it anew")
        return solved

    def observe(self) -> Observation:
        """See the module."""
        poses = [self.sim.pose(name) for name in self.sim.objects]
        seen = {
            "state": state_of(self.raw),
            "objects": np.concatenate(poses).astype(np.float32),
            INSTRUCTION: np.array(self.sim.task.language),
        }
        return {**seen, **upright(self.sim.look())}


def state_of(raw: RawObservation) -> NDArray[np.float32]:
    """LeRobot's state [8] of one of robosuite's observations."""
    hand = {"pos": raw["robot0_eef_pos"], "quat": raw["robot0_eef_quat"]}
    robot = {
        "eef": {key: torch.from_numpy(value)[None] for key, value in hand.items()},
        "gripper": {"qpos": torch.from_numpy(raw["robot0_gripper_qpos"])[None]},
    }
    seen = LiberoProcessorStep().observation({"observation.robot_state": robot})
    state: NDArray[np.float32] = seen["observation.state"][0].numpy()
    return state


def upright(images: RawObservation) -> Observation:
    """LeRobot's names, and both axes flipped; {} without cameras."""
    return {
        key: np.ascontiguousarray(images[camera][::-1, ::-1])
        for key, camera in CAMERAS.items()
        if camera in images
    }
