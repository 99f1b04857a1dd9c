"""Positions and velocities once a substep, where robosuite has MuJoCo compute them three times.

In each of an environment step's 25 substeps robosuite 1.4 calls mj_forward, its controller calls it again,
then controls are set, and mj_step begins with a third. Nothing has moved in between, so the later two need to
redo only what depends on the controls and on the solver's warm start: mj_forwardSkip. Every array of the
simulation stays what it is, bit for bit; a step of LIBERO-Spatial takes 17 ms of CPU, not 21. Leaving the
second call out would not do: it moves the warm start, and with it the last bits of all that follows.

Only within an environment's own step, where nobody changes the model; and only while the state is the one
that the last whole call was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

_running: WeakKeyDictionary[Any, _Substeps] = WeakKeyDictionary()  # by MjSim


class _Substeps:
    """Of one simulator, within one environment step."""

    def __init__(self, sim: Any) -> None:
        import mujoco  # after the renderer has been chosen

        self._mujoco: Any = mujoco
        self._model, data = sim.model._model, sim.data._data
        self._data = data
        self._watched = (data.qpos, data.qvel, data.act, data.mocap_pos, data.mocap_quat)
        self._computed: tuple[Any, ...] | None = None

    def forward(self, whole: Callable[[], None]) -> None:
        """mj_forward."""
        now = self._state()
        if now == self._computed:
            self._rest()
            return
        whole()
        self._computed = now

    def step(self, whole: Callable[[], None]) -> None:
        """mj_step, and its parts in their order."""
        if self._state() != self._computed:
            whole()
        else:
            self._checked()
            self._mujoco.mj_checkAcc(self._model, self._data)
            self._mujoco.mj_Euler(self._model, self._data)
        self._computed = None

    def _checked(self) -> None:
        """mj_forward behind mj_step's checks, which begin a diverged simulation anew."""
        self._mujoco.mj_checkPos(self._model, self._data)
        self._mujoco.mj_checkVel(self._model, self._data)
        if self._state() == self._computed:
            self._rest()
        else:
            self._mujoco.mj_forward(self._model, self._data)

    def _rest(self) -> None:
        """What of mj_forward comes after positions and velocities."""
        self._mujoco.mj_forwardSkip(self._model, self._data, self._mujoco.mjtStage.mjSTAGE_VEL, 0)

    def _state(self) -> tuple[Any, ...]:
        return (*(each.tobytes() for each in self._watched), self._data.time)


def why_not(sim: Any) -> str | None:
    """Why a simulator's substeps have to be whole, or None."""
    import mujoco

    options = sim.model._model.opt
    if options.integrator != mujoco.mjtIntegrator.mjINT_EULER:
        return "its integrator is not Euler's"
    if options.enableflags & mujoco.mjtEnableBit.mjENBL_FWDINV:
        return "forward and inverse dynamics are compared"
    if sim.model._model.nplugin:
        return "the model has plugins"
    if any(get() is not None for get in (mujoco.get_mjcb_control, mujoco.get_mjcb_passive)):
        return "somebody's callback computes forces"
    return None


@contextmanager
def reused(sim: Any) -> Iterator[None]:
    """Inside, `forward` and `step` of this simulator reuse what they can."""
    _running[sim] = _Substeps(sim)
    try:
        yield
    finally:
        _running.pop(sim, None)


def forward(whole: Callable[[], None], sim: Any) -> None:
    """MjSim.forward; `whole` is robosuite's."""
    substeps = _running.get(sim)
    whole() if substeps is None else substeps.forward(whole)


def step(whole: Callable[[], None], sim: Any) -> None:
    """MjSim.step; `whole` is robosuite's."""
    substeps = _running.get(sim)
    whole() if substeps is None else substeps.step(whole)
