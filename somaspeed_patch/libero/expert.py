"""A scripted expert for LIBERO-Spatial: grasp the bowl by its rim, carry it to the plate, let go.

The script is a table of phases. A phase that moves has a target for the hand, and ends when the hand is there
or its steps are used up; a phase that waits has no target. Actions are those of robosuite's OSC_POSE
controller in delta mode at 20 Hz: one unit of x, y, z asks for 0.05 m within the step, the three rotations
stay 0, and the last number closes (+1) or opens (-1) the gripper. All positions are metres in the world
frame, z up.

The expert reads the simulator's own object positions, so it is no policy: it makes demonstrations and shows
that an environment can be solved. With the better of the two sides of the rim it solves nine of the ten tasks
(not task 4, where the bowl is in a drawer) in 100 to 200 steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

OPEN, CLOSE = -1.0, 1.0
RIM = 0.045  # m from the bowl's axis to where the fingers straddle its wall
METRES_PER_UNIT = 0.05  # OSC_POSE's output_max
REACHED = 0.012  # m; the controller settles within about 0.01 m


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What the targets depend on; every field is a position or offset [3] in metres."""

    hand: Vector  # between the finger tips
    bowl: Vector
    plate: Vector
    bowl_start: Vector  # where the bowl stood before it was touched
    grasp: Vector  # from the bowl's axis to the point of its rim to hold

    @property
    def release(self) -> Vector:
        """Where the hand has to be for the bowl it holds to be over the plate; at the plate's height."""
        offset = self.hand - self.bowl
        return np.array([*(self.plate + offset)[:2], self.plate[2]])


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One line of the script."""

    name: str
    gripper: float
    steps: int  # at most, for a phase with a target; exactly, for one without
    target: Callable[[Scene], Vector] | None = None


def _up(metres: float) -> Vector:
    return np.array([0.0, 0.0, metres])


PHASES = (
    Phase(name="approach", gripper=OPEN, steps=61, target=lambda s: s.bowl_start + s.grasp + _up(0.12)),
    Phase(name="descend", gripper=OPEN, steps=61, target=lambda s: s.bowl_start + s.grasp + _up(0.025)),
    Phase(name="grasp", gripper=CLOSE, steps=15),
    Phase(name="lift", gripper=CLOSE, steps=61, target=lambda s: s.bowl_start + s.grasp + _up(0.25)),
    Phase(name="carry", gripper=CLOSE, steps=61, target=lambda s: s.release + _up(0.25)),
    Phase(name="lower", gripper=CLOSE, steps=61, target=lambda s: s.release + _up(0.10)),
    Phase(name="release", gripper=OPEN, steps=8),
    Phase(
        name="retreat",
        gripper=OPEN,
        steps=61,
        target=lambda s: np.array([*s.hand[:2], s.plate[2] + 0.3]),
    ),
)


class PickAndPlace:
    """Carries one object onto another, phase by phase."""

    def __init__(
        self,
        obs: Mapping[str, Vector],
        *,
        side: float = 1.0,
        speed: float = 1.0,
        bowl: str = "akita_black_bowl_1",
        plate: str = "plate_1",
    ) -> None:
        """Plan from the first observation.

        Args:
            obs: robosuite's, after the scene has settled.
            side: +1 or -1, which side of the rim to hold, along the world's y axis.
            speed: the most of a step's motion, up to 1, that it asks for along an axis; people who
                demonstrate are slower than the robot can be.
            bowl: name of the object to carry; in LIBERO-Spatial the one that the instruction means.
            plate: name of the object to put it on.
        """
        self.names, self.speed = (bowl, plate), speed
        self.bowl_start = obs[f"{bowl}_pos"].copy()
        self.grasp = np.array([0.0, side * RIM, 0.0])
        self._index = self._steps = 0

    @property
    def phase(self) -> Phase:
        """The phase that the last action belonged to."""
        return PHASES[self._index]

    def act(self, obs: Mapping[str, Vector]) -> NDArray[np.float32]:
        """The next action, [7] in [-1, 1]: translation, rotation, gripper."""
        scene = self._scene(obs)
        if is_over(self.phase, scene, self._steps):
            self._index, self._steps = min(self._index + 1, len(PHASES) - 1), 0
        self._steps += 1
        return action_towards(self.phase, scene, self.speed)

    def _scene(self, obs: Mapping[str, Vector]) -> Scene:
        bowl, plate = (obs[f"{name}_pos"] for name in self.names)
        return Scene(
            hand=obs["robot0_eef_pos"], bowl=bowl, plate=plate, bowl_start=self.bowl_start, grasp=self.grasp
        )


def is_over(phase: Phase, scene: Scene, steps: int) -> bool:
    """Whether `phase`, after `steps` actions, has reached its target or used its steps up."""
    if steps >= phase.steps:
        return True
    return phase.target is not None and steps > 0 and distance(phase.target(scene), scene.hand) < REACHED


def action_towards(phase: Phase, scene: Scene, speed: float = 1.0) -> NDArray[np.float32]:
    """The action [7] that asks for the whole way to the phase's target, clipped to a share of one step."""
    way = np.zeros(3) if phase.target is None else phase.target(scene) - scene.hand
    move = np.clip(way / METRES_PER_UNIT, -speed, speed)
    return np.array([*move, 0.0, 0.0, 0.0, phase.gripper], dtype=np.float32)


def distance(a: Vector, b: Vector) -> float:
    """Euclidean distance in metres."""
    return float(np.linalg.norm(a - b))
