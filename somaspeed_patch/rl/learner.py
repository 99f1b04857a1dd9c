"""The learner: PPO on the trainable part of a policy and its value head, from cached features alone.

An iteration takes trajectories, makes samples of them and trains on each exactly `update_epoch` times; the
backbone is not run. The order of the samples depends on seed and iteration only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.rl import advantages, flow_sde, ppo, samples, scores
from somaspeed_patch.rl import features as cached
from somaspeed_patch.rl.features import Features
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.samples import Samples
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.trajectory import Trajectory
from somaspeed_patch.rl.value_head import ValueHead


@dataclass(frozen=True, kw_only=True)
class _Targets:
    """What the samples of an iteration are trained towards, [N] each."""

    advantages: Tensor
    proximal: Tensor | None
    """log-probability of the policy the iteration began with; None: all samples are of it"""
    behaviour: Tensor
    lag: Tensor
    """[N] int64, versions since the policy that acted"""


class Learner:
    """Owns the optimizer; policy and value head are trained in place."""

    def __init__(self, policy: FlowPolicy, value_head: ValueHead, settings: Settings) -> None:
        self.policy, self.value_head, self.settings = policy, value_head, settings
        self.version = 0
        """policies made so far; the next one is published under version + 1"""
        self.steps = 0
        """optimizer steps"""
        self.optimizer = self._optimizer()

    def _optimizer(self) -> FusedAdamW:
        """fp32 masters: one step at 5e-6 would change 8 % of bf16 weights."""
        settings = self.settings
        groups = [
            {"params": list(self.policy.trainable().values()), "lr": settings.actor_lr},
            {"params": list(self.value_head.parameters()), "lr": settings.critic_lr},
        ]
        half = any(p.dtype != torch.float32 for p in self.policy.trainable().values())
        return FusedAdamW(
            groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
            master_weights=half,
        )  # fmt: skip

    def iterate(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One PPO iteration; afterwards `version` is one more.

        Returns: metrics by CleanRL's names.
        Raises: ValueError: the features are of another backbone, or a gradient is not finite; the optimizer
            steps before it were made.
        """
        settings = self.settings
        found = samples.collate(
            trajectories, gamma=settings.gamma, lam=settings.lam, equal_weight=settings.equal_weight
        )
        targets = self._targets(found)
        updates = [
            self._update(found, targets, chosen)
            for epoch in range(settings.update_epoch)
            for chosen in self._global_batches(len(found), epoch)
        ]
        self.version += 1
        return {
            **_means(updates),
            "losses/explained_variance": ppo.explained_variance(found.values, found.returns),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/samples": float(len(found)),
            "charts/lag": float((self.version - 1 - found.version).float().mean()),
        }

    def _targets(self, found: Samples) -> _Targets:
        settings = self.settings
        gained = found.advantages
        behaviour = self._reduced(found.log_prob)
        lag = self.version - found.version
        if (lag < 0).any():
            newest = int(found.version.max())
            raise ValueError(f"learner: samples of version {newest}, but it is at {self.version}")
        stale = bool((lag > 0).any())
        recompute = stale and settings.proximal == "recompute"
        return _Targets(
            advantages=advantages.normalised(gained) if settings.normalise_advantages else gained,
            proximal=self._proximal(found) if recompute else None,
            behaviour=behaviour,
            lag=lag,
        )

    def _proximal(self, found: Samples) -> Tensor:
        """[N] on the CPU: log-probabilities under the weights the iteration begins with."""
        parts = []
        with torch.no_grad():
            for chosen in torch.split(torch.arange(len(found)), self.settings.micro_batch):
                parts.append(self._log_prob(found, chosen, self._features(found, chosen)).cpu())
        return torch.cat(parts)

    def _global_batches(self, count: int, epoch: int) -> Iterator[Tensor]:
        """Indices of the samples of each optimizer step, every sample once."""
        seed = (self.settings.seed << 40) + self.version * self.settings.update_epoch + epoch
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        yield from torch.split(order, self.settings.global_batch)

    def _update(self, found: Samples, targets: _Targets, chosen: Tensor) -> dict[str, Tensor]:
        """One optimizer step over some samples, in microbatches; what is logged of it."""
        sums: dict[str, Tensor] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for part in torch.split(chosen, self.settings.micro_batch):
            share = len(part) / len(chosen)
            for name, value in self._backward(found, targets, part, share).items():
                _add(sums, name, value.detach() * share)
        norm = self.optimizer.clip_grad_norm_(self.settings.max_grad_norm)
        if not math.isfinite(float(norm)):  # the step's only wait for the device
            raise ValueError(
                f"learner: the gradient norm of optimizer step {self.steps} is {float(norm)}; it is not made"
            )
        self.optimizer.step()
        self.steps += 1
        return {**sums, "losses/grad_norm": norm}

    def _backward(self, found: Samples, targets: _Targets, part: Tensor, share: float) -> dict[str, Tensor]:
        """Accumulate the gradients of a microbatch; what is logged of it."""
        settings, device = self.settings, self.policy.device
        encoded = self._features(found, part)
        values = self.value_head(self.policy.pooled(encoded))
        weights = found.weights[part].to(device)
        critic = ppo.value_loss(
            values, found.values[part].to(device), found.returns[part].to(device), settings.clips, weights
        )
        loss = settings.value_coefficient * critic
        metrics = {"losses/value_loss": critic}
        if self.steps >= settings.critic_warmup:
            actor = self._policy_loss(found, targets, part, encoded, weights)
            loss = loss + actor.loss
            metrics |= {
                "losses/policy_loss": actor.loss, "losses/approx_kl": actor.approx_kl,
                "losses/old_approx_kl": actor.old_approx_kl, "losses/clipfrac": actor.clipfrac,
                "losses/kept": actor.kept,
            }  # fmt: skip
        (loss * share).backward()  # type: ignore[no-untyped-call]
        return metrics

    def _policy_loss(
        self, found: Samples, targets: _Targets, part: Tensor, encoded: Features, weights: Tensor
    ) -> ppo.PolicyLoss:
        device = self.policy.device
        logp = self._log_prob(found, part, encoded)
        behaviour = targets.behaviour[part].to(device)
        old, acted = behaviour, None
        if targets.proximal is not None:
            old, acted = targets.proximal[part].to(device), behaviour
        elif bool((targets.lag > 0).any()):
            lag = targets.lag[part].to(device).view(-1, *(1,) * (logp.ndim - 1))
            old, acted = ppo.interpolated(logp, behaviour, lag), behaviour
        gained = _like(targets.advantages[part].to(device), logp)
        return ppo.policy_loss(
            logp, old, gained, self.settings.clips, weights=_like(weights, logp), logp_behaviour=acted
        )

    def _log_prob(self, found: Samples, part: Tensor, encoded: Features) -> Tensor:
        """Of some samples under the weights as they are now; differentiable."""
        device = self.policy.device
        x, x_next, k, level = (
            each[part].to(device) for each in (found.x, found.x_next, found.k, found.noise_level)
        )
        velocity = partial(self.policy.velocity, encoded)
        score = flow_sde.replay(velocity, x, x_next, k, level, self.settings.flow)
        return self._reduced(score)

    def _reduced(self, score: Tensor) -> Tensor:
        settings = self.settings
        executed = (settings.executed, self.policy.action_dim)
        return scores.reduced(score, executed, settings.level, settings.scope)

    def _features(self, found: Samples, part: Tensor) -> Features:
        records = [found.records[index] for index in part.tolist()]
        together = cached.batch(records, self.policy.tag, tokens=self.settings.tokens)
        return cached.moved(together, self.policy.device)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, value head and counters; the policy's weights are in its own checkpoint."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "value_head": self.value_head.state_dict(),
            "version": self.version,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.value_head.load_state_dict(state["value_head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.steps = state["version"], state["steps"]


def _means(updates: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Of each metric over the updates that have it: during the critic's warm-up there is no policy loss."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {
        name: float(torch.stack([update[name] for update in updates if name in update]).mean())
        for name in names
    }


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def _like(values: Tensor, target: Tensor) -> Tensor:
    """[B] as target's [B, ...]."""
    return values.view(-1, *(1,) * (target.ndim - 1)).expand(target.shape)
