"""What an arm of `bench_adamw` must show before it gets a time: errors against fp64, and checkpoints.

An error is the norm of the deviation over the norm of the truth, of a whole tensor, the largest of the
tensors of one dtype. Ours may be off by twice torch's fused AdamW plus one rounding of the dtype it stores.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch.kernels.adamw import adamw_ref
from somaspeed_patch.kernels.bench_adamw_arms import HYPER, MAX_NORM, Arm, Problem
from somaspeed_patch.optim import FusedAdamW

STEPS = 3
CHECKED = 100_000_000  # numbers: in fp64 the truth and its making take some 8 GB
QUANTITIES = ("param", "exp_avg", "exp_avg_sq")
Errors = dict[str, float]


@dataclass(kw_only=True)
class Truth:
    """fp64 results of STEPS clipped updates, of the parameters at `places`."""

    places: list[int]
    values: list[tuple[Tensor, Tensor, Tensor]]
    """New parameter, exp_avg, exp_avg_sq."""
    norms: list[float]
    """Of the gradients before each update, all parameters."""


def checked_places(params: Sequence[Tensor]) -> list[int]:
    """First and last parameter of each shape and dtype, small ones first, up to CHECKED numbers in all."""
    found: dict[Any, list[int]] = {}
    for place, param in enumerate(params):
        found.setdefault((param.shape, param.dtype), []).append(place)
    ends = sorted({place for places in found.values() for place in (places[0], places[-1])})
    kept: list[int] = []
    left = CHECKED
    for place in sorted(ends, key=lambda place: params[place].numel()):
        left -= params[place].numel()
        if left < 0 and kept:
            break
        kept.append(place)
    return sorted(kept)


@torch.no_grad()
def truth_of(problem: Problem) -> Truth:
    """The updates in fp64, from the weights and gradients as they are stored."""
    problem.fill_params()
    places = checked_places(problem.params)
    values = []
    for place in places:
        param = problem.params[place].double()
        values.append((param, torch.zeros_like(param), torch.zeros_like(param)))
    norms = []
    for step in range(1, STEPS + 1):
        problem.fill_gradients(step)
        norms.append(_norm(problem.grads))
        factor = min(1.0, MAX_NORM / (norms[-1] + 1e-6))
        for i, place in enumerate(places):
            param, exp_avg, exp_avg_sq = values[i]
            grad = problem.grads[place].double()
            values[i] = adamw_ref(param, grad, exp_avg, exp_avg_sq, step, **HYPER, factor=factor)
    return Truth(places=places, values=values, norms=norms)


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


@dataclass(kw_only=True)
class Run:
    """What STEPS updates of an arm from the start gave."""

    values: list[tuple[Tensor, Tensor, Tensor]]
    """At the truth's places; the arm's own tensors, which its next update overwrites."""
    norms: list[float]
    gradients_unchanged: bool


def run(arm: Arm, truth: Truth) -> Run:
    """STEPS updates from the start, each with gradients of its own."""
    problem, norms, unchanged = arm.problem, [], True
    arm.reset()
    for step in range(1, STEPS + 1):
        problem.fill_gradients(step)
        norms.append(float(arm.call()))
        if arm.ours:  # torch's write the clipped ones
            unchanged = unchanged and problem.gradients_are(step)
    params = [problem.params[place] for place in truth.places]
    return Run(values=values_of(arm.optimizer, params), norms=norms, gradients_unchanged=unchanged)


def values_of(
    optimizer: torch.optim.Optimizer, params: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Parameter, exp_avg and exp_avg_sq, without copying."""
    states = ((param, optimizer.state[param]) for param in params)
    return [(param.detach(), state["exp_avg"], state["exp_avg_sq"]) for param, state in states]


def errors(found: Run, truth: Truth) -> Errors:
    """The errors by quantity and parameter dtype, and that of the norm; infinite where not finite."""
    worst: Errors = {"norm": max(_relative(a, b) for a, b in zip(found.norms, truth.norms, strict=True))}
    for mine, right in zip(found.values, truth.values, strict=True):
        for name, x, y in zip(QUANTITIES, mine, right, strict=True):
            key = _key(name, mine[0])
            worst[key] = max(worst.get(key, 0.0), distance(x, y))
    return worst


def allowed(native: Errors, found: Run) -> Errors:
    """How far off an arm that stores what `found` shows may be."""
    eps = {"norm": torch.finfo(torch.float32).eps}
    for values in found.values:
        for name, value in zip(QUANTITIES, values, strict=True):
            eps[_key(name, values[0])] = torch.finfo(value.dtype).eps
    return {key: 2 * error + eps[key] for key, error in native.items()}


def distance(x: Tensor, truth: Tensor) -> float:
    """|x - truth| / |truth| in norm; infinite where not finite."""
    truth = truth.double()
    off = float((x.double() - truth).norm() / truth.norm())
    return off if math.isfinite(off) else math.inf


def _relative(x: float, truth: float) -> float:
    off = abs(x - truth) / truth
    return off if math.isfinite(off) else math.inf


def _key(quantity: str, param: Tensor) -> str:
    return f"{quantity} {str(param.dtype).removeprefix('torch.')}"


def verdict(arm: Arm, truth: Truth, native: Errors) -> tuple[Errors, Errors, list[str]]:
    """Errors, what is allowed, and what keeps an arm of ours from being timed: [] if nothing does."""
    found = run(arm, truth)
    budget, seen = allowed(native, found), errors(found, truth)
    wrong = [f"{k} off by {e:.2e}, allowed {budget[k]:.2e}" for k, e in seen.items() if not e <= budget[k]]
    if not arm.ours:
        return seen, budget, []
    if not found.gradients_unchanged:
        wrong.append("the gradients were written")
    kept = [tuple(x.clone() for x in values) for values in found.values]
    again = run(arm, truth)
    if not _same(kept, again.values) or found.norms != again.norms:
        wrong.append("two runs differ")
    return seen, budget, wrong


def _same(a: Sequence[Sequence[Tensor]], b: Sequence[Sequence[Tensor]]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) for mine, others in pairs for x, y in zip(mine, others, strict=True))


def round_trip(problem: Problem, places: Sequence[int]) -> dict[str, Any]:
    """A checkpoint of ours goes on in torch.optim.AdamW, fused, as ours does, and comes back bit for bit.

    On copies of the parameters at `places`. The update after loading is not clipped, so that torch's and ours
    differ by the rounding of one update: allowed is twice the dtype's.
    """
    ours = FusedAdamW(_copies(problem.params, places), **HYPER, fused=True)  # torch's fused step will load it
    for step in range(1, STEPS):
        _use(ours, problem, places, step)
        ours.clip_grad_norm_(MAX_NORM)
        ours.step()
    theirs = _resumed(torch.optim.AdamW, ours)
    back = _resumed(FusedAdamW, theirs)
    for optimizer in (ours, theirs, back):
        _use(optimizer, problem, places, STEPS)
        optimizer.step()
    results = [
        values_of(optimizer, optimizer.param_groups[0]["params"]) for optimizer in (ours, theirs, back)
    ]
    pairs = [pair for mine, other in zip(*results[:2], strict=True) for pair in zip(mine, other, strict=True)]
    shares = [distance(x, y) / (2 * torch.finfo(x.dtype).eps) for x, y in pairs]
    back_equal = _same(results[0], results[2])
    passed = max(shares) <= 1 and back_equal
    return {"passed": passed, "error_over_allowed": max(shares), "returns_bit_equal": back_equal}


def _copies(params: Sequence[Tensor], places: Iterable[int]) -> list[nn.Parameter]:
    return [nn.Parameter(params[place].detach().clone()) for place in places]


def _use(optimizer: torch.optim.Optimizer, problem: Problem, places: Iterable[int], step: int) -> None:
    problem.fill_gradients(step)
    for param, place in zip(optimizer.param_groups[0]["params"], places, strict=True):
        param.grad = problem.grads[place].clone()


def _resumed(kind: type[torch.optim.AdamW], before: torch.optim.Optimizer) -> torch.optim.AdamW:
    """A new optimizer over copies of the parameters, with the saved state of `before`."""
    params = before.param_groups[0]["params"]
    optimizer = kind(_copies(params, range(len(params))))
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    return optimizer
