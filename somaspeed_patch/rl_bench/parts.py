"""What the benches of RL share: pi0.5 with random weights, observations for it, and samples of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.ab import machine, results, synthetic_pi05, synthetic_recipe
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.pi05 import hints
from somaspeed_patch.rl import flow_sde
from somaspeed_patch.rl.actor import Actor, Decision
from somaspeed_patch.rl.encoder import MOST
from somaspeed_patch.rl.env_libero import CAMERAS
from somaspeed_patch.rl.env_process import ACTION, Observation
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.pi05_flow import PI05Flow
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.stores import Store
from somaspeed_patch.rl.trajectory import Chunk, Trajectory
from somaspeed_patch.rl.value_head import ValueHead

_HORIZON = 10  # H of openpi's pi05_libero, which published RL runs train
_EPISODE = 48  # chunks: 240 steps of LIBERO-Spatial, 5 a chunk
_TOKENS, _MASK = "observation.language.tokens", "observation.language.attention_mask"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A policy and how it sees."""

    policy: PI05Flow
    interface: PromptInterface
    recipe: Synthetic

    def value_head(self) -> ValueHead:
        """A new critic on the policy's device."""
        return ValueHead(self.policy.value_width).to(self.policy.device)

    def actor(self, policy: PI05Flow, critic: ValueHead, settings: Settings, **options: Any) -> Actor:
        """One that acts as the settings say; `options` go to `Actor`."""
        return Actor(
            policy, critic, self.interface, flow=settings.flow, executed=settings.executed, **options
        )


class PromptInterface:
    """LIBERO's images as they are, and a prompt of fixed length in ids: there is no tokenizer offline."""

    def __init__(self, recipe: Synthetic, vocabulary: int, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(vocabulary - 1, (1, recipe.slots), generator=rng)
        self._mask = torch.arange(recipe.slots)[None] < recipe.tokens
        self._recipe, self._device = recipe, device

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """What the preprocessor would leave, images scaled on the policy's device."""
        size = len(observations)
        found: dict[str, Tensor] = {}
        for index, camera in enumerate(CAMERAS):
            pixels = torch.from_numpy(np.stack([each[camera] for each in observations]))
            scaled = pixels.to(self._device).permute(0, 3, 1, 2).float() / 255
            found[f"observation.images.image{index}"] = scaled
        found[_TOKENS] = self._prompt.expand(size, -1).to(self._device)
        found[_MASK] = self._mask.expand(size, -1).to(self._device)
        hints.attach(found[_MASK], hints.Valid(self._recipe.tokens, True, False))
        return found

    def actions(self, chunks: Tensor) -> NDArray[np.float32]:
        """As they are, within the environment's bounds."""
        executed: NDArray[np.float32] = chunks.clamp(-1, 1).float().cpu().numpy()
        return executed


def subject(size: str, device: torch.device) -> Subject:
    """pi0.5 on two cameras; `size` as in a recipe's section `synthetic`. The adapter has to be patched in.

    On a GPU it computes under autocast to bf16, as accelerate trains it: LeRobot keeps the vision tower's
    weights in fp32, and without autocast its 27 layers take 62 % of the time of `encode` (measured, H200).
    """
    recipe = replace(synthetic_recipe.load("pi05_libero"), size=size, chunk=_HORIZON, cameras=2)
    if device.type == "cpu":
        recipe = replace(recipe, dtype="float32")
    host = synthetic_pi05.build(recipe, device)
    vocabulary = host.model.paligemma_with_expert.paligemma.config.text_config.vocab_size
    autocast = torch.bfloat16 if device.type == "cuda" else None
    return Subject(
        policy=PI05Flow(host, autocast=autocast),
        interface=PromptInterface(recipe, vocabulary, device),
        recipe=recipe,
    )


def settings(args: argparse.Namespace, **others: Any) -> Settings:
    """The published ones of LIBERO-Spatial, but for what the arguments say."""
    flow = Flow(steps=args.steps, noise_level=0.5)
    return Settings(flow=flow, executed=args.executed, **others)


def episodes(actor: Actor, count: int, store: Store, image_size: int, batch: int = 16) -> list[Trajectory]:
    """`count` chunks of random images, in episodes of LIBERO's length; nothing is executed."""
    rng, seed = np.random.default_rng(0), torch.Generator().manual_seed(0)
    actor.store = store
    found = list[Chunk]()
    while len(found) < count:
        for each in _decisions(actor, min(batch, count - len(found)), image_size, rng, seed):
            ended = torch.full((actor.executed,), len(found) % _EPISODE == _EPISODE - 1)
            found.append(each.chunk(torch.from_numpy(rng.random(actor.executed, np.float32)), ended))
    parts = [found[i : i + _EPISODE] for i in range(0, count, _EPISODE)]
    return [
        Trajectory(env=0, episode=i, version=0, chunks=part, terminated=True, final_value=0.0)
        for i, part in enumerate(parts)
    ]


def warm_up(actor: Actor, image_size: int) -> None:
    """Compile and record what any number of observations takes, so that no iteration has to."""
    rng, seed = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for count in range(1, MOST + 1):
        _decisions(actor, count, image_size, rng, seed)
    if actor.policy.device.type == "cuda":
        torch.cuda.synchronize()  # another thread goes on with it


def _decisions(
    actor: Actor, count: int, image_size: int, rng: np.random.Generator, seed: torch.Generator
) -> list[Decision]:
    """Of random images."""
    seen = [_observation(rng, image_size) for _ in range(count)]
    return actor.act(seen, [flow_sde.draw(1, actor.policy.shape, actor.flow, seed) for _ in seen])


def _observation(rng: np.random.Generator, size: int) -> Observation:
    images = {name: rng.integers(0, 256, (size, size, 3), np.uint8) for name in CAMERAS}
    return {**images, "state": np.zeros(ACTION + 1, np.float32)}


def head(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """What results begin with."""
    return {
        **results.head(kind),
        "machine": {**machine.processor(), **machine.accelerators()},
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "out"},
    }
