"""What the pi0.5 tests share: a tiny policy and preprocessed batches for it.

    policy = make_policy(cameras=2, train_expert_only=True)
    loss, _ = policy.forward(make_batch(policy, batch_size=3, present=[0], language_lengths=[48, 7, 1]))

The model is LeRobot's, built small by `tiny_pi05`: the code under test is the code that trains the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch.tiny_pi05.shrink import shrunk
from somaspeed_patch.tiny_pi05.sizes import SIZES

_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "chunk_size": 4,
    "n_action_steps": 4,
    "max_state_dim": 8,
    "max_action_dim": 8,
    "image_resolution": (28, 28),
    "tokenizer_max_length": 48,
    "num_inference_steps": 2,
    "push_to_hub": False,
}


def make_config(*, cameras: int = 1, state_dim: int = 6, action_dim: int = 6, **config: Any) -> Any:
    """A PI05Config with `cameras` image features; `config` goes to PI05Config over small defaults."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    built = PI05Config(**{**_DEFAULTS, **config})
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, *built.image_resolution))
    built.input_features = {
        **{f"observation.images.cam{i}": image for i in range(cameras)},
        "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(state_dim,)),
    }
    built.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(action_dim,))}
    return built


def make_policy(*, size: str = "micro", seed: int = 0, **config: Any) -> Any:
    """A tiny PI05Policy in training mode, with random weights from `seed`.

    Args:
        size: a key of `tiny_pi05.sizes.SIZES`.
        seed: for every weight; the caller's RNG state is left as it was.
        config: for `make_config`: cameras, state_dim, action_dim, and any field of PI05Config.
    Returns: the policy. What LeRobot initialises to zero (norm weights, adaRMS projections) is random here: a
        gradient reaches every path, and a lost weight shows.
    """
    from lerobot.policies.pi05 import PI05Policy

    with torch.random.fork_rng(), shrunk(SIZES[size]):
        torch.manual_seed(seed)
        policy = PI05Policy(make_config(**config))
        _perturb_zero_initialised(policy)
    policy.train()
    return policy


def _perturb_zero_initialised(policy: nn.Module) -> None:
    """Small random values where the host starts from zeros."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)


def make_batch(
    policy: Any,
    *,
    batch_size: int = 4,
    seed: int = 0,
    present: Sequence[int] | None = None,
    language_lengths: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """One batch as the preprocessor leaves it, on the policy's device.

    Args:
        policy: the policy (or anything with its `config`), which decides the cameras, actions and slots.
        batch_size: samples.
        seed: for every value; the global RNG is not touched.
        present: indices of the cameras in the batch, all by default; LeRobot fills the others and masks them.
        language_lengths: real tokens per sample, the other slots are masked; all slots by default.
    Returns: images in [0, 1], state, token ids, mask (bool) and actions.
    Raises: ValueError: language_lengths does not have one entry per sample, or one is out of range.
    """
    config, rng = policy.config, torch.Generator().manual_seed(seed)
    cameras = [key for key in config.input_features if key.startswith("observation.images.cam")]
    chosen = cameras if present is None else [cameras[i] for i in present]
    slots = config.tokenizer_max_length
    mask = _language_mask(batch_size, slots, language_lengths)
    state_dim = config.input_features["observation.state"].shape[0]
    action_dim = config.output_features["action"].shape[0]
    batch = {key: torch.rand(batch_size, *config.input_features[key].shape, generator=rng) for key in chosen}
    batch["observation.state"] = torch.rand(batch_size, state_dim, generator=rng)
    batch["observation.language.tokens"] = torch.randint(4, 200, (batch_size, slots), generator=rng) * mask
    batch["observation.language.attention_mask"] = mask
    batch["action"] = torch.randn(batch_size, config.chunk_size, action_dim, generator=rng)
    return {key: value.to(config.device) for key, value in batch.items()}


def make_dataset(root: Path, *, episodes: int = 3, frames: int = 12, side: int = 28, seed: int = 0) -> None:
    """Write a LeRobot dataset of noise to `root`: two cameras, state [8], action [7], two instructions."""
    import numpy as np
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    cameras = ("observation.images.image", "observation.images.image2")
    image = {"dtype": "image", "shape": (side, side, 3), "names": ["height", "width", "channel"]}
    vectors = {"observation.state": 8, "action": 7}
    features: dict[str, Any] = dict.fromkeys(cameras, image)
    features |= {
        name: {"dtype": "float32", "shape": (length,), "names": None} for name, length in vectors.items()
    }
    dataset = LeRobotDataset.create("local/noise", fps=10, root=root, use_videos=False, features=features)
    rng = np.random.default_rng(seed)
    for episode in range(episodes):
        for _ in range(frames):
            pixels = {name: rng.integers(0, 255, (side, side, 3), dtype=np.uint8) for name in cameras}
            numbers = {
                name: rng.uniform(-1, 1, length).astype(np.float32) for name, length in vectors.items()
            }
            dataset.add_frame({**pixels, **numbers, "task": f"pick up the bowl {episode % 2}"})
        dataset.save_episode()
    dataset.finalize()


def loss_and_gradients(
    policy: Any, batch: dict[str, Tensor], seed: int = 7
) -> tuple[Tensor, dict[str, Tensor]]:
    """One training step without the update, under the autocast that the policy's dtype asks for.

    Returns: the loss, and the gradient of every parameter that has one, by name.
    """
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autocast(policy.config.device, torch.bfloat16, enabled=policy.config.dtype == "bfloat16"):
        loss, _ = policy.forward(batch)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def _language_mask(batch_size: int, slots: int, lengths: Sequence[int] | None) -> Tensor:
    """[B, slots], True at the first `lengths[b]` slots."""
    lengths = [slots] * batch_size if lengths is None else lengths
    if len(lengths) != batch_size or not all(0 <= length <= slots for length in lengths):
        raise ValueError(
            f"make_batch: language_lengths must be {batch_size} numbers in 0..{slots}, but is {list(lengths)}"
        )
    return torch.arange(slots)[None, :] < torch.tensor(lengths)[:, None]
