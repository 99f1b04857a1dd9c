"""Where the host's time in a FusedAdamW step goes: its parts, and what one look at a tensor costs.

539 small parameters with gradients that stay where they are; every figure is the median of many calls, hot in
the caches, in microseconds. A step after a synchronization, as `bench_adamw` measures it, is slower: cold.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch.optim import FusedAdamW, launch
from somaspeed_patch.optim.pending import Pending

NUM_PARAMS = 539


def host_profile(device: torch.device, num_params: int = NUM_PARAMS, repeats: int = 200) -> dict[str, Any]:
    """{"params": N, "looks_us": {...}, "parts_us": {...}, "clip_and_step_us": ...}."""
    params = [nn.Parameter(torch.zeros(8, device=device)) for _ in range(num_params)]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = FusedAdamW(params, lr=1e-5)
    step = _step(optimizer)
    step()
    step()
    whole = _median(step, repeats)
    return {
        "params": num_params,
        "looks_us": {name: _median(look, repeats) for name, look in _looks(params).items()},
        "parts_us": {name: _median(part, repeats) for name, part in _parts(optimizer).items()},
        "clip_and_step_us": whole,
    }


def _step(optimizer: FusedAdamW) -> Callable[[], None]:
    def step() -> None:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    return step


def _looks(params: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """One look at every parameter or gradient, by the fastest loop that Python has."""
    grads: list[Tensor] = [param.grad for param in params if param.grad is not None]
    return {
        "param.grad": lambda: list(map(operator.attrgetter("grad"), params)),
        "data_ptr()": lambda: list(map(Tensor.data_ptr, grads)),
        "_version": lambda: list(map(operator.attrgetter("_version"), grads)),
        "is": lambda: all(map(operator.is_, grads, grads)),
    }


def _parts(optimizer: FusedAdamW) -> dict[str, Callable[[], Any]]:
    """The parts of a clip and of a step, in their order."""
    optimizer.clip_grad_norm_(1.0)
    plan = optimizer._plan
    if plan is None:
        raise RuntimeError(f"bench_adamw_host: the kernels do not serve: {optimizer.native_reason()}")
    groups, options, params = optimizer.param_groups, optimizer.options, optimizer.parameters()
    parts, row = plan.gradients.parts, plan.gradient_row()
    pending = Pending(parts, plan.tables.shared)
    plan.bind()
    return {
        "clip: same parameters": lambda: plan.holds(params, optimizer.state, False),
        "clip: gradients": plan.refresh,
        "clip: their addresses": plan.gradient_row,
        "clip: their versions": lambda: Pending(parts, plan.tables.shared),
        "clip: three launches": lambda: launch.measure(plan, row, groups, options, 1.0, None),
        "step: same parameters and state": lambda: plan.holds(params, optimizer.state, True),
        "step: gradients": plan.refresh,
        "step: their versions": lambda: pending.holds_for(parts),
        "step: one launch": lambda: launch.update(plan, row, groups, options, True, None, None),
        "step: count the writes": lambda: torch.autograd.graph.increment_version(plan.active),
    }


def _median(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
