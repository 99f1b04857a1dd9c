"""What a simulator's cameras saw, kept without rendering it, to be rendered later or never.

MuJoCo renders in two halves: `mjv_updateScene` lists what is visible and where (0.1 ms), `mjr_render` draws
the list (100 ms on a CPU at 128 x 128). Robosuite samples its cameras inside a step, before anybody can know
that this step solves the task, so the first half is done then, and the second only once somebody wants the
image: the bytes are those of rendering at once, however far the physics has gone on since.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]

_MAX_GEOMS = 1000  # of robosuite's own scene; LIBERO's have about 250


class Film:
    """The last scene before each camera of one robosuite MjSim."""

    def __init__(self, sim: Any) -> None:
        """Args: sim: robosuite's MjSim, with a renderer."""
        self._sim = weakref.proxy(sim)
        self._scenes: dict[str, Any] = {}
        self._waiting: set[str] = set()
        self._last: dict[str, Image] = {}

    def waits(self, camera: str) -> bool:
        """Whether `camera` saw something that was not rendered since."""
        return camera in self._waiting

    def last(self, camera: str, width: int, height: int) -> Image:
        """What `develop` returned last, black before the first time."""
        black = np.zeros((height, width, 3), np.uint8)
        return self._last.get(camera, black)

    def expose(self, camera: str) -> None:
        """Keep what `camera` sees now, in place of what it saw before."""
        import mujoco

        context, view = self._sim._render_context_offscreen, mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = self._sim.model.camera_name2id(camera)
        model, data, everything = self._sim.model._model, self._sim.data._data, mujoco.mjtCatBit.mjCAT_ALL
        if camera not in self._scenes:
            self._scenes[camera] = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        scene = self._scenes[camera]
        mujoco.mjv_updateScene(model, data, context.vopt, context.pert, view, everything, scene)
        self._waiting.add(camera)

    def develop(self, camera: str, width: int, height: int) -> Image:
        """Render what `expose` kept.

        Args:
            camera: its name in the model.
            width, height: pixels.
        Returns: [height, width, 3] as MjSim.render does, the first row at the bottom.
        Raises: KeyError: nothing was exposed.
        """
        import mujoco

        context = self.make_current()
        if width > context.con.offWidth or height > context.con.offHeight:  # as robosuite's render does
            context.update_offscreen_size(
                max(width, context.con.offWidth), max(height, context.con.offHeight)
            )
        mujoco.mjr_render(mujoco.MjrRect(0, 0, width, height), self._scenes[camera], context.con)
        self._last[camera] = context.read_pixels(width, height)
        self._waiting.discard(camera)
        return self._last[camera]

    def make_current(self) -> Any:
        """The simulation's render context, current in this thread: another simulator's may have been."""
        context = self._sim._render_context_offscreen
        context.gl_ctx.make_current()
        return context


def plain(arguments: Mapping[str, Any]) -> bool:
    """Whether these arguments of MjSim.render ask for the colours seen by a named camera, and no more."""
    known = {"width", "height", "camera_name", "depth", "segmentation", "mode", "device_id"}
    return (
        bool(arguments.get("camera_name"))
        and not arguments.get("depth")
        and not arguments.get("segmentation")
        and set(arguments) <= known
    )


def use_software_profile(sim: Any) -> None:
    """Draw without multisampling and without mirrors: a third of the time where a CPU renders.

    Only edges and the steel stove's mirror change, but every image does a little: for tests, not for scores.

    Args: sim: robosuite's MjSim with a renderer, whose buffers are made anew.
    """
    model, context = sim.model._model, sim._render_context_offscreen
    model.vis.quality.offsamples = 0
    model.mat_reflectance[:] = 0
    context.gl_ctx.make_current()
    context.con.free()
    context._set_mujoco_context_and_buffers()
