"""What the MolmoAct2 tests share: a tiny policy, and batches that went through LeRobot's own preprocessor.

    policy = make_policy(cameras=2, action_mode="continuous", train_action_expert_only=True)
    batch = make_batch(policy, tasks=["pick it up", "put it on the plate"], valid_actions=[4, 2])
    loss, gradients = loss_and_gradients(policy, batch)

The model is LeRobot's, read from a tiny checkpoint with random weights (`tiny_molmoact2`): the code under
test is the code that trains the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.tiny_molmoact2 import assets

TASK = "pick up the cube"
_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "model_dtype": "float32",
    "chunk_size": 4,
    "n_action_steps": 4,
    "num_flow_timesteps": 2,
    "action_mode": "both",
    "inference_action_mode": "continuous",
    "push_to_hub": False,
}


def make_config(
    *,
    cameras: int = 1,
    state_dim: int = 6,
    action_dim: int = 6,
    size: str = "micro",
    seed: int = 0,
    attn_implementation: str | None = None,
    crop_mode: str = "resize",
    layers: int | None = None,
    **config: Any,
) -> Any:
    """A MolmoAct2Config for a tiny checkpoint, which is built if this machine has none.

    Args:
        cameras, state_dim, action_dim: of the robot.
        size: a key of `tiny_molmoact2.sizes.SIZES`.
        seed, attn_implementation, crop_mode, layers: for `tiny_molmoact2.checkpoint.write`.
        config: any field of LeRobot's MolmoAct2Config, over small defaults.
    """
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config

    files = assets.ensure(
        size, seed=seed, attn_implementation=attn_implementation, layers=layers, crop_mode=crop_mode
    )
    paths = {
        "checkpoint_path": str(files.checkpoint),
        "discrete_action_tokenizer": str(files.fast_tokenizer),
    }
    built = MolmoAct2Config(**{**_DEFAULTS, **paths, **config})
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, 56, 56))
    built.input_features = {
        **{f"observation.images.cam{i}": image for i in range(cameras)},
        "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(state_dim,)),
    }
    built.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(action_dim,))}
    return built


def make_policy(*, dtype: str = "float32", **config: Any) -> Any:
    """A tiny MolmoAct2Policy in training mode, on the device of its configuration.

    Args:
        dtype: LeRobot's model_dtype: float32, bfloat16 or float16.
        config: for `make_config`: size, seed, cameras and so on, and any field of MolmoAct2Config.
    Returns: the policy. What LeRobot initialises to one number (zeros, norm weights) is random here: a
        gradient reaches every path, and a lost weight shows. The caller's RNG state is left as it was.
    """
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    with torch.random.fork_rng():
        policy = MolmoAct2Policy(make_config(model_dtype=dtype, **config))
    policy.to(policy.config.device)
    policy.train()
    return policy


def make_raw_batch(
    policy: Any,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    tasks: Sequence[str] | None = None,
    image_sizes: Sequence[tuple[int, int]] | None = None,
    valid_actions: Sequence[int] | None = None,
    still: Sequence[int] = (),
) -> dict[str, Any]:
    """One batch as LeRobot's loader gives it.

    Args:
        policy: the policy, or its configuration, which decides the cameras and dimensions.
        batch_size: samples; as many as there are tasks by default, or 4.
        seed: for every value; the global RNG is not touched.
        tasks: an instruction a sample; TASK for all by default, so that all prompts are equally long.
        image_sizes: height and width of each camera's images, 56 by 56 by default.
        valid_actions: actions of each sample before the end of its episode; action_is_pad marks the others,
            and is not in the batch by default.
        still: indices of samples whose actions all are 1: they have fewer FAST tokens than the others.
    Returns: images in [0, 1], float [B, 3, H, W]; observation.state [B, state_dim] and action [B, chunk_size,
        action_dim] in [-1, 1]; task, a list of B strings; maybe action_is_pad, bool [B, chunk_size].
    Raises: ValueError: an argument has not as many entries as there are samples, or cameras.
    """
    config, rng = getattr(policy, "config", policy), torch.Generator().manual_seed(seed)
    samples = batch_size or len(tasks or range(4))
    cameras = [key for key in config.input_features if key.startswith("observation.images.cam")]
    sizes = image_sizes or [(56, 56)] * len(cameras)
    _expect(samples, "an entry a sample", tasks=tasks, valid_actions=valid_actions)
    _expect(len(cameras), "an entry a camera", image_sizes=sizes)
    state_dim = config.input_features["observation.state"].shape[0]
    action_dim = config.output_features["action"].shape[0]
    batch: dict[str, Any] = {
        key: torch.rand(samples, 3, *size, generator=rng) for key, size in zip(cameras, sizes, strict=True)
    }
    batch["observation.state"] = torch.rand(samples, state_dim, generator=rng) * 2 - 1
    batch["action"] = torch.rand(samples, config.chunk_size, action_dim, generator=rng) * 2 - 1
    batch["action"][list(still)] = 1.0
    batch["task"] = list(tasks or [TASK] * samples)
    if valid_actions is not None:
        batch["action_is_pad"] = torch.arange(config.chunk_size) >= torch.tensor(valid_actions)[:, None]
    return batch


def _expect(count: int, what: str, **arguments: Sequence[Any] | None) -> None:
    for name, value in arguments.items():
        if value is not None and len(value) != count:
            raise ValueError(
                f"make_raw_batch: {name} must have {what}, {count}, but has {len(value)}: {value!r}"
            )


def make_preprocessor(policy: Any, *, padding_side: str = "left") -> Any:
    """LeRobot's preprocessor pipeline for the policy, with statistics that change values.

    Args:
        policy: the policy or its configuration.
        padding_side: where the tokenizer pads. After padding on the right LeRobot's processor marks the
            padding as text: it puts the first token in front and takes all that follows for text.
    """
    from lerobot.policies.molmoact2 import processor_molmoact2 as host

    config = getattr(policy, "config", policy)
    dims = {
        "observation.state": config.input_features["observation.state"].shape[0],
        "action": config.output_features["action"].shape[0],
    }
    pre, _ = host.make_molmoact2_pre_post_processors(
        config, {name: _statistics(dim) for name, dim in dims.items()}
    )
    [pack] = [step for step in pre.steps if isinstance(step, host.MolmoAct2PackInputsProcessorStep)]
    pack.processor.tokenizer.padding_side = padding_side
    return pre


def _statistics(dim: int) -> dict[str, Tensor]:
    """Of values in [-1, 1]; the quantiles are such that some values are clamped and 1 stays 1."""
    bounds = {
        "min": -1.0,
        "max": 1.0,
        "mean": 0.0,
        "std": 1.0,
        "q01": -0.9,
        "q99": 0.9,
        "q10": -0.8,
        "q90": 0.8,
    }
    return {name: torch.full((dim,), value) for name, value in bounds.items()}


def make_batch(policy: Any, *, padding_side: str = "left", **raw: Any) -> dict[str, Any]:
    """One batch as LeRobot's preprocessor leaves it, on the policy's device.

    Args:
        policy: the policy or its configuration.
        padding_side: as of `make_preprocessor`.
        raw: for `make_raw_batch`: batch_size, seed, tasks, image_sizes, valid_actions, still. Different
            tasks, and still samples where actions are tokens, make texts of different lengths and so padding;
            there is none by default.
    """
    batch: dict[str, Any] = make_preprocessor(policy, padding_side=padding_side)(
        make_raw_batch(policy, **raw)
    )
    return batch


def loss_and_gradients(
    policy: Any, batch: dict[str, Any], seed: int = 7, reduction: str = "mean", *, autocast: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """One training step without the update.

    Args:
        policy: the policy.
        batch: from `make_batch`.
        seed: for noise and times.
        reduction: mean, or none for a loss a sample; these are weighted with 1, 2, ... before the backward,
            so that a gradient given to the wrong sample shows.
        autocast: run the forward under torch.autocast to bfloat16, as accelerate does when told to; by itself
            LeRobot does not for this policy.
    Returns: the loss, a scalar or [B], and the gradient of every parameter that has one, by name.
    """
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    device = next(policy.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss, _ = policy.forward(batch, reduction=reduction)
    weights = torch.arange(1, loss.numel() + 1, device=device, dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    return loss.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
