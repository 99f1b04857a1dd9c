"""What `somaspeed doctor` asks of LIBERO's simulator: the right mujoco, and a picture from every GPU.

    python -m somaspeed_patch.libero.check        # renders one frame with MUJOCO_GL's renderer

A frame is rendered in a process of its own: a renderer that is not there aborts, or hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from somaspeed_patch.libero import bootstrap

TIMEOUT = 60.0
_BALL = '<mujoco><worldbody><light pos="0 0 3"/><geom size=".5" rgba="1 1 1 1"/></worldbody></mujoco>'


def installed() -> bool:
    """Whether LIBERO is here."""
    return find_spec("libero") is not None and find_spec("mujoco") is not None


def mujoco_complaints() -> Iterator[str]:
    """What is wrong with the installed mujoco, if anything."""
    try:
        release = version("mujoco")
    except PackageNotFoundError:
        yield "mujoco is there, but its version is not known; install mujoco==3.3.2"
        return
    for change in bootstrap.mujoco_changes(release):
        yield f"mujoco {release} {change}; install mujoco==3.3.2"


def renderers(gpus: int) -> list[tuple[str, int | None]]:
    """Those to try: EGL on each GPU, or what there is without one."""
    chosen = os.environ.get("MUJOCO_GL") or bootstrap.default_renderer()
    if chosen != "egl" or gpus == 0:
        return [(chosen, None)]
    return [(chosen, device) for device in range(gpus)]


def complaint(gl: str, device: int | None) -> str | None:
    """Why a renderer gives no picture, in words; None: it does."""
    environment = {**os.environ, "MUJOCO_GL": gl, "PYOPENGL_PLATFORM": gl}
    if device is not None:
        environment["MUJOCO_EGL_DEVICE_ID"] = str(device)
    command = [sys.executable, "-m", __name__]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no frame within {TIMEOUT:g} s"
    if ended.returncode == 0:
        return None
    said = ended.stderr.strip().splitlines()
    return said[-1] if said else f"ended with code {ended.returncode}"


def main() -> None:
    """Render a white ball. Raises: RuntimeError: the picture is black."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(_BALL)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 64, 64) as renderer:
        renderer.update_scene(data)
        picture = renderer.render()
    if picture.max() < 32:
        raise RuntimeError(f"the frame is black: its brightest value is {picture.max()}")


if __name__ == "__main__":
    main()
