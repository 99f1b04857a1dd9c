"""LeRobot's pi0.5 for `--synthetic`: one policy that every arm trains in turn, as the trainer does."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.ab import synthetic_subject
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.pi05 import hints

_MASK = "observation.language.attention_mask"


class Subject(synthetic_subject.Subject):
    """pi0.5 with its own batch and switches."""

    _compiled: Any = None

    def build(self) -> Any:
        """See the base class."""
        return build(self.recipe, self.device)

    def in_float32(self, policy: Any) -> Any:
        """See the base class; pi0.5 draws noise and times in fp32 in any dtype."""
        exact = copy.deepcopy(policy).float()
        exact.config.dtype = "float32"
        return exact

    @contextmanager
    def switched(self, options: Mapping[str, bool | str]) -> Iterator[None]:
        """The host's `gradient_checkpointing` and `compile_model`, as its constructor would have set them."""
        model = self.policy.model
        if options.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable()
        if options.get("compile_model"):
            # The constructor's mode is max-autotune, which takes many minutes at this size; the default
            # mode is what baselines are usually quoted with.
            self._compiled = self._compiled or torch.compile(model.forward, dynamic=False)
            vars(model)["forward"] = self._compiled
        try:
            yield
        finally:
            vars(model).pop("forward", None)
            model.gradient_checkpointing_disable()

    def batch(self, size: int, seed: int = 1, padding: str | None = None) -> dict[str, Tensor]:
        """Random images, prompts of `tokens` real tokens, and actions, as the preprocessor leaves them."""
        recipe, config = self.recipe, self.policy.config
        rng = torch.Generator(self.device).manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, device=self.device, generator=rng)

        height, width = config.image_resolution
        batch = {
            f"observation.images.image{i}": uniform(size, 3, height, width) for i in range(recipe.cameras)
        }
        vocabulary = self.policy.model.paligemma_with_expert.paligemma.config.text_config.vocab_size
        batch["observation.language.tokens"] = (uniform(size, recipe.slots) * (vocabulary - 1)).long()
        lengths = self.lengths(size, padding)
        batch[_MASK] = (torch.arange(recipe.slots) < lengths[:, None]).to(self.device)
        every = int(lengths.min()) == recipe.slots
        hints.attach(batch[_MASK], hints.Valid(recipe.tokens, True, every))
        batch["action"] = uniform(size, recipe.chunk, 7) * 2 - 1
        return batch

    def autocast(self) -> Any:
        """What accelerate puts around the forward for this policy's dtype."""
        if self.policy.config.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def build(recipe: Synthetic, device: torch.device) -> Any:
    """A PI05Policy with random weights, in training mode."""
    from somaspeed_patch.tiny_pi05.shrink import shrunk
    from somaspeed_patch.tiny_pi05.sizes import SIZES

    with nullcontext() if recipe.size == "full" else shrunk(SIZES[recipe.size]):
        policy = _policy(recipe, device)
    torch.manual_seed(0)
    with torch.no_grad():  # adaRMS projections start from zero, which would hide their part of the gradient
        for name, parameter in policy.named_parameters():
            if name.endswith("norm.dense.weight"):
                parameter.normal_(0, 0.02)
    policy.train()
    return policy


def _policy(recipe: Synthetic, device: torch.device) -> Any:
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.pi05.modeling_pi05 import PI05Config, PI05Policy

    side = 224 if recipe.size == "full" else 28
    config = PI05Config(
        dtype=recipe.dtype, train_expert_only=True, device=device.type, image_resolution=(side, side),
        chunk_size=recipe.chunk, n_action_steps=recipe.chunk, tokenizer_max_length=recipe.slots,
    )  # fmt: skip
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, side, side))
    config.input_features = {f"observation.images.image{i}": image for i in range(recipe.cameras)}
    config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(7,))}
    torch.manual_seed(0)
    with torch.device(device):
        return PI05Policy(config)
