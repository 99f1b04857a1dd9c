"""PPO's losses, with the names that CleanRL logs.

N units (chunks, or finer) of a batch. r = pi / pi_old. Decoupled, for samples of an older policy:
r = pi / pi_proximal is clipped and weighed by w = pi_proximal / pi_behaviour, so that clipping stays around
the policy the update began with. Sources: Schulman et al., arXiv:1707.06347; dual clip, arXiv:1912.09729;
decoupled, Hilton et al., arXiv:2110.00641.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Where the losses stop."""

    low: float = 0.2
    """r is held above 1 - low"""
    high: float = 0.2
    """and below 1 + high"""
    dual: float | None = 3.0
    """loss of a negative advantage at most this times its size; None: no bound"""
    value: float | None = 0.2
    """the value moves at most this far from the old one; None: freely"""
    huber: float = 10.0
    """errors of the value beyond it count linearly"""
    behaviour: float | None = 5.0
    """decoupled: samples with w above it are left out; None: none are"""

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0):
            raise ValueError(f"ppo: clips need 0 <= low < 1 and high >= 0, but are {self.low}, {self.high}")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"ppo: dual must be above 1, but is {self.dual}")


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A differentiable loss and what is logged of it, all 0-dim tensors."""

    loss: Tensor
    approx_kl: Tensor
    old_approx_kl: Tensor
    clipfrac: Tensor
    kept: Tensor
    """share of samples that were not left out by the behaviour threshold"""


def surrogate(log_ratio: Tensor, advantages: Tensor, clips: Clips) -> Tensor:
    """The clipped loss of each unit, to be minimised: [N].

    Args:
        log_ratio: [N] fp32, log pi / pi_old, differentiable.
        advantages: [N] fp32.
    """
    ratio = log_ratio.exp()
    found = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clips.low, 1 + clips.high))
    if clips.dual is None:
        return found
    return torch.where(advantages < 0, torch.minimum(found, -advantages * clips.dual), found)


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    clips: Clips,
    *,
    weights: Tensor | None = None,
    logp_behaviour: Tensor | None = None,
) -> PolicyLoss:
    """The loss of a batch.

    Args:
        logp: [N] fp32 or fp64, under the weights as they are now, differentiable.
        logp_old: [N], of the policy that clipping is around: the one that acted, or the proximal one.
        advantages: [N].
        weights: [N] with mean 1 over the whole rollout, see `trajectory_weights`; None: all count alike.
        logp_behaviour: [N], of the policy that acted, where that is not `logp_old`: decoupled.
    Raises: ValueError: shapes differ, or log-probabilities are in half precision.
    """
    _check(logp, logp_old, advantages)
    log_ratio = logp - logp_old
    losses = surrogate(log_ratio, advantages, clips)
    kept = torch.ones_like(losses)
    if logp_behaviour is not None:
        losses, kept = _decoupled(losses, logp_old - logp_behaviour, clips)
    if weights is not None:
        losses = losses * weights
    with torch.no_grad():
        ratio = log_ratio.exp()
        clipped = (ratio < 1 - clips.low) | (ratio > 1 + clips.high)
    return PolicyLoss(
        loss=losses.sum() / kept.sum().clamp(min=1),
        approx_kl=((ratio - 1) - log_ratio.detach()).mean(),
        old_approx_kl=-log_ratio.detach().mean(),
        clipfrac=clipped.to(logp.dtype).mean(),
        kept=kept.mean(),
    )


def _decoupled(losses: Tensor, log_weight: Tensor, clips: Clips) -> tuple[Tensor, Tensor]:
    """Each loss times its w, and which of them count."""
    log_weight = log_weight.detach()
    kept = torch.ones_like(log_weight, dtype=torch.bool)
    if clips.behaviour is not None:
        kept = log_weight <= math.log(clips.behaviour)
    # what is left out weighs exp(-inf) = 0: an infinite w would make NaN of the mask's 0
    weight = torch.where(kept, log_weight, -math.inf).exp()
    return losses * weight, kept.to(losses.dtype)


def interpolated(logp: Tensor, logp_behaviour: Tensor, lag: Tensor) -> Tensor:
    """[N] without gradient: RLinf's stand-in for the proximal policy's log-probability.

    Args:
        lag: [N] int64, versions between the policy that acted and the newest; 0: it is the newest.
    """
    share = (lag / (lag + 1)).to(logp.dtype)
    return logp_behaviour + share * (logp - logp_behaviour).detach()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clips: Clips, weights: Tensor | None = None
) -> Tensor:
    """0-dim: the larger of the errors with and without the clip, as Huber's loss.

    Args:
        values: [N] fp32, differentiable.
        old_values: [N], of the critic that was there at the rollout.
        returns: [N].
    """
    losses = _huber(values, returns, clips.huber)
    if clips.value is not None:
        near = old_values + (values - old_values).clamp(-clips.value, clips.value)
        losses = torch.maximum(losses, _huber(near, returns, clips.huber))
    return (losses if weights is None else losses * weights).mean()


def _huber(values: Tensor, returns: Tensor, delta: float) -> Tensor:
    return F.huber_loss(values, returns, reduction="none", delta=delta)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over a whole rollout; NaN where the returns are all alike.

    Not to be averaged over minibatches: a minibatch's returns vary less than all.
    """
    spread = returns.double().var(correction=0)
    if not spread > 0:
        return float("nan")
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread)


def _check(logp: Tensor, logp_old: Tensor, advantages: Tensor) -> None:
    if not logp.shape == logp_old.shape == advantages.shape:
        shapes = [tuple(each.shape) for each in (logp, logp_old, advantages)]
        raise ValueError(f"ppo: logp, logp_old and advantages must have one shape, but are {shapes}")
    if logp.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"ppo: logp must be float32 or float64, but is {logp.dtype}")
