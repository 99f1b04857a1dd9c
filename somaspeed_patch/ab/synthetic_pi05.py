"""LeRobot's pi0.5 for `--synthetic`: one policy that every arm trains in turn, as the trainer does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.pi05 import hints

PHASES = ("forward", "backward", "optimizer")
_MASK = "observation.language.attention_mask"


class Subject:
    """The model under test with its optimizer; arms switch the host's own options on and off around it."""

    def __init__(self, recipe: Synthetic, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        # As lerobot-train sets them.
        torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True
        self.policy = _build(recipe, device)
        self._preset = self.policy.config.get_optimizer_preset()
        self._compiled: Any = None

    @contextmanager
    def switched(self, options: Mapping[str, bool]) -> Iterator[None]:
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

    @contextmanager
    def optimized(self) -> Iterator[None]:
        """An optimizer as the trainer builds and prepares it, with the patches that are on now."""
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=self.device.type == "cpu")
        optimizer = self._preset.build(self.policy.get_optim_params())
        self._optimizer = self._accelerator.prepare_optimizer(optimizer, device_placement=False)
        try:
            yield
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            del self._optimizer, self._accelerator

    def batch(self, size: int, seed: int = 1) -> dict[str, Tensor]:
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
        batch[_MASK] = (torch.arange(recipe.slots) < recipe.tokens).expand(size, -1).to(self.device)
        hints.attach(batch[_MASK], hints.Valid(recipe.tokens, True, recipe.tokens == recipe.slots))
        batch["action"] = uniform(size, recipe.chunk, 7) * 2 - 1
        return batch

    def update(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """One training step as lerobot-train does it; seconds of its phases, its loss and gradient norm."""
        marks = [self._now()]
        with self.autocast():
            loss, _ = self.policy.forward(batch)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        norm = self._accelerator.clip_grad_norm_(self.policy.parameters(), self._preset.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        values = {"loss": loss.item(), "grad_norm": norm.item()}
        marks.append(self._now())
        seconds = {
            name: after - before for name, before, after in zip(PHASES, marks, marks[1:], strict=False)
        }
        return {**seconds, "total": marks[-1] - marks[0], **values}

    def loss_and_gradients(self, batch: dict[str, Tensor], seed: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and every gradient of one batch, with the noise and times of `seed`."""
        self.policy.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with self.autocast():
            loss, _ = self.policy.forward(batch)
        loss.backward()
        found = {n: p.grad for n, p in self.policy.named_parameters() if p.grad is not None}
        self.policy.zero_grad(set_to_none=True)
        return loss.detach(), found

    def autocast(self) -> Any:
        """What accelerate puts around the forward for this policy's dtype."""
        if self.policy.config.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _now(self) -> float:
        # A phase ends when its kernels have; the three syncs a step are the same in every arm.
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _build(recipe: Synthetic, device: torch.device) -> Any:
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
