"""A soft reset of a LIBERO scene that leaves the bytes of a hard one, without building the scene anew.

Robosuite's hard reset reads the scene's files, compiles the model and uploads its textures (2.6 s), all of
which is the same each time; its soft reset only clears the simulation. What the soft one lacks, found by
comparing every array of MuJoCo's model and data over four episodes of six tasks, is

    the model's arrays that an episode changes: where fixtures stand, which marks show
    two `forward`s on the model's own pose, from which the solver starts; at the reset's end that rarely shows
    the gripper's last command, which a new gripper does not have
    LIBERO's growing list of joints to open at the start: each hard reset adds its task's again, and each
        entry draws a random number, so without it later random numbers are others (tasks with an open drawer)

Zeroing the solver's warm start instead is right to 1e-14 only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

_CHANGED = ("body_pos", "body_quat", "site_rgba")
_FORWARDS = 2  # robosuite's, when it has made the simulation and when it has made the renderer


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """The scene as it was when its model had just been compiled."""

    arrays: dict[str, NDArray[Any]]
    thread: int  # OpenGL contexts belong to the thread that made them


_openings: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()  # by environment
_compiled: WeakKeyDictionary[Any, _Compiled] = WeakKeyDictionary()  # by MjSim


def loaded(env: Any, known: int) -> None:
    """Remember what loading the scene has added to the joints to open; `known` were there before."""
    _openings[env] = tuple(env.object_property_initializers[known:])


def compiled(env: Any) -> None:
    """Remember the model of a simulation that was just made."""
    arrays = {name: getattr(env.sim.model._model, name).copy() for name in _CHANGED}
    _compiled[env.sim] = _Compiled(arrays=arrays, thread=threading.get_ident())


def why_not(env: Any) -> str | None:
    """Why this robosuite environment has to be reset as robosuite does, None where a soft reset is exact."""
    if not env.hard_reset or env.deterministic_reset:
        return "robosuite was told not to reset hard"
    if env.sim is None or env.sim not in _compiled or env not in _openings:
        return "the scene was built before patch(); its next resets are soft"
    if _compiled[env.sim].thread != threading.get_ident():
        return "another thread than the one that made the renderer"
    return None


@contextmanager
def soft(env: Any) -> Iterator[None]:
    """While this is open, `env.reset()` is soft and leaves what a hard one leaves."""
    env.object_property_initializers.extend(_openings[env])
    env.hard_reset, env.sim.reset = False, lambda: _restart(env.sim, env.robots)
    try:
        yield
    finally:
        env.hard_reset = True
        del env.sim.reset  # the instance's; the class has robosuite's


def release() -> None:
    """Forget every scene."""
    _openings.clear()
    _compiled.clear()


def _restart(sim: Any, robots: Sequence[Any]) -> None:
    """In place of MjSim.reset."""
    type(sim).reset(sim)
    for name, values in _compiled[sim].arrays.items():
        getattr(sim.model._model, name)[:] = values
    for _ in range(_FORWARDS):
        sim.forward()
    for robot in robots:
        robot.gripper.current_action = np.zeros(robot.gripper.dof)
