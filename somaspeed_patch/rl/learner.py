"""The learner: PPO on the trainable part of a policy and its value head, from cached features alone.

An iteration takes trajectories, makes samples of them and trains on each exactly `update_epoch` times; the
backbone is not run. The order of the samples depends on seed and iteration only. Several ranks, each with its
own trajectories, are one learner: see `ranks`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.rl import advantages, ppo, ranks, samples, spread
from somaspeed_patch.rl.features import Features
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.graphs import Graphed
from somaspeed_patch.rl.minibatch import Minibatch, Targets
from somaspeed_patch.rl.objective import Objective
from somaspeed_patch.rl.ranks import Part, Ranks, Union
from somaspeed_patch.rl.samples import Samples
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.stores import HostStore, Store
from somaspeed_patch.rl.trajectory import Trajectory
from somaspeed_patch.rl.value_head import ValueHead

log = logging.getLogger(__name__)


class Learner:
    """Owns the optimizer; policy and value head are trained in place."""

    def __init__(
        self,
        policy: FlowPolicy,
        value_head: ValueHead,
        settings: Settings,
        *,
        store: Store | None = None,
        graphs: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        """Take what trains.

        Args:
            store: where features wait; None: on the host.
            graphs: replay CUDA graphs of forward and backward; nothing on a CPU, nor of a sharded policy.
            ranks: those that train it together, over which `spread` has laid it; None: this process alone.
        """
        self.ranks = ranks or Ranks()
        self.policy, self.value_head, self.settings = policy, value_head, settings
        self.store = store or HostStore(policy)
        self.version = 0
        """policies made so far; the next one is published under version + 1"""
        self.steps = 0
        """optimizer steps"""
        self.optimizer = self._optimizer()
        self._objective = Objective(policy, value_head, settings)
        self._trained = [*policy.trainable().values(), *value_head.parameters()]
        self._graphed = graphs and policy.device.type == "cuda" and not self.ranks.sharded
        self._replayed = Graphed(self._objective.backward, self._trained, "learner", gradients=True)
        if graphs and policy.device.type == "cuda" and self.ranks.sharded and self.ranks.leads:
            log.info("rl: the learner runs without CUDA graphs: its weights are sharded")

    @property
    def replays(self) -> int:
        """Microbatches that were replays of a CUDA graph."""
        return self._replayed.replays

    def _optimizer(self) -> FusedAdamW:
        """fp32 masters: one step at 5e-6 would change 8 % of bf16 weights."""
        settings = self.settings
        trained = (self.policy.trainable().values(), self.value_head.parameters())
        groups = [
            {"params": list(params), "lr": rate} for params, rate in zip(trained, self._rates(), strict=True)
        ]
        half = any(p.dtype != torch.float32 for p in self.policy.trainable().values())
        return FusedAdamW(
            groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
            master_weights=half,
        )  # fmt: skip

    def iterate(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One PPO iteration; afterwards `version` is one more. All ranks call it, each with its trajectories.

        Returns: metrics by CleanRL's names, of all ranks' samples.
        Raises: ValueError: the features are of another backbone, or a gradient is not finite; the optimizer
            steps before it were made.
        """
        settings = self.settings
        found = samples.collate(
            trajectories, gamma=settings.gamma, lam=settings.lam, equal_weight=settings.equal_weight
        )
        every = ranks.union(self.ranks, found, equal_weight=settings.equal_weight)
        self._set_rates()
        targets = self._targets(found, every)
        updates = list(self._updates(found, targets, every))
        self.version += 1
        return {
            **ranks.mean(self.ranks, _means(updates)),
            "losses/explained_variance": ppo.explained_variance(every.values, every.returns),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/samples": float(len(every)),
            "charts/lag": float((self.version - 1 - every.version).float().mean()),
        }

    def _set_rates(self) -> None:
        share = self.settings.rate(self.version)
        for group, rate in zip(self.optimizer.param_groups, self._rates(), strict=True):
            group["lr"] = rate * share

    def _rates(self) -> tuple[float, float]:
        return self.settings.actor_lr, self.settings.critic_lr

    def _targets(self, found: Samples, every: Union) -> Targets:
        settings = self.settings
        lag = self.version - every.version
        if (lag < 0).any():
            newest = int(every.version.max())
            raise ValueError(f"learner: samples of version {newest}, but it is at {self.version}")
        gained, stale, mine = every.advantages, bool((lag > 0).any()), every.mine
        targets = Targets(
            x=found.x, x_next=found.x_next, k=found.k, noise_level=found.noise_level,
            behaviour=self._objective.reduced(found.log_prob), proximal=None,
            lag=lag[mine] if stale and settings.proximal == "interpolate" else None,
            advantages=(advantages.normalised(gained) if settings.normalise_advantages else gained)[mine],
            values=found.values, returns=found.returns, weights=every.weights[mine],
        ).to(self.policy.device)  # fmt: skip
        recompute = stale and settings.proximal == "recompute"
        return replace(targets, proximal=self._proximal(found, targets, every)) if recompute else targets

    @torch.no_grad()
    def _proximal(self, found: Samples, targets: Targets, every: Union) -> Tensor:
        """[N, ...] log-probabilities under the weights the iteration begins with."""
        parts = [*torch.split(torch.arange(len(found)), self.settings.micro_batch)]
        parts += [torch.arange(1)] * (every.rounds(self.settings.micro_batch) - len(parts))  # others wait
        encoded = self._features(found, parts)
        scores = [
            self._objective.log_prob(each, targets.rows(rows))
            for rows, each in zip(self._there(parts), encoded, strict=True)
        ]
        return torch.cat(scores)[: len(found)]

    def _updates(self, found: Samples, targets: Targets, every: Union) -> Iterator[dict[str, Tensor]]:
        """Every optimizer step of an iteration; what is logged of each."""
        steps = [parts for epoch in range(self.settings.update_epoch) for parts in self._steps(every, epoch)]
        batches = self._batches(found, targets, [part for parts in steps for part in parts])
        for parts in steps:
            yield self._update(itertools.islice(batches, len(parts)))

    def _batches(self, found: Samples, targets: Targets, parts: Sequence[Part]) -> Iterator[Minibatch]:
        """The microbatches of an iteration."""
        chosen = [part.index for part in parts]
        shares = torch.tensor([part.share for part in parts], device=self.policy.device)
        encoded = self._features(found, chosen)
        for rows, share, seen in zip(self._there(chosen), shares, encoded, strict=True):
            yield Minibatch(encoded=seen, targets=targets.rows(rows), share=share)

    def _there(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Indices on the device, sent in one copy: each copy waits for what was computed before."""
        return torch.split(torch.cat(list(parts)).to(self.policy.device), [len(part) for part in parts])

    def _steps(self, every: Union, epoch: int) -> Iterator[list[Part]]:
        """Microbatches of each optimizer step of an epoch, every sample once."""
        seed = (self.settings.seed << 40) + self.version * self.settings.update_epoch + epoch
        count = every.counts[every.rank]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        yield from ranks.dealt(order, every.counts, every.rank, self.settings)

    def _update(self, batches: Iterable[Minibatch]) -> dict[str, Tensor]:
        """One optimizer step over microbatches; what is logged of it."""
        sums: dict[str, Tensor] = {}
        self._zero_grad()
        for batch in batches:
            for name, value in self._backward(batch).items():
                _add(sums, name, value * batch.share)
        self.ranks.average(self._trained)
        norm = self.optimizer.clip_grad_norm_(self.settings.max_grad_norm)
        if not math.isfinite(float(norm)):  # the step's only wait for the device
            raise ValueError(
                f"learner: the gradient norm of optimizer step {self.steps} is {float(norm)}; it is not made"
            )
        self.optimizer.step()
        self.steps += 1
        return {**sums, "losses/grad_norm": norm}

    def _backward(self, batch: Minibatch) -> dict[str, Tensor]:
        """Accumulate the gradients of a microbatch; what is logged of it."""
        if self.steps < self.settings.critic_warmup:
            return self._objective.backward(batch.tensors(), actor=False)
        return (self._replayed if self._graphed else self._objective.backward)(batch.tensors())

    def _zero_grad(self) -> None:
        """A graph adds to the gradients where they lay when it was recorded."""
        warm = self.steps >= self.settings.critic_warmup
        self.optimizer.zero_grad(set_to_none=not (self._graphed and warm))

    def _features(self, found: Samples, parts: Iterable[Tensor]) -> Iterator[Features]:
        """Of one part after the other."""
        kept = ([found.records[index] for index in part.tolist()] for part in parts)
        return self.store.ahead(kept, self.policy.tag, self.settings.tokens)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, value head and counters; the policy's weights are in its own checkpoint.

        As one process has it, whatever the layout. Where weights are sharded all ranks call this, and rank 0
        has it.
        """
        state = {
            "optimizer": self.optimizer.state_dict(),
            "value_head": self.value_head.state_dict(),
            "version": self.version,
            "steps": self.steps,
        }
        return spread.whole_state(state, keep=self.ranks.leads) if self.ranks.sharded else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, under this layout or another one."""
        critic = self.value_head.state_dict()
        self.value_head.load_state_dict(
            {name: spread.like(each, critic.get(name)) for name, each in state["value_head"].items()}
        )
        self.optimizer.load_state_dict(spread.state_like(state["optimizer"], self.optimizer))
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
