"""Flow matching around the action expert: what is drawn, the masks of its rows, the loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from somaspeed_patch import constants, facts
from somaspeed_patch.cpu_threads import one_thread
from somaspeed_patch.guarded import Declined
from somaspeed_patch.molmoact2.expert import Rows
from somaspeed_patch.molmoact2.inputs import all_ones

HOST = "lerobot.policies.molmoact2.modeling_molmoact2"
_HORIZON = "action_horizon_is_pad"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """B samples, F timesteps, T actions of A numbers."""

    actions: Tensor
    """[B, T, A]"""
    timesteps: Tensor
    """[B, F]"""
    noisy: Tensor
    """[B * F, T, A]"""
    velocity: Tensor
    """[B, F, T, A], the target"""


def draw(policy: Any, batch: Mapping[str, Tensor], timesteps: Tensor | None, noise: Tensor | None) -> Drawn:
    """Times and noise, by the host's own function."""
    actions, times, noisy, velocity = policy._prepare_flow_matching_tensors(
        actions=batch["action"],
        action_dim_is_pad=batch.get("action_dim_is_pad"),
        timesteps=timesteps,
        noise=noise,
    )
    return Drawn(actions=actions, timesteps=times, noisy=noisy.flatten(0, 1), velocity=velocity)


def rows(policy: Any, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor], drawn: Drawn) -> Rows:
    """Conditioning and masks of the action rows; a mask that is all ones is left out."""
    expert, actions = policy._action_expert(), drawn.actions
    if len(inputs["input_ids"]) != len(actions):
        raise Declined("the prompts and the actions differ in batch size")
    real, timesteps = _real_actions(batch, actions), drawn.timesteps.shape[1]
    self_mask = expert._build_self_attention_mask(real, actions.shape[1], actions.device, actions.dtype)
    return Rows(
        timesteps=timesteps,
        conditioning=policy._action_time_conditioning(expert, drawn.timesteps.flatten()),
        rotary=rotary(expert, actions),
        self_mask=_repeated(self_mask, timesteps),
        cross_mask=_cross_mask(policy, expert, inputs, actions),
        valid=None if real is None else _repeated(real.to(actions.dtype).unsqueeze(-1), timesteps),
    )


def loss(policy: Any, batch: Mapping[str, Tensor], drawn: Drawn, velocity: Tensor, reduction: str) -> Tensor:
    """Mean squared error of the velocity over real actions: a scalar, or [B] with reduction "none"."""
    host = sys.modules[HOST]
    error = F.mse_loss(velocity.view_as(drawn.velocity), drawn.velocity, reduction="none")
    error = host._apply_action_chunk_padding_mask(error, batch.get(_HORIZON))
    if policy.config.mask_action_dim_padding:
        error = host._apply_action_dim_padding_mask(error, batch.get("action_dim_is_pad"))
    error = error.reshape(len(drawn.actions), -1).mean(dim=1)
    return error.mean() if reduction == "mean" else error


def _real_actions(batch: Mapping[str, Tensor], actions: Tensor) -> Tensor | None:
    """[B, T] bool, or None where all actions are known to be real."""
    padded = batch.get(_HORIZON)
    if padded is None or (facts.has_twin(padded) and not bool(facts.on_cpu(padded).any())):
        return None
    return ~padded.to(device=actions.device, dtype=torch.bool)


def _cross_mask(policy: Any, expert: Any, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor | None:
    """[B, 1, 1, S] for the context's tokens that the expert may read, or None where those are all.

    The host's function reads numbers back for every sample, so it gets the CPU's twins where there are any.
    """
    ids, given = inputs["input_ids"], inputs.get("attention_mask")
    known = facts.has_twin(ids) and (given is None or facts.has_twin(given))
    if known:
        ids, given = facts.on_cpu(ids), None if given is None else facts.on_cpu(given)
    with one_thread():
        mask = policy._encoder_attention_mask_for_action_expert(input_ids=ids, attention_mask=given)
    if all_ones(mask):
        return None
    mask = constants.on(actions.device, mask) if known else mask
    return expert._build_cross_attention_mask(mask, len(actions), actions.dtype)


def rotary(expert: Any, actions: Tensor) -> tuple[Tensor, Tensor] | None:
    """cos and sin of the action rows of `Rows`, for actions [B, T, A]; None where the expert has none."""
    rope = expert.blocks[0].self_attn.rope if len(expert.blocks) else None
    if rope is None:
        return None
    return rope.build_cache(seq_len=actions.shape[1], device=actions.device, dtype=actions.dtype)


def _repeated(mask: Tensor | None, timesteps: int) -> Tensor | None:
    """A mask of the samples for each of their timesteps' rows."""
    return None if mask is None else sys.modules[HOST]._expand_mask(mask, timesteps)
