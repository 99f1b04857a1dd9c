"""A world for tests of environment processes: no simulator, and every fault that one can have.

The action's first number is added to a total; its second is what happens. The state is [init_state, seed,
total, steps since the reset].
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from somaspeed_patch.rl.env_process import EnvSpec, Observation

NOTHING, SOLVED, HANG, RAISE, NAN, KILLED, EXIT = range(7)
FACTORY = f"{__name__}:FaultyWorld"


class FaultyWorld:
    """Built from a spec whose suite is "", "broken", or "broken until FILE exists" with a file's path."""

    def __init__(self, spec: EnvSpec) -> None:
        """Raises: OSError: the suite says broken."""
        self._state: NDArray[np.float32] = np.zeros(4, np.float32)
        if spec.suite.startswith("broken") and not is_mended(spec.suite):
            raise OSError(f"no renderer for task {spec.task}")
        if spec.suite == "slow":
            time.sleep(60)

    def reset(self, init_state: int, seed: int) -> None:
        """Begin with a total of 0."""
        self._state = np.array([init_state, seed, 0, 0], np.float32)

    def step(self, action: NDArray[np.float32]) -> bool:
        """Do what the action's second number says."""
        self._state += np.array([0, 0, action[0], 1], np.float32)
        what = round(float(action[1]))
        if what == HANG:
            time.sleep(60)
        elif what == RAISE:
            raise ZeroDivisionError("the stand-in was told to raise")
        elif what == NAN:
            self._state[2] = np.nan
        elif what == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == EXIT:
            os._exit(7)
        return what == SOLVED

    def observe(self) -> Observation:
        """The state, and this process's id."""
        return {"state": self._state.copy(), "process": np.array([os.getpid()])}


def is_mended(suite: str) -> bool:
    """Whether the file that "broken until FILE exists" names was there; it is from now on."""
    name = suite.removeprefix("broken until ").removesuffix(" exists")
    if name == suite:
        return False
    was_there = Path(name).exists()
    Path(name).touch()
    return was_there
