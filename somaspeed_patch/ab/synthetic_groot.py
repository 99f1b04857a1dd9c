"""LeRobot's GR00T N1.7 for `--synthetic`: its batch, and the options that a user of the host has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch import frozen
from somaspeed_patch.ab import (
    synthetic_groot_batch,
    synthetic_groot_exact,
    synthetic_groot_model,
    synthetic_subject,
)
from somaspeed_patch.tiny.replaced import Replaced
from somaspeed_patch.tiny_groot import sizes


class Subject(synthetic_subject.Subject):
    """GR00T whose action head learns.

    By default its weights are fp32, dropout is the host's, attention is SDPA, and nothing is compiled.
    """

    changes_results = frozenset({"all_bf16", "all_fp32", "dropout"})
    # Which of the head's ReLUs rounding switches is chance. Of ten seeds at size small, three had native so
    # near to fp32 with 2 samples that a compiled arm was red (shares up to 1.27), none with 16 (up to 0.91).
    gate_samples = 16

    def build(self) -> Any:
        """See the base class."""
        self._compiled: dict[nn.Module, Any] = {}
        return synthetic_groot_model.build(self.recipe, self.device)

    def in_float32(self, policy: Any) -> Any:
        """See the base class."""
        return synthetic_groot_exact.in_float32(policy)

    @contextmanager
    def switched(self, options: Mapping[str, bool | str]) -> Iterator[None]:
        """See the base class.

        Args:
            options: attention, sdpa or eager, the backbone's; dropout, host or off; all_bf16 or all_fp32,
                every weight in that dtype, the backbone's and the head's; compile_blocks, those of vision
                tower, language model, vl_self_attention and DiT.
        Raises: ValueError: all_bf16 and all_fp32 at once.
        """
        if options.get("all_bf16") and options.get("all_fp32"):
            raise ValueError("synthetic groot: all_bf16 and all_fp32 exclude each other; choose one of them")
        _forget_recorders(self.policy)
        with ExitStack() as stack:
            stack.enter_context(_replaced(_attention(self.policy), options.get("attention", "sdpa")))
            if options.get("dropout") == "off":
                stack.enter_context(_replaced(_dropout(self.policy), 0.0))
            for name, dtype in (("all_bf16", torch.bfloat16), ("all_fp32", torch.float32)):
                if options.get(name):
                    stack.enter_context(_weights_in(self.policy.parameters(), dtype))
            if options.get("compile_blocks"):
                stack.enter_context(self._compiled_blocks())
            yield

    def batch(self, size: int, seed: int = 1, padding: str | None = None) -> dict[str, Tensor]:
        """See the base class."""
        return synthetic_groot_batch.make(
            self.policy._groot_model,
            self.lengths(size, padding),
            side=sizes.by_name(self.recipe.size).image_side,
            cameras=self.recipe.cameras,
            chunk=self.recipe.chunk,
            embodiments=self.recipe.embodiments,
            device=self.device,
            seed=seed,
        )

    def autocast(self) -> Any:
        """Nothing: the policy's own forward autocasts to bf16 (use_bf16), and accelerate finds no dtype."""
        return nullcontext()

    @contextmanager
    def _compiled_blocks(self) -> Iterator[None]:
        """The blocks' forward methods compiled one by one, as a user can who knows torch.compile.

        Not `block.compile()`, which takes a module's hooks into the graph: the host hooks the last decoder
        layer anew at each call, and the graph would call the first one's hook ever after. And without the
        cache of keys and values, which no training step reads: each layer's is another graph, and only eight
        are compiled.
        """
        blocks = _blocks(self.policy)
        with _replaced([(self.policy._groot_model.backbone.language_model.config, "use_cache")], False):
            for block in blocks:
                if block not in self._compiled:
                    self._compiled[block] = torch.compile(block.forward, dynamic=False)
                vars(block)["forward"] = self._compiled[block]
            try:
                yield
            finally:
                for block in blocks:
                    del vars(block)["forward"]


def _blocks(policy: Any) -> list[nn.Module]:
    backbone, head = policy._groot_model.backbone, policy._groot_model.action_head
    dit = [*head.vl_self_attention.transformer_blocks, *head.model.transformer_blocks]
    return [*backbone.visual.blocks, *backbone.language_model.layers, *dit]


def _forget_recorders(policy: Any) -> None:
    """Take away the hooks that record outputs, which transformers puts in at the first native step, for good.

    A patched run never has them. Where another arm left them, each would break a compiled layer's graph.
    """
    for module in policy.modules():
        if vars(module).pop("_output_capturing_hooks_installed", False):
            for part in module.modules():
                frozen.drop_recorders(part._forward_hooks)


def _attention(policy: Any) -> list[tuple[Any, str]]:
    """Where the choice is kept, of vision tower and language model. The head's is SDPA whatever one sets."""
    backbone = policy._groot_model.backbone
    configs = backbone.visual.config, backbone.language_model.config, backbone.model.config
    return [(config, "_attn_implementation") for config in configs]


def _dropout(policy: Any) -> list[tuple[Any, str]]:
    """Where the head's probabilities are kept: of its modules, and of dropping a state whole."""
    head = policy._groot_model.action_head
    modules = [(module, "p") for module in head.modules() if isinstance(module, nn.Dropout)]
    return [*modules, (head, "state_dropout_prob")]


@contextmanager
def _replaced(holders: list[tuple[Any, str]], value: Any) -> Iterator[None]:
    """The attributes with another value."""
    replaced = Replaced()
    try:
        for holder, name in holders:
            replaced.put(holder, name, lambda _: value)
        yield
    finally:
        replaced.restore()


@contextmanager
def _weights_in(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """The weights in another dtype. Their own are kept on the CPU: what the device holds is measured."""
    kept = [(parameter, parameter.data.cpu()) for parameter in parameters if parameter.dtype != dtype]
    devices = [parameter.device for parameter, _ in kept]
    try:
        for parameter, _ in kept:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for (parameter, before), device in zip(kept, devices, strict=True):
            parameter.data = before.to(device)
