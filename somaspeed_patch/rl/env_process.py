"""One environment in a process of its own: what it is asked, what it answers, how it ends with its parent.

The process is spawned, never forked: MuJoCo's renderers do not survive a fork. It builds its world, says what
the world's objects are, then answers one request after the other through a pipe:

    ("reset", init_state, seed, filmed)  ->  ("done", Observation)
    ("step", actions)                    ->  ("done", Chunk)
    anything that raises                 ->  ("failed", traceback's text), and the process ends: what a
                                             simulator that raised would do next nobody knows

An observation is rendered once a request, after the last step executed; of a filmed episode every step is.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Observation = dict[str, NDArray[Any]]

ACTION = 7
INSTRUCTION = "instruction"
"""The name of an observation's text, an array without dimensions: what the policy is asked to do."""
LIBERO = "somaspeed_patch.rl.env_libero:LiberoWorld"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NICE = 5  # with more environments than cores, the policy that they all wait for goes first


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """One environment slot."""

    suite: str = "libero_spatial"
    """A LIBERO suite by its name."""
    task: int = 0
    """Index of the task in its suite."""
    image_size: int | None = None
    """Height and width of both cameras' images in pixels; None: state only, no renderer."""
    horizon: int = 240
    """Steps of 1/20 s after which an episode that has not ended is truncated."""
    gl: str | None = None
    """The off-screen renderer, "egl" or "osmesa"; None: MUJOCO_GL, else what the machine has."""
    egl_device: int | None = None
    """EGL's number of the GPU to render on, which is not CUDA's where CUDA_VISIBLE_DEVICES hides some."""
    software_gl_profile: bool = False
    """Other, cheaper images for tests on a CPU, see `libero.film.use_software_profile`."""
    cores: int | None = None
    """CPU cores that all environments share, the first ones of this process's; None: all. Linux only."""
    factory: str = LIBERO
    """`module:name` of what makes the world from this spec, imported in the child."""

    def __post_init__(self) -> None:
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"env.cores: expected 1 or more, or none, but is {self.cores}")


class World(Protocol):
    """What an environment process needs of its environment."""

    def reset(self, init_state: int, seed: int) -> None:
        """Begin an episode."""

    def step(self, action: NDArray[np.float32]) -> bool:
        """Apply one action [7]; whether the task is solved."""

    def observe(self) -> Observation:
        """What a policy sees now: finite arrays by name, and perhaps its instruction."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What became of one action chunk of C steps."""

    rewards: NDArray[np.float32]
    """[C], 1 at the step that solved the task, else 0."""
    terminated: NDArray[np.bool_]
    """[C], True at the step that solved the task."""
    truncated: NDArray[np.bool_]
    """[C], True at the step that reached the horizon without solving the task."""
    executed: int
    """Steps executed, 1 to C: those behind the first done are not."""
    observation: Observation
    """After the last executed step, the episode's last one included."""
    pictures: tuple[NDArray[np.uint8], ...] = ()
    """Of a filmed episode, after every executed step, see `picture`."""

    @property
    def done(self) -> bool:
        """Whether the episode has ended, so that the slot waits for a reset."""
        return bool(self.terminated.any() or self.truncated.any())


class Episodes:
    """Runs a world in chunks, and keeps what a chunk may and may not contain."""

    def __init__(self, world: World, horizon: int) -> None:
        """Args: horizon: of `EnvSpec`."""
        self._world, self._horizon = world, horizon
        self._left: int | None = None  # steps to the horizon, None before a reset
        self._filmed = False

    def reset(self, init_state: int, seed: int, filmed: bool = False) -> Observation:
        """Begin an episode; the observation that the first chunk is chosen from."""
        self._world.reset(init_state, seed)
        self._left, self._filmed = self._horizon, filmed
        return self._observe("after the reset")

    def step(self, actions: NDArray[np.float32]) -> Chunk:
        """Execute actions [C, 7] until the last one, the task's solution or the horizon.

        Raises: ValueError: not [C, 7], not finite, no episode is on, or the observation is not finite.
        """
        check_actions(actions)
        left = self._left
        if left is None:
            raise ValueError("env: no episode is on; reset before the first step and after the last")
        solved, seen = False, list[Observation]()
        executed = 0
        while not solved and executed < min(len(actions), left):
            solved = self._world.step(actions[executed])
            executed += 1
            if self._filmed:
                seen.append(self._observe(f"after step {executed} of the chunk"))
        cut = not solved and executed == left
        self._left = None if solved or cut else left - executed
        return self._chunk(len(actions), executed, seen, solved=solved, cut=cut)

    def _chunk(
        self, length: int, executed: int, seen: list[Observation], *, solved: bool, cut: bool
    ) -> Chunk:
        last = np.arange(length) == executed - 1
        terminated, truncated = last & solved, last & cut
        shown = [picture(each) for each in seen]
        return Chunk(
            rewards=terminated.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            executed=executed,
            observation=seen[-1] if seen else self._observe(f"after step {executed} of the chunk"),
            pictures=tuple(each for each in shown if each is not None),
        )

    def _observe(self, when: str) -> Observation:
        seen = self._world.observe()
        for name, value in seen.items():
            if name != INSTRUCTION and not np.isfinite(value).all():
                raise ValueError(f"env: {name} is not finite {when}; the simulation has diverged")
        return seen


def picture(observation: Observation) -> NDArray[np.uint8] | None:
    """[H, W of all, 3] uint8, an observation's images side by side in its order; None: it has none."""
    images = [each for each in observation.values() if each.dtype == np.uint8 and each.shape[2:] == (3,)]
    return np.concatenate(images, axis=1) if images else None


def check_actions(actions: NDArray[np.float32]) -> None:
    """Refuse what is no chunk.

    Raises: ValueError: not [C, 7] with C of at least 1, or not finite.
    """
    if actions.ndim != 2 or len(actions) == 0 or actions.shape[1] != ACTION:
        raise ValueError(f"env: actions must be [C, {ACTION}], but are {list(actions.shape)}")
    if not np.isfinite(actions).all():
        step, part = np.argwhere(~np.isfinite(actions))[0]
        raise ValueError(f"env: actions must be finite, but [{step}, {part}] is {actions[step, part]}")


def main(pipe: Connection, spec: EnvSpec, parent: int, *, die_with_parent: bool) -> None:
    """The child: build the world of `spec`, then serve requests until the pipe ends.

    Args:
        parent: its process id.
        die_with_parent: let the kernel kill this process when the parent's thread that started it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    end_with_parent(parent, by_kernel=die_with_parent)
    set_renderer(spec)
    os.nice(_NICE)
    stay_on(spec.cores)
    try:
        episodes = Episodes(make_world(spec), spec.horizon)
        pipe.send(("ready", None))
        serve(pipe, {"reset": episodes.reset, "step": episodes.step})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent closed the pool
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
        sys.exit(1)


def stay_on(cores: int | None) -> None:
    """Let this process run on the first `cores` of those it may run on, where the system can do that."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def serve(pipe: Connection, answers: dict[str, Callable[..., Observation | Chunk]]) -> None:
    """Answer requests one by one. Raises: EOFError: the other end was closed."""
    while True:
        name, *arguments = pipe.recv()
        pipe.send(("done", answers[name](*arguments)))


def make_world(spec: EnvSpec) -> World:
    """What `spec.factory` makes."""
    module, _, name = spec.factory.partition(":")
    return cast(World, getattr(importlib.import_module(module), name)(spec))


def set_renderer(spec: EnvSpec) -> None:
    """Choose renderer and GPU by the variables that mujoco and robosuite read at their import."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch, imported with lerobot, computes nothing here
    if spec.gl is not None:
        os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = spec.gl
    if spec.egl_device is not None:
        os.environ["MUJOCO_EGL_DEVICE_ID"] = str(spec.egl_device)
        if os.environ.get("CUDA_VISIBLE_DEVICES"):  # robosuite wants the one named in the other
            os.environ["CUDA_VISIBLE_DEVICES"] = str(spec.egl_device)


def end_with_parent(parent: int, *, by_kernel: bool) -> None:
    """Leave no orphan: end when the parent has, even while the simulator hangs in native code."""
    if by_kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    """Ends this process with its parent where the kernel does not."""
    above = parent_process()
    if above is not None:
        wait([above.sentinel])
        os._exit(1)
