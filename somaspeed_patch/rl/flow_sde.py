"""One step of a flow policy, deterministic or with noise, and the log-probability of where it went.

Noise time s runs from 1 (noise) to 0 (action) in K steps of 1/K; step k starts at s_k = 1 - k/K. v is the
velocity towards noise (noise - action), x the latent action chunk. Symbols of shapes: B samples, H horizon,
A padded action dimension.

    sde:  sigma^2 = a^2 s/(1-s), of the first step a^2 K;  std = sigma/sqrt(K)
          mean = x - v/K - sigma^2/(2 s K) * (x + (1-s) v)
    cps:  mean = (x - s v)(1 - s') + (x + (1-s) v) s' cos(pi a/2);  std = s' sin(pi a/2)

With a = 0 both give the Euler step, `sde` bit for bit; only `cps` keeps the variance of the flow exactly, but
its last step has no noise. Coefficients are computed in doubles and rounded once to x's dtype.
Source: Flow-GRPO, arXiv:2505.05470; CPS, arXiv:2509.05952.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sde", "cps"]
_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How a policy's action chunk is sampled."""

    steps: int
    """K, network evaluations a chunk"""
    noise_level: float
    """a; 0: the ordinary differential equation"""
    kind: Kind = "sde"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"flow: steps must be at least 1, but is {self.steps}")
        if not 0 <= self.noise_level < math.inf:
            raise ValueError(f"flow: noise_level must be 0 or more, but is {self.noise_level}")
        if self.kind not in ("sde", "cps"):
            raise ValueError(f"flow: kind must be sde or cps, but is {self.kind!r}")


def time(steps: int, k: int) -> float:
    """s_k as LeRobot's `euler_integrate` computes it, in doubles."""
    return 1.0 + k * (-1.0 / steps)


@cache
def times(steps: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """[K], s_k of each step; one tensor for all, because a CUDA graph cannot record its way to the GPU."""
    return torch.tensor([time(steps, k) for k in range(steps)], dtype=dtype, device=device)


def step(
    x: Tensor,
    velocity: Tensor,
    k: Tensor,
    noise_level: Tensor,
    *,
    steps: int,
    kind: Kind = "sde",
) -> tuple[Tensor, Tensor]:
    """Where a step leads: the mean of the next latent and its standard deviation.

    Args:
        x: [B, H, A] fp32 or fp64.
        velocity: [B, H, A], towards noise, differentiable.
        k: [B] int64, the step of each sample, 0 to steps - 1.
        noise_level: [B] fp32, a of each sample.
    Returns: mean [B, H, A] in x's dtype and std [B, 1, 1], 0 where the step is deterministic.
    Raises: ValueError: x is not fp32 or fp64; a late step's log-ratio magnifies an error of v by up to 3.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"flow step: x must be float32 or float64, but is {x.dtype}")
    column = (-1, *(1,) * (x.ndim - 1))
    level = noise_level.to(x.dtype).view(column)
    return _KINDS[kind](x, velocity.to(x.dtype), k, level, column, steps)


def _sde(
    x: Tensor, velocity: Tensor, k: Tensor, level: Tensor, column: tuple[int, ...], steps: int
) -> tuple[Tensor, Tensor]:
    remaining, drift, spread = (each[k].view(column) for each in _sde_table(steps, x.device, x.dtype))
    squared = level * level
    mean = x - (1.0 / steps) * velocity - squared * drift * (x + remaining * velocity)
    return mean, level * spread


@cache
def _sde_table(steps: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """[K] each: 1 - s; sigma^2 / (2 s K) and std where a is 1."""
    at = [(time(steps, k), k) for k in range(steps)]
    variance = [float(steps) if k == 0 else s / (1 - s) for s, k in at]
    rows = (
        [1 - s for s, _ in at],
        [each / (2 * s * steps) for each, (s, _) in zip(variance, at, strict=True)],
        [math.sqrt(each / steps) for each in variance],
    )
    one, two, three = (torch.tensor(row, dtype=dtype, device=device) for row in rows)
    return one, two, three


def _cps(
    x: Tensor, velocity: Tensor, k: Tensor, level: Tensor, column: tuple[int, ...], steps: int
) -> tuple[Tensor, Tensor]:
    """The predicted action and noise, mixed anew for the end of the step, s'."""
    now, then = (each[k].view(column) for each in _cps_table(steps, x.device, x.dtype))
    action, noise = x - now * velocity, x + (1 - now) * velocity
    angle = level * (math.pi / 2)
    return action * (1 - then) + noise * (then * torch.cos(angle)), then * torch.sin(angle)


@cache
def _cps_table(steps: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[K] each: s, and s' after the step."""
    now = [time(steps, k) for k in range(steps)]
    then = [*now[1:], 0.0]
    return (
        torch.tensor(now, dtype=dtype, device=device),
        torch.tensor(then, dtype=dtype, device=device),
    )


_KINDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"sde": _sde, "cps": _cps}


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density [B, H, A] of each number of x_next under N(mean, std^2); 0 where std is 0.

    Args:
        x_next, mean: [B, H, A].
        std: broadcasts to them.
    """
    certain = std == 0
    safe = torch.where(certain, torch.ones_like(std), std)
    distance = (x_next - mean) / safe
    found = -torch.log(safe) - 0.5 * _LOG_2PI - 0.5 * distance * distance
    return torch.where(certain, torch.zeros_like(found), found)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """All that is random in a sampled chunk."""

    noise: Tensor
    """[B, H, A] fp32, the first latent"""
    step_noise: Tensor
    """[B, H, A] fp32, of the stochastic step"""
    k: Tensor
    """[B] int64, that step; below 0: no step of this sample has noise"""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Draws:
        """Each tensor changed."""
        return Draws(noise=change(self.noise), step_noise=change(self.step_noise), k=change(self.k))

    def to(self, device: torch.device) -> Draws:
        """The same on another device."""
        return self.mapped(lambda each: each.to(device))


def draw(
    count: int,
    shape: tuple[int, int],
    flow: Flow,
    generator: torch.Generator,
    *,
    shared: bool = False,
    ignore_last: bool = False,
) -> Draws:
    """What `count` chunks of [H, A] need, on the generator's device.

    Args:
        shared: one stochastic step for all samples, as RLinf draws it.
        ignore_last: never the last step, whose noise lands on the executed action itself.
    Raises: ValueError: the last of one step is to be ignored.
    """
    choices = flow.steps - ignore_last
    if choices < 1:
        raise ValueError("flow: ignore_last leaves no step to choose of steps = 1")
    device = generator.device
    k = torch.randint(choices, (1,) if shared else (count,), generator=generator, device=device)
    noise, step_noise = (
        torch.randn(count, *shape, generator=generator, device=device) for _ in ("noise", "step noise")
    )
    return Draws(noise=noise, step_noise=step_noise, k=k.expand(count).contiguous())


def side_by_side(draws: Sequence[Draws]) -> Draws:
    """Those of several samples as one batch."""
    noise, step_noise, k = (
        torch.cat([getattr(each, name) for each in draws]) for name in ("noise", "step_noise", "k")
    )
    return Draws(noise=noise, step_noise=step_noise, k=k)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sampled chunk, and the one stochastic step that the learner replays."""

    action: Tensor
    """[B, H, A], the last latent"""
    k: Tensor
    """[B] int64"""
    noise_level: Tensor
    """[B] fp32"""
    x: Tensor
    """[B, H, A] fp32, the latent before step k"""
    x_next: Tensor
    """[B, H, A] fp32, and after it"""
    log_prob: Tensor
    """[B, H, A] fp32, of x_next"""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """Each tensor changed."""
        return Sample(**{each.name: change(getattr(self, each.name)) for each in fields(self)})


def sample(
    velocity: Callable[[Tensor, Tensor], Tensor], draws: Draws, flow: Flow, keep: Tensor | None = None
) -> Sample:
    """Integrate from noise to action, deterministic but for step k of each sample.

    Args:
        velocity: v(x [B, H, A], s [B] fp32) -> [B, H, A].
        keep: [B, 1, A] fp32, 0 for dimensions that are padding and stay 0; None: all are real.
    """
    if draws.noise.dtype != torch.float32:
        raise ValueError(f"flow sample: noise must be float32, but is {draws.noise.dtype}")
    k, x, step_noise = draws.k, draws.noise, draws.step_noise
    if keep is not None:
        x, step_noise = x * keep, step_noise * keep
    before, after, score = x, x, torch.zeros_like(x)
    at = times(flow.steps, x.device)
    for number in range(flow.steps):
        chosen = k == number
        level = torch.where(chosen, flow.noise_level, 0.0).to(torch.float32)
        found = velocity(x, at[number].expand(len(x)))
        mean, std = step(x, found, torch.full_like(k, number), level, steps=flow.steps, kind=flow.kind)
        new = torch.addcmul(mean, std, step_noise)
        here = chosen.view(-1, *(1,) * (x.ndim - 1))
        before, after = torch.where(here, x, before), torch.where(here, new, after)
        score = torch.where(here, log_prob(new, mean, std), score)
        x = new
    level = torch.where(k < 0, 0.0, flow.noise_level).to(torch.float32)
    return Sample(action=x, k=k, noise_level=level, x=before, x_next=after, log_prob=score)


def replay(
    velocity: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    x_next: Tensor,
    k: Tensor,
    noise_level: Tensor,
    flow: Flow,
) -> Tensor:
    """Log-probability [B, H, A] of the stochastic step of `sample`, under the weights as they are now.

    Differentiable in what `velocity` computes. A noise level is a sample's own.
    """
    at = times(flow.steps, x.device)
    mean, std = step(x, velocity(x, at[k]), k, noise_level, steps=flow.steps, kind=flow.kind)
    return log_prob(x_next, mean, std)
