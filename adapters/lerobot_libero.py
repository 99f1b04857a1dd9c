"""LIBERO as LeRobot runs it: `lerobot-eval --env.type=libero`, and the evaluations within `lerobot-train`.

LeRobot's LiberoEnv builds its scene three times before the first episode and once more before each other,
renders 28 images in a reset to show two, and renders at every step while a policy that executes N actions at
a time looks at every Nth. On a CPU that is nine tenths of an evaluation's time.

All patches are on classes, and LeRobot's worker processes (forkserver) patch themselves at their start, so
`patch()` has to come before the first of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from somaspeed_patch.features import Feature
from somaspeed_patch.libero.options import steps_between_images
from somaspeed_patch.registry import Patch, handed

REQUIRES = ["lerobot>=0.6.1,<0.7", "hf-libero==0.1.4", "robosuite==1.4.0", "mujoco>=3.2,<4"]

FEATURES = [
    Feature(
        name="soft_reset",
        changes="LIBERO: reset the scene without building it anew; states, images, random numbers stay",
        exact=True,
        default=True,
    ),
    Feature(
        name="lazy_images",
        changes="LIBERO: a reset renders the images it returns, not those of its settling steps",
        exact=True,
        default=True,
    ),
    Feature(
        name="reuse_stages",
        changes="LIBERO: positions and velocities once a substep of the simulator, not three times",
        exact=True,
        default=True,
    ),
    Feature(
        name="render_every",
        changes="LIBERO: render every Nth step and the last, repeat images between; N divides n_action_steps",
        exact=True,
        default=None,
        check=steps_between_images,
    ),
]

_HOOKS = "somaspeed_patch.libero.hooks"


def _patch(module: str, name: str, hook: str, site: str, expected: list[str]) -> Patch:
    make: Callable[[Any], Any] = handed(_HOOKS, hook, expected)
    return Patch(module=module, name=name, make=make, site=site)


_SCENE, _SIM = "robosuite.environments.base", "robosuite.utils.binding_utils"
_LIBERO, _HOST = "libero.libero.envs.bddl_base_domain", "lerobot.envs.libero"
_RENDER = ["self", "width", "height", "camera_name", "depth", "mode", "device_id", "segmentation"]

PATCHES = [
    _patch(_SIM, "MjSim.render", "render", "lazy_images", _RENDER),
    _patch(_SIM, "MjSim.forward", "forward", "reuse_stages", ["self"]),
    _patch(_SIM, "MjSim.step", "substep", "reuse_stages", ["self", "with_udd"]),
    _patch(_SCENE, "MujocoEnv.step", "step_scene", "reuse_stages", ["self", "action"]),
    _patch(_SCENE, "MujocoEnv._initialize_sim", "initialize_sim", "soft_reset", ["self", "xml_string"]),
    _patch(_SCENE, "MujocoEnv.reset", "reset_scene", "soft_reset", ["self"]),
    _patch(_LIBERO, "BDDLBaseDomain._load_model", "load_model", "soft_reset", ["self"]),
    _patch(_HOST, "LiberoEnv._ensure_env", "ensure_env", "lazy_images", ["self"]),
    _patch(_HOST, "LiberoEnv.reset", "reset", "lazy_images", ["self", "seed", "kwargs"]),
    _patch(_HOST, "LiberoEnv.step", "step", "render_every", ["self", "action"]),
]


def refresh() -> None:
    """Bring the simulator's release into the report, where it changes LIBERO."""
    hooks = sys.modules.get(_HOOKS)  # None before a host is imported
    if hooks is not None:
        hooks.refresh()


def release() -> None:
    """Drop what the hooks keep for environments that are still there."""
    hooks = sys.modules.get(_HOOKS)
    if hooks is not None:
        hooks.release()
