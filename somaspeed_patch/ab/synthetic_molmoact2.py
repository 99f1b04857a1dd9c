"""LeRobot's MolmoAct2 for `--synthetic`: its batch, and the options that a user of the host has."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch.ab import synthetic_molmoact2_batch, synthetic_molmoact2_model, synthetic_subject


class Subject(synthetic_subject.Subject):
    """MolmoAct2 whose action expert learns. By default attention is SDPA, and everything else is off."""

    _autocast = False

    def build(self) -> Any:
        """See the base class."""
        self._compiled: dict[nn.Module, Any] = {}
        return synthetic_molmoact2_model.build(self.recipe, self.device)

    def in_float32(self, policy: Any) -> Any:
        """See the base class.

        The host draws noise and times in the weights' dtype; the copy takes those draws, and the actions
        rounded as they are, so that what the gate allows does not include another noise.
        """
        exact = copy.deepcopy(policy).float()
        exact.config.model_dtype = "float32"
        low, prepare = policy._prepare_flow_matching_tensors, exact._prepare_flow_matching_tensors

        def prepare_from_low(*, actions: Tensor, **given: Any) -> Any:
            # With zeros for actions the target velocity is the negative noise.
            zeros = torch.zeros_like(actions)
            _, timesteps, _, velocity = low(actions=zeros, action_dim_is_pad=None)
            given |= {"timesteps": timesteps, "noise": -velocity}
            return prepare(actions=actions.to(velocity.dtype), **given)

        vars(exact)["_prepare_flow_matching_tensors"] = prepare_from_low
        return exact

    @contextmanager
    def switched(self, options: Mapping[str, bool | str]) -> Iterator[None]:
        """See the base class: attention (sdpa or eager), autocast, compile_blocks, gradient_checkpointing."""
        with ExitStack() as stack:
            stack.enter_context(_attention(self.policy, str(options.get("attention", "sdpa"))))
            if options.get("gradient_checkpointing"):
                stack.enter_context(_checkpointed(self.policy))
            if options.get("compile_blocks"):
                stack.enter_context(self._compiled_blocks())
            self._autocast = bool(options.get("autocast"))
            stack.callback(setattr, self, "_autocast", False)
            yield

    def batch(self, size: int, seed: int = 1, padding: str | None = None) -> dict[str, Tensor]:
        """See the base class."""
        return synthetic_molmoact2_batch.make(
            self.policy.model.config,
            self.lengths(size, padding),
            cameras=self.recipe.cameras,
            chunk=self.recipe.chunk,
            padding=padding,
            device=self.device,
            seed=seed,
        )

    def autocast(self) -> Any:
        """Nothing by itself: MolmoAct2's configuration has no dtype from which LeRobot would take one."""
        return torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext()

    @contextmanager
    def _compiled_blocks(self) -> Iterator[None]:
        """Decoder, action and vision blocks compiled one by one, as a user can who knows torch.compile."""
        blocks = _blocks(self.policy)
        for block in blocks:
            if block not in self._compiled:
                block.compile(dynamic=False)
                self._compiled[block] = block._compiled_call_impl
            vars(block)["_compiled_call_impl"] = self._compiled[block]
        try:
            yield
        finally:
            for block in blocks:
                del vars(block)["_compiled_call_impl"]


def _blocks(policy: Any) -> list[nn.Module]:
    backbone = policy._backbone()
    vision = backbone.vision_backbone.image_vit.transformer.resblocks
    return [*backbone.transformer.blocks, *backbone.action_expert.blocks, *vision]


@contextmanager
def _attention(policy: Any, name: str) -> Iterator[None]:
    """The attention of language model, vision tower and pooling. The expert's is SDPA whatever one sets."""
    holders = _attention_holders(policy)
    before = [getattr(holder, attribute) for holder, attribute in holders]
    try:
        for holder, attribute in holders:
            setattr(holder, attribute, name)
        yield
    finally:
        for (holder, attribute), value in zip(holders, before, strict=True):
            setattr(holder, attribute, value)


def _attention_holders(policy: Any) -> list[tuple[Any, str]]:
    """Where the choice is kept: the sub-configurations, and the vision modules, which copied it."""
    backbone = policy._backbone()
    modules = [*backbone.transformer.modules(), *backbone.vision_backbone.modules()]
    configs = {
        id(config): config
        for module in modules
        for attribute in ("config", "vit_config", "adapter_config")
        if (config := getattr(module, attribute, None)) is not None
    }
    return [
        *((config, "_attn_implementation") for config in configs.values()),
        *((module, "attn_implementation") for module in modules if hasattr(module, "attn_implementation")),
    ]


@contextmanager
def _checkpointed(policy: Any) -> Iterator[None]:
    """The host's activation checkpointing. Its hook on the embeddings gives every layer a gradient."""
    policy.config.gradient_checkpointing = True
    policy._enable_gradient_checkpointing()
    try:
        yield
    finally:
        policy.config.gradient_checkpointing = False
        model = policy._hf_model()
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
