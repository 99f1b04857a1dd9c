"""What the learner minimises on a minibatch: PPO's policy and value losses, from cached features."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from somaspeed_patch.rl import flow_sde, ppo, scores
from somaspeed_patch.rl.features import Features
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.minibatch import Minibatch, Targets
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.value_head import ValueHead


class Objective:
    """Of a policy and critic; computes on the policy's device and waits for nothing."""

    def __init__(self, policy: FlowPolicy, value_head: ValueHead, settings: Settings) -> None:
        self.policy, self.value_head, self.settings = policy, value_head, settings

    def backward(self, tensors: Mapping[str, Tensor], *, actor: bool = True) -> dict[str, Tensor]:
        """Add the gradients of a minibatch; what is logged of it, 0-dim each.

        Args:
            tensors: of `Minibatch.tensors`.
            actor: with the policy's loss; else the critic's alone.
        """
        batch = Minibatch.of(tensors)
        targets = batch.targets
        values = self.value_head(self.policy.pooled(batch.encoded))
        critic = ppo.value_loss(values, targets.values, targets.returns, self.settings.clips, targets.weights)
        loss, metrics = self.settings.value_coefficient * critic, {"losses/value_loss": critic.detach()}
        if actor:
            found = self._policy_loss(batch)
            loss = loss + found.loss
            metrics |= _logged(found)
        (loss * batch.share).backward()  # type: ignore[no-untyped-call]
        return metrics

    def log_prob(self, encoded: Features, targets: Targets) -> Tensor:
        """Of some samples under the weights as they are now, reduced; differentiable."""
        score = flow_sde.replay(
            partial(self.policy.velocity, encoded), targets.x, targets.x_next, targets.k,
            targets.noise_level, self.settings.flow,
        )  # fmt: skip
        return self.reduced(score)

    def reduced(self, score: Tensor) -> Tensor:
        """See `scores.reduced`."""
        settings = self.settings
        executed = (settings.executed, self.policy.action_dim)
        return scores.reduced(score, executed, settings.level, settings.scope)

    def _policy_loss(self, batch: Minibatch) -> ppo.PolicyLoss:
        targets = batch.targets
        logp = self.log_prob(batch.encoded, targets)
        old, acted = targets.behaviour, None
        if targets.proximal is not None:
            old, acted = targets.proximal, targets.behaviour
        elif targets.lag is not None:
            lag = targets.lag.view(-1, *(1,) * (logp.ndim - 1))
            old, acted = ppo.interpolated(logp, targets.behaviour, lag), targets.behaviour
        return ppo.policy_loss(
            logp, old, _like(targets.advantages, logp), self.settings.clips,
            weights=_like(targets.weights, logp), logp_behaviour=acted,
        )  # fmt: skip


def _logged(found: ppo.PolicyLoss) -> dict[str, Tensor]:
    return {
        "losses/policy_loss": found.loss.detach(), "losses/approx_kl": found.approx_kl,
        "losses/old_approx_kl": found.old_approx_kl, "losses/clipfrac": found.clipfrac,
        "losses/kept": found.kept,
    }  # fmt: skip


def _like(values: Tensor, target: Tensor) -> Tensor:
    """[B] as target's [B, ...]."""
    return values.view(-1, *(1,) * (target.ndim - 1)).expand(target.shape)
