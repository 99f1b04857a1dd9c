"""LIBERO without images: states for `StateFlow`, and the scripted expert's demonstrations of them.

    python -m somaspeed_patch.rl.libero_states --task 0 --init-states 0:20 --out demonstrations.npz

An observation is where the hand is [3], its two fingers [2], and for each object that the task is about the
way to it from the hand [3], all in m. A latent action is the environment's without the hand's rotation, which
the expert leaves alone: cloned, small errors of it add up until nothing looks as it was demonstrated. While
the expert acts, its motion is disturbed, so that the way back is demonstrated, too.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.libero.expert import PickAndPlace
from somaspeed_patch.rl.env_libero import LiberoWorld
from somaspeed_patch.rl.env_process import ACTION, EnvSpec, Observation

log = logging.getLogger(__name__)

MAX_STEPS = 320
Demonstration = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Observations [T, O], and the actions [T, 4] of the expert at them."""
_LATENT = (0, 1, 2, 6)  # of the environment's action: translation and gripper
_DISTURBANCE = 0.5  # of what one step can move, 2.5 cm; the controller settles within 1 cm


class LiberoStates:
    """The interface of a policy over states."""

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """{"observation": [B, O] fp32}."""
        return {"observation": torch.from_numpy(np.stack([flat(each) for each in observations]))}

    def actions(self, chunks: Tensor) -> NDArray[np.float32]:
        """[B, C, 7] of latent actions [B, C, 4]: what is beyond 1 the controller would clip, too."""
        found: NDArray[np.float32] = np.zeros((*chunks.shape[:2], ACTION), np.float32)
        found[..., _LATENT] = chunks.clamp(-1, 1).numpy()
        return found


def flat(observation: Observation) -> NDArray[np.float32]:
    """[O], see the module."""
    hand, fingers = observation["state"][:3], observation["state"][6:]
    ways = observation["objects"].reshape(-1, 7)[:, :3] - hand
    found: NDArray[np.float32] = np.concatenate([hand, fingers, ways.ravel()]).astype(np.float32)
    return found


def demonstrate(
    world: LiberoWorld, init_state: int, side: float, rng: np.random.Generator, speed: float = 1.0
) -> Demonstration | None:
    """The expert's episode from an initial state; None where it does not solve the task.

    Args:
        side, speed: see `PickAndPlace`.
        rng: of the disturbance.
    """
    world.reset(init_state, 0)
    expert = PickAndPlace(world.raw, side=side, speed=speed)
    seen, done = [], []
    for _ in range(MAX_STEPS):
        action = expert.act(world.raw)
        seen.append(flat(world.observe()))
        done.append(action[list(_LATENT)])
        disturbed = action.copy()
        disturbed[:3] += rng.normal(scale=_DISTURBANCE, size=3)
        if world.step(disturbed.clip(-1, 1)):
            return np.stack(seen), np.stack(done)
    return None


def demonstrations(
    world: LiberoWorld, init_states: Sequence[int], speed: float = 1.0
) -> Iterator[Demonstration]:
    """The faster of the expert's two ways from each initial state that it solves."""
    for init_state in init_states:
        rng = np.random.default_rng(init_state)
        ways = [demonstrate(world, init_state, side, rng, speed) for side in (1.0, -1.0)]
        solved = [way for way in ways if way is not None]
        log.info("initial state %d: solved from %d of 2 sides", init_state, len(solved))
        if solved:
            yield min(solved, key=lambda way: len(way[1]))


def save(file: Path, episodes: Sequence[Demonstration]) -> None:
    """Write demonstrations as arrays: `observations` [N, O], `actions` [N, 4], `lengths` [episodes]."""
    np.savez(
        file,
        observations=np.concatenate([seen for seen, _ in episodes]),
        actions=np.concatenate([done for _, done in episodes]),
        lengths=np.array([len(done) for _, done in episodes]),
    )


def load(file: Path) -> list[Demonstration]:
    """What `save` wrote."""
    with np.load(file) as arrays:
        cuts = np.cumsum(arrays["lengths"])[:-1]
        seen, done = (np.split(arrays[name], cuts) for name in ("observations", "actions"))
    return list(zip(seen, done, strict=True))


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="libero_states")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--init-states", default="0:20", help="from:to of the task's 50")
    parser.add_argument("--speed", type=float, default=1.0, help="of the expert, at most; 1 is the robot's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    begin, _, end = args.init_states.partition(":")
    world = LiberoWorld(EnvSpec(task=args.task, horizon=MAX_STEPS))
    save(args.out, list(demonstrations(world, range(int(begin), int(end)), args.speed)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    main()
