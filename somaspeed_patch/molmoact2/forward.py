"""The flow-matching loss of MolmoAct2, in place of `_compute_flow_matching_loss_joint_per_layer`.

Two ways: with the language model frozen, or cut off by knowledge insulation, it runs once, without gradient,
before the expert; otherwise the host's own decoder blocks run, layer by layer beside the expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from somaspeed_patch import constants, frozen, guarded, sites
from somaspeed_patch.compiled import Layers
from somaspeed_patch.layouts import stages, units
from somaspeed_patch.molmoact2 import context, expert, flow, inputs, refusals
from somaspeed_patch.molmoact2.expert import Rows

Stack = Callable[[Rows, Tensor], tuple[Tensor, Tensor | None]]
"""Runs all layers on the action rows' hidden states; also returns the language model's, if they exist."""

_layers = Layers("molmoact2/compile", dynamic=None)


def release() -> None:
    """Drop copies, compiled layers, constants and notes."""
    frozen.release()
    constants.release()
    guarded.release("molmoact2")
    _layers.clear()


def flow_loss(wrapped: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss (a scalar, or [B] with reduction="none") and the language model's last hidden states.

    The hidden states are None where the frozen way runs and `action_mode` is continuous: nobody reads them.
    """
    if torch.compiler.is_compiling():  # inside a compiled region of the user's: trace the host's own code
        return wrapped(*args, **kwargs)
    for name, stack in (("frozen_prefix", _split), ("shared_context", _joint)):
        site = sites.site(f"molmoact2/{name}")
        why = refusals.of(name, policy, kwargs)
        if why is None:
            return guarded.or_hosts(site, policy, partial(_loss, policy, stack), wrapped, args, kwargs)
        site.declined(why)
    return wrapped(*args, **kwargs)


def _loss(
    policy: Any,
    stack: Callable[[Any, Mapping[str, Tensor]], Stack],
    *,
    batch: dict[str, Tensor],
    model_inputs: dict[str, Tensor],
    timesteps: Tensor | None = None,
    noise: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor | None]:
    """The order of what draws random numbers is the host's: flow tensors, images, time embedding, layers."""
    drawn = flow.draw(policy, batch, timesteps, noise)
    run = stack(policy, model_inputs)
    rows = flow.rows(policy, batch, model_inputs, drawn)
    predicted, last_hidden = _velocity(policy, run, rows, drawn.noisy)
    return flow.loss(policy, batch, drawn, predicted, reduction), last_hidden


def _velocity(policy: Any, run: Stack, rows: Rows, noisy: Tensor) -> tuple[Tensor, Tensor | None]:
    action_expert = policy._action_expert()
    hidden = action_expert.action_embed(noisy)
    hidden, last_hidden = run(rows, hidden if rows.valid is None else hidden * rows.valid)
    found = action_expert.final_layer(hidden, rows.conditioning)
    return found if rows.valid is None else found * rows.valid, last_hidden


def velocity(policy: Any, found: context.Context, rows: Rows, noisy: Tensor) -> Tensor:
    """The expert's prediction of action - noise: [B * F, T, A] for noisy actions [B * F, T, A]."""
    return _velocity(policy, _over(policy, found), rows, noisy)[0]


def _split(policy: Any, model_inputs: Mapping[str, Tensor]) -> Stack:
    """The frozen language model now, the expert's layers when they are asked for."""
    with torch.no_grad():
        found = encode(policy, model_inputs, need_hidden=policy.config.action_mode != "continuous")
    return _over(policy, found)


def _over(policy: Any, found: context.Context) -> Stack:
    """The expert's layers over a context."""
    action_expert = policy._action_expert()
    step = partial(_expert_step, policy)

    def run(rows: Rows, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        blocks = action_expert.blocks
        with stages.apart(blocks):
            for block, key, value in zip(blocks, found.keys, found.values, strict=True):
                (hidden,) = stages.enter(block, hidden)
                if key is not None and value is not None:  # else it is on another stage
                    hidden = step(block, hidden, *expert.arguments(action_expert, key, value, rows))
        return stages.leave(blocks, hidden), found.hidden

    return run


def encode(policy: Any, model_inputs: Mapping[str, Tensor], *, need_hidden: bool) -> context.Context:
    """Vision side and language model over the host's model inputs; `need_hidden` as of `context.run`."""
    backbone = policy._backbone()
    device = model_inputs["input_ids"].device
    transformer = frozen.under_autocast(backbone.transformer, device, "molmoact2/cast_once")
    tower = frozen.under_autocast(backbone.vision_backbone, device, "molmoact2/cast_once")
    prepared = inputs.prepare(backbone, transformer, tower, model_inputs)
    return context.run(
        transformer,
        prepared.embeddings,
        prepared.position_ids,
        prepared.bias,
        need_hidden=need_hidden,
        layer_fn=_layers.of(context.language_layer),
    )


def _expert_step(policy: Any, block: Any, hidden: Tensor, *rest: Any) -> Tensor:
    """One layer of the expert, kept or recomputed in the backward as the host's configuration says."""
    step = _layers.of(expert.expert_layer)
    if policy.config.gradient_checkpointing and policy.training and torch.is_grad_enabled():
        return checkpoint(units.call, block, step, hidden, *rest, use_reentrant=False)
    return units.call(block, step, hidden, *rest)


def _joint(policy: Any, model_inputs: Mapping[str, Tensor]) -> Stack:
    """The host's decoder blocks and the expert's layers side by side, under the host's checkpointing."""
    backbone, action_expert = policy._backbone(), policy._action_expert()
    embeddings, mask, position_ids, cache_position = policy._prepare_joint_training_backbone_inputs(
        model_inputs
    )
    transformer = backbone.transformer
    rotary = context.rotary(transformer, embeddings, position_ids)
    recompute = policy.config.gradient_checkpointing and policy.training and torch.is_grad_enabled()

    def layer(index: int, rows: Rows, language: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        language, key, value = transformer.blocks[index](
            language, position_embeddings=rotary(index), attention_mask=mask, position_ids=position_ids,
            past_key_values=None, output_attentions=False, use_cache=False, cache_position=cache_position,
            collect_layer_kv_states=True,
        )  # fmt: skip
        key, value = (backbone._cache_to_sequence(states) for states in (key, value))
        if policy.config.enable_knowledge_insulation:
            key, value = key.detach(), value.detach()
        rest = expert.arguments(action_expert, key, value, rows)
        step = _layers.of(expert.expert_layer)
        return language, units.call(action_expert.blocks[index], step, actions, *rest)

    def run(rows: Rows, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        language = embeddings
        for index in range(len(action_expert.blocks)):
            if recompute:
                language, actions = checkpoint(layer, index, rows, language, actions, use_reentrant=False)
            else:
                language, actions = layer(index, rows, language, actions)
        return actions, transformer.ln_f(language)

    return run
