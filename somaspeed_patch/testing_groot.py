"""What the GR00T tests share: a tiny policy, and batches that went through LeRobot's own preprocessor.

    policy = make_policy()
    batch = make_batch(policy, images=2, tasks=["pick it up", "put it on the plate"], embodiments=[2, 10])
    loss, gradients = loss_and_gradients(policy, batch)

The model is LeRobot's, read from a tiny checkpoint with random weights (`tiny_groot`): the code under test is
the code that trains the real one. `make_raw_batch` makes what the preprocessor cannot: images of different
sizes, and samples with different numbers of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.tiny_groot import assets, checkpoint, redirect, tokenizer
from somaspeed_patch.tiny_groot.sizes import by_name

TASK = "pick up the black bowl"
STATE, ACTION = 8, 7  # dimensions of LIBERO's robot
Grids = Sequence[Sequence[tuple[int, int]]]
"""Height and width in tokens of every image of every sample."""


def make_config(
    size: str = "micro",
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    model: Mapping[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A GrootConfig for a tiny checkpoint, which is built if this machine has none.

    Args:
        size: a key of `tiny_groot.sizes.SIZES`.
        seed, dtype: for `tiny_groot.assets.ensure`.
        model: fields of LeRobot's GR00TN17Config, over the size's.
        config: any field of LeRobot's GrootConfig, over small defaults: fp32 without autocast, 4 actions.
    """
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.groot.configuration_groot import GrootConfig

    dims = by_name(size).dims
    fields = {
        "base_model_path": str(assets.ensure(size, seed=seed, dtype=dtype, **(model or {}))),
        "device": "cpu",
        "use_bf16": False,
        "chunk_size": 4,
        "n_action_steps": 4,
        "max_state_dim": dims,
        "max_action_dim": dims,
        "push_to_hub": False,
    }
    built = GrootConfig(**{**fields, **config})
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, 64, 64))
    state = PolicyFeature(type=FeatureType.STATE, shape=(STATE,))
    built.input_features = {"observation.images.cam0": image, "observation.state": state}
    built.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION,))}
    return built


def make_policy(size: str = "micro", **config: Any) -> Any:
    """A tiny GrootPolicy in training mode, on the device of its configuration.

    Args:
        size: a key of `tiny_groot.sizes.SIZES`; micro has no dropout.
        config: for `make_config`: seed, dtype, model, and any field of GrootConfig.
    Returns: the policy. What LeRobot initialises to one number (zeros, norm weights) is random here: a
        gradient reaches every path, and a lost weight shows. The caller's RNG state is left as it was.
        To load a checkpoint that it saved, be inside `tiny_groot.redirect.installed(size)` too.
    """
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    with torch.random.fork_rng(), redirect.installed(size):
        policy = GrootPolicy(make_config(size, **config))
    policy.to(policy.config.device)
    policy.train()
    return policy


def make_observations(
    policy: Any, batch_size: int, *, images: int, tasks: Sequence[str], seed: int
) -> dict[str, Any]:
    """One batch as LeRobot's loader gives it.

    Returns: observation.images.cam0 and so on, in [0, 1], float [B, 3, 64, 64]; observation.state [B, 8] and
        action [B, chunk_size, 7] in [-1, 1]; task, a list of B strings.
    """
    rng = torch.Generator().manual_seed(seed)
    horizon = policy.config.chunk_size
    batch: dict[str, Any] = {
        f"observation.images.cam{i}": torch.rand(batch_size, 3, 64, 64, generator=rng) for i in range(images)
    }
    batch["observation.state"] = torch.rand(batch_size, STATE, generator=rng) * 2 - 1
    batch["action"] = torch.rand(batch_size, horizon, ACTION, generator=rng) * 2 - 1
    return {**batch, "task": list(tasks)}


def make_preprocessor(policy: Any) -> Any:
    """LeRobot's preprocessor pipeline for the policy, with statistics that change values and clamp some."""
    from lerobot.policies.groot import processor_groot as host

    bounds = {"min": -0.9, "max": 0.9, "mean": 0.0, "std": 0.5}
    statistics = {
        name: {key: torch.full((dim,), value) for key, value in bounds.items()}
        for name, dim in (("observation.state", STATE), ("action", ACTION))
    }
    pre, _ = host.make_groot_pre_post_processors(policy.config, statistics)
    [encode] = [step for step in pre.steps if isinstance(step, host.GrootN17VLMEncodeStep)]
    files = Path(policy.config.base_model_path) / checkpoint.BACKBONE
    if files.is_dir():  # else the name on the hub, which `redirect` knows
        encode.model_name = str(files)
    return pre


def make_batch(
    policy: Any,
    batch_size: int = 2,
    *,
    images: int = 1,
    embodiments: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    valid_actions: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """One batch as LeRobot's preprocessor leaves it, on the policy's device.

    Args:
        policy: from `make_policy`.
        batch_size: samples; as many as there are tasks, where these are given.
        images: of each sample.
        embodiments: a robot's id a sample; that of the policy's embodiment_tag for all by default.
        tasks: an instruction a sample; different lengths make padding on the left. TASK for all by default.
        valid_actions: actions of each sample before the end of its episode; the others are masked.
        seed: for every value; the global RNG is not touched.
    Raises: ValueError: an argument has not as many entries as there are samples.
    """
    samples = len(tasks) if tasks is not None else batch_size
    _expect(samples, embodiments=embodiments, valid_actions=valid_actions)
    texts = tasks or [TASK] * samples
    raw = make_observations(policy, samples, images=images, tasks=texts, seed=seed)
    if valid_actions is not None:
        raw["action_is_pad"] = torch.arange(policy.config.chunk_size) >= torch.tensor(valid_actions)[:, None]
    batch: dict[str, Any] = make_preprocessor(policy)(raw)
    if embodiments is not None:
        batch["embodiment_id"] = torch.tensor(embodiments).to(batch["embodiment_id"])
    return batch


def _expect(samples: int, **arguments: Sequence[Any] | None) -> None:
    for name, value in arguments.items():
        if value is not None and len(value) != samples:
            raise ValueError(
                f"make_batch: {name} must have an entry a sample, {samples}, but has {len(value)}: {value!r}"
            )


def make_raw_batch(
    policy: Any,
    grids: Grids,
    *,
    words: Sequence[int] | None = None,
    embodiments: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """A batch as `make_batch` gives it, with random pixels and text instead of processed ones.

    Args:
        policy: from `make_policy`.
        grids: height and width in tokens of every image of every sample; samples and images may differ, and
            a sample may have none.
        words: text tokens of each sample, after its images; 5 by default. Shorter samples are padded on the
            left.
        embodiments: a robot's id a sample; 10, LeRobot's default, for all by default.
        seed: for every value; the global RNG is not touched.
    Returns: input_ids, attention_mask, mm_token_type_ids [B, tokens]; pixel_values [patches of all images,
        1536]; image_grid_thw [images, 3]; state [B, 1, dims]; action, action_mask [B, chunk_size, dims];
        embodiment_id [B]. Every action is valid in the first 7 dimensions.
    """
    _expect(len(grids), words=words, embodiments=embodiments)
    rng, config = torch.Generator().manual_seed(seed), policy.config
    samples, lengths = len(grids), words or [5] * len(grids)
    mask = (torch.arange(config.max_action_dim) < ACTION).float().expand(samples, config.chunk_size, -1)
    inputs = {
        **_text([_tokens(images, length, rng) for images, length in zip(grids, lengths, strict=True)]),
        **_pixels([grid for images in grids for grid in images], rng),
        "state": torch.rand(samples, 1, config.max_state_dim, generator=rng) * 2 - 1,
        "action": (torch.rand(mask.shape, generator=rng) * 2 - 1) * mask,
        "action_mask": mask.clone(),
        "embodiment_id": torch.tensor(embodiments or [10] * samples, dtype=torch.int32),
    }
    return {name: value.to(config.device) for name, value in inputs.items()}


def _tokens(images: Sequence[tuple[int, int]], words: int, rng: torch.Generator) -> Tensor:
    """A sample's ids: its images, each between its marks, then its text of bytes."""
    known = tokenizer.ids()
    parts = [torch.randint(256, (words,), generator=rng)]
    for height, width in reversed(images):
        pads = [known[tokenizer.IMAGE]] * (height * width)
        parts.insert(0, torch.tensor([known[tokenizer.VISION_START], *pads, known[tokenizer.VISION_END]]))
    return torch.cat(parts)


def _text(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """The samples as one batch, padded on the left."""
    known = tokenizer.ids()
    slots = max(len(sample) for sample in samples)
    ids = torch.full((len(samples), slots), known[tokenizer.PADDING])
    real = torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        ids[i, slots - len(sample) :] = sample
        real[i, slots - len(sample) :] = 1
    kinds = (ids == known[tokenizer.IMAGE]).long()
    return {"input_ids": ids, "attention_mask": real, "mm_token_type_ids": kinds}


def _pixels(grids: Sequence[tuple[int, int]], rng: torch.Generator) -> dict[str, Tensor]:
    """Patches of images; a token is two by two of them, and one has 3 colours, 2 frames, 16 by 16 pixels."""
    patches = torch.tensor([[1, 2 * height, 2 * width] for height, width in grids])
    values = torch.randn(int(patches.prod(dim=1).sum()), 3 * 2 * 16 * 16, generator=rng)
    return {"pixel_values": values, "image_grid_thw": patches}


def loss_and_gradients(
    policy: Any, batch: dict[str, Any], *, seed: int = 7
) -> tuple[Tensor, dict[str, Tensor]]:
    """One training step without the update.

    Args:
        policy: the policy.
        batch: from `make_batch` or `make_raw_batch`; left as it was.
        seed: for noise, times and dropout.
    Returns: the loss, a scalar, and the gradient of every parameter that has one, by name.
    """
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, _ = policy.forward(dict(batch))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
