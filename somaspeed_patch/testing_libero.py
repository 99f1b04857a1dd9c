"""What tests and the bench of the LIBERO adapter share: episodes of LeRobot's LiberoEnv, to be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(kw_only=True)
class Episode:
    """What somebody outside sees of one episode; every list has an entry for the reset and for each step."""

    observations: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    """Flat, by path: `pixels/image`, `robot_state/eef/pos` and so on."""
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    """Of `render()`."""
    randoms: list[str] = field(default_factory=list)
    """Digest of numpy's global generator."""
    renders: list[int] = field(default_factory=list)
    """Images rendered."""
    terminated: list[bool] = field(default_factory=list)


def make_env(suite: str, task: int, *, image_size: int, **kwargs: Any) -> Any:
    """LeRobot's environment of one task. LIBERO must have been set up by `bootstrap.setup`."""
    from lerobot.envs.libero import LiberoEnv, _get_suite

    sizes = {"observation_width": image_size, "observation_height": image_size}
    return LiberoEnv(_get_suite(suite), task, suite, obs_type="pixels_agent_pos", **sizes, **kwargs)


def play(env: Any, count: Callable[[], int], *, seed: int | None, number: int, steps: int) -> Episode:
    """Reset, then take `steps` random actions.

    Args:
        count: how many images were rendered since it was called last.
        seed: of the reset; None leaves numpy's generator as it is, where LiberoEnv would seed it by chance.
        number: seeds the actions, and numpy's generator where `seed` is None.
    """
    if seed is None:
        env._ensure_env()
        env._env.seed = lambda _: None
        np.random.seed(number)
    episode = Episode()
    count()
    _note(episode, env, env.reset(seed=seed)[0], False, count)
    for action in np.random.default_rng(number).uniform(-1, 1, (steps, 7)):
        observation, _, terminated, _, _ = env.step(action)
        _note(episode, env, observation, terminated, count)
    return episode


@contextmanager
def counted_renders() -> Iterator[Callable[[], int]]:
    """Yields a function that says how many images robosuite has read back since it was called last."""
    from robosuite.utils.binding_utils import MjRenderContext

    whole, calls = MjRenderContext.read_pixels, [0]

    def read_pixels(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return whole(self, *args, **kwargs)

    def count() -> int:
        made, calls[0] = calls[0], 0
        return made

    MjRenderContext.read_pixels = read_pixels
    try:
        yield count
    finally:
        MjRenderContext.read_pixels = whole


def differences(one: Episode, other: Episode, *, every: int = 1) -> list[str]:
    """Where two episodes differ in a bit: "step 3: pixels/image". Step 0 is the reset.

    Args: every: compare the images of every Nth step and of the last only; everything else at each step.
    """
    found, last = [], len(one.observations) - 1
    for step, (a, b) in enumerate(zip(one.observations, other.observations, strict=True)):
        looked = step % every == 0 or step == last
        keys = [key for key in a if looked or not key.startswith("pixels/")]
        found += [f"step {step}: {key}" for key in keys if not np.array_equal(a[key], b[key])]
        if looked and not np.array_equal(one.frames[step], other.frames[step]):
            found.append(f"step {step}: frame")
        if one.randoms[step] != other.randoms[step]:
            found.append(f"step {step}: random numbers")
    return found


def _note(
    episode: Episode, env: Any, observation: Mapping[str, Any], terminated: bool, count: Callable[[], int]
) -> None:
    episode.observations.append(dict(_flat(observation)))
    episode.frames.append(env.render().copy())
    episode.randoms.append(_digest())
    episode.renders.append(count())
    episode.terminated.append(bool(terminated))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", np.array(value)


def _digest() -> str:
    kind, keys, position, *rest = np.random.get_state(legacy=True)
    return hashlib.sha256(repr((kind, position, rest)).encode() + np.asarray(keys).tobytes()).hexdigest()[:16]
