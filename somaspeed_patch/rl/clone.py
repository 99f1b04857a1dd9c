"""Behaviour cloning of `StateFlow`: flow matching on demonstrated action chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from somaspeed_patch.rl.libero_states import Demonstration
from somaspeed_patch.rl.state_flow import StateFlow, StateNet

_LEAST_STD = 1e-2  # m, rad: what hardly moves in the demonstrations is not blown up to 1


def windows(episodes: Sequence[Demonstration], horizon: int) -> tuple[Tensor, Tensor]:
    """Every observation [N, O] with the actions from there on [N, H, A]; the last one repeats at the end."""
    observed, chunks = [], []
    for seen, done in episodes:
        padded = np.concatenate([done, np.repeat(done[-1:], horizon - 1, axis=0)])
        observed.append(seen)
        chunks.append(np.stack([padded[i : i + horizon] for i in range(len(done))]))
    return torch.from_numpy(np.concatenate(observed)), torch.from_numpy(np.concatenate(chunks))


def clone(
    episodes: Sequence[Demonstration],
    *,
    horizon: int,
    steps: int,
    width: int = 256,
    batch: int = 256,
    lr: float = 3e-3,
    seed: int = 0,
) -> tuple[StateFlow, float]:
    """A policy trained on demonstrations, and its mean loss over the last tenth of the steps."""
    torch.manual_seed(seed)
    observed, chunks = windows(episodes, horizon)
    net = StateNet(observed=observed.shape[1], horizon=horizon, actions=chunks.shape[2], width=width)
    net.mean.copy_(observed.mean(0))
    net.std.copy_(observed.std(0).clamp(min=_LEAST_STD))
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps)
    )
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(observed), (batch,))
        loss = _loss(net, (observed[chosen] - net.mean) / net.std, chunks[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return StateFlow(net), float(torch.stack(losses[-max(steps // 10, 1) :]).mean())


def _loss(net: StateNet, observed: Tensor, actions: Tensor) -> Tensor:
    """The mean squared error of the velocity at a random noise time of each sample."""
    s, noise = torch.rand(len(actions)), torch.randn_like(actions)
    mix = s[:, None, None]
    found: Tensor = net(observed, mix * noise + (1 - mix) * actions, s)
    return F.mse_loss(found, noise - actions)
