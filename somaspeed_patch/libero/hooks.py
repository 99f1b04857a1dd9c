"""What LeRobot's LiberoEnv does under the patch: resets that build nothing anew, images that somebody sees.

A reset and, with `render_every`, a step run with robosuite's cameras exposed but not rendered (`film`), so
that robosuite's sampling, which decides the substep that an observation shows, stays as it is. At their end
the images that are to be seen are rendered from what was exposed, and put where robosuite and LeRobot have
theirs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from somaspeed_patch import features, sites
from somaspeed_patch.libero import bootstrap, film, soft_reset, substeps
from somaspeed_patch.libero.options import steps_between_images

log = logging.getLogger(__name__)

_RENDER, _EXPOSE, _DEVELOP = "render", "expose", "develop"

_mode: ContextVar[str] = ContextVar("libero_mode", default=_RENDER)
_host: ContextVar[Any] = ContextVar("libero_host", default=None)  # the LiberoEnv that is being reset

_films: WeakKeyDictionary[Any, film.Film] = WeakKeyDictionary()  # by MjSim
_unfit: WeakSet[Any] = WeakSet()  # MjSims that failed once
_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by LiberoEnv, since its reset


def load_model(wrapped: Any, env: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """BDDLBaseDomain._load_model(): what it adds at each call is remembered."""
    known = len(env.object_property_initializers)
    result = wrapped(*args, **kwargs)
    soft_reset.loaded(env, known)
    return result


def initialize_sim(wrapped: Any, env: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """MujocoEnv._initialize_sim(xml_string): the compiled model's changing arrays are remembered."""
    result = wrapped(*args, **kwargs)
    soft_reset.compiled(env)
    return result


def reset_scene(wrapped: Any, env: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """MujocoEnv.reset(): soft where LiberoEnv resets a scene that a hard reset would make the same."""
    host = _host.get()
    if host is None or not features.value("soft_reset"):
        return wrapped(*args, **kwargs)
    site = sites.site("lerobot_libero/soft_reset")
    why = "hard_reset=False: robosuite's own soft reset" if not host.hard_reset else soft_reset.why_not(env)
    if why is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    site.ran()
    with soft_reset.soft(env):
        return wrapped(*args, **kwargs)


def step_scene(wrapped: Any, env: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """MujocoEnv.step(action): its substeps reuse what has not changed."""
    if not features.value("reuse_stages"):
        return wrapped(*args, **kwargs)
    site = sites.site("lerobot_libero/reuse_stages")
    if (why := substeps.why_not(env.sim)) is not None:
        site.declined(why)
        return wrapped(*args, **kwargs)
    site.ran()
    with substeps.reused(env.sim):
        return wrapped(*args, **kwargs)


def forward(wrapped: Any, sim: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """MjSim.forward()."""
    substeps.forward(functools.partial(wrapped, *args, **kwargs), sim)


def substep(wrapped: Any, sim: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """MjSim.step()."""
    substeps.step(functools.partial(wrapped, *args, **kwargs), sim)


def render(wrapped: Any, sim: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """MjSim.render(width, height, camera_name=): now, later, or from what was kept."""
    mode = _mode.get()
    if mode == _DEVELOP:
        return _films[sim].develop(kwargs["camera_name"], kwargs["width"], kwargs["height"])
    if mode == _EXPOSE and not args and film.plain(kwargs) and sim not in _unfit:
        try:
            return _expose(sim, kwargs["camera_name"], kwargs["width"], kwargs["height"])
        except Exception as error:  # never break the host: it can still render
            _unfit.add(sim)
            sites.site("lerobot_libero/lazy_images").failed(error)
            log.warning("libero: deferred images failed, this simulator renders all of them", exc_info=error)
    if sim in _films:
        _films[sim].make_current()
    return wrapped(*args, **kwargs)


def ensure_env(wrapped: Any, host: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """LiberoEnv._ensure_env(): the scene's first images are rendered where nobody resets it right away."""
    if host._env is not None:
        return
    _warn_about_mujoco()
    outermost = _mode.get() == _RENDER
    with _resetting(host):
        wrapped(*args, **kwargs)
    if outermost:
        _develop(host)


def reset(wrapped: Any, host: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """LiberoEnv.reset(seed): one image a camera, that of the last settling step."""
    steps_between_images(features.value("render_every"))  # a bad value is an error at once
    with _resetting(host):
        observation, info = wrapped(*args, **kwargs)
    _steps[host] = 0
    if features.value("lazy_images"):
        sites.site("lerobot_libero/lazy_images").ran()
        _show(host, observation)
    return observation, info


def step(wrapped: Any, host: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """LiberoEnv.step(action): with `render_every`, the image before again where nobody looks at this one."""
    every = steps_between_images(features.value("render_every"))
    if every is None:
        return wrapped(*args, **kwargs)
    with _in_mode(_EXPOSE):
        observation, reward, terminated, truncated, info = wrapped(*args, **kwargs)
    taken = _steps[host] = _steps.get(host, 0) + 1
    if terminated or truncated or taken % every == 0 or taken >= host._max_episode_steps:
        _show(host, observation)
    sites.site("lerobot_libero/render_every").ran()
    return observation, reward, terminated, truncated, info


def refresh() -> None:
    """Say in the report what the installed mujoco changes."""
    changes = bootstrap.mujoco_changes(version("mujoco"))
    if changes:
        site = sites.site("lerobot_libero/mujoco", "the simulator's release")
        site.status, site.reason = sites.NATIVE, f"mujoco {version('mujoco')} " + ", and ".join(changes)


def release() -> None:
    """Forget scenes and images; environments that live on are robosuite's again."""
    soft_reset.release()
    for kept in (_films, _unfit, _steps):
        kept.clear()


@contextmanager
def _in_mode(mode: str) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


@contextmanager
def _resetting(host: Any) -> Iterator[None]:
    """Let the scene's reset know that LiberoEnv asks for it, and leave its images for later."""
    token = _host.set(host)
    try:
        with _in_mode(_EXPOSE if features.value("lazy_images") else _mode.get()):
            yield
    finally:
        _host.reset(token)


def _expose(sim: Any, camera: str, width: int, height: int) -> film.Image:
    """Keep what the camera sees, and show what it showed last."""
    if sim not in _films:
        _films[sim] = film.Film(sim)
    _films[sim].expose(camera)
    return _films[sim].last(camera, width, height)


def _develop(host: Any) -> None:
    """Render what was exposed last, into robosuite's observables."""
    scene = host._env.env
    kept = _films.get(scene.sim)
    if kept is None:
        return
    with _in_mode(_DEVELOP):
        for name, observable in scene._observables.items():
            if kept.waits(name.removesuffix("_image")):
                observable._current_observed_value = np.array(observable._sensor({}))


def _show(host: Any, observation: Mapping[str, Any]) -> None:
    """Render what was exposed last, and put it into LiberoEnv's observation."""
    _develop(host)
    for camera in host.camera_name:
        observation["pixels"][host.camera_name_mapping[camera]] = host._env.env._observables[camera].obs


@functools.cache
def _warn_about_mujoco() -> None:
    bootstrap.warn_about_mujoco()
