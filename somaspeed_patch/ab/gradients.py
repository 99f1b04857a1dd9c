"""Compare the gradients that two runs recorded at the same update, parameter by parameter.

    error   = ||arm_p - baseline_p||
    allowed = tolerance * ||baseline_p|| + 0.01 * tolerance * ||baseline||

The second term, of all gradients together, is for parameters whose gradient is mathematically zero, as that
of a key's bias under softmax: their own norm is rounding noise. Norms are sums in fp64 over pieces of a
tensor: both files are read once, and besides one tensor of each a quarter of a GB is in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "gradients.safetensors"
WHOLE = 0.01
_PIECE = 2**23  # elements; in fp64 64 MiB, of which three are alive


@dataclass(frozen=True, kw_only=True)
class GradientDifference:
    """The parameter nearest to its allowance or farthest beyond it, and what could not be compared."""

    name: str
    """of that parameter"""
    share: float
    """error / allowed; inf where a value is not finite or the shapes differ"""
    error: float
    """norm of the difference"""
    allowed: float
    """the largest norm of the difference that passes"""
    baseline_norm: float
    """of the parameter's gradient"""
    cosine: float
    """between the two gradients of the parameter"""
    missing: tuple[str, ...]
    """parameters of which only one run has a gradient"""
    parameters: int
    """number of those that both have"""

    @property
    def green(self) -> bool:
        """Every gradient is there and within its allowance."""
        return self.share <= 1 and not self.missing


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Of one parameter, over its elements."""

    baseline: float
    """of squares"""
    arm: float
    """of squares"""
    product: float
    """of products of both"""
    error: float
    """of squares of the difference"""


def compare(baseline: Path, arm: Path, tolerance: float) -> GradientDifference:
    """Judge the gradients in file `arm` by those in file `baseline`.

    Args:
        tolerance: the allowed relative difference.

    Raises: ValueError: a file is not there, or they have no parameter in common.
    """
    from safetensors import safe_open

    _check_recorded(baseline, arm)
    with safe_open(baseline, framework="pt") as theirs, safe_open(arm, framework="pt") as ours:
        names = set(theirs.keys()), set(ours.keys())
        common = sorted(names[0] & names[1])
        sums = {name: _sums(theirs.get_tensor(name), ours.get_tensor(name)) for name in common}
        alone = [_square(theirs.get_tensor(name)) for name in sorted(names[0] - names[1])]
    if not sums:
        raise ValueError(f"{arm}: has no parameter in common with {baseline}; compare runs of one model")
    # One gradient that is not finite must not become everybody's allowance.
    squares = [*alone, *(one.baseline for one in sums.values())]
    spare = WHOLE * tolerance * math.sqrt(sum(filter(math.isfinite, squares)))
    missing = tuple(sorted(names[0] ^ names[1]))
    judged = (_judged(name, one, tolerance, spare, missing, len(sums)) for name, one in sums.items())
    return max(judged, key=lambda found: found.share)


def _check_recorded(*files: Path) -> None:
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{file}: no gradients were recorded; the run's somaspeed_report.json says why, at "
                "step_recorder/record_gradients"
            )


def _judged(
    name: str, sums: _Sums, tolerance: float, spare: float, missing: tuple[str, ...], parameters: int
) -> GradientDifference:
    norm, error = math.sqrt(sums.baseline), math.sqrt(sums.error)
    allowed = tolerance * norm + spare
    share = error / allowed if allowed else 0.0 if error == 0 else math.inf
    return GradientDifference(
        name=name,
        share=share if math.isfinite(share) else math.inf,  # a NaN is not larger than anything
        error=error,
        allowed=allowed,
        baseline_norm=norm,
        cosine=_cosine(sums),
        missing=missing,
        parameters=parameters,
    )


def _cosine(sums: _Sums) -> float:
    """1 between two gradients of zero, 0 between one and another."""
    norms = math.sqrt(sums.baseline) * math.sqrt(sums.arm)
    return sums.product / norms if norms else float(sums.baseline == sums.arm)


def _sums(baseline: Any, arm: Any) -> _Sums:
    import torch

    if baseline.shape != arm.shape:
        return _Sums(baseline=_square(baseline), arm=_square(arm), product=math.nan, error=math.inf)
    total = torch.zeros(4, dtype=torch.float64)
    pieces = zip(baseline.flatten().split(_PIECE), arm.flatten().split(_PIECE), strict=True)
    for a, b in ((a.double(), b.double()) for a, b in pieces):
        error = b - a
        total += torch.stack([a.dot(a), b.dot(b), a.dot(b), error.dot(error)])
    squares = dict(zip(("baseline", "arm", "product", "error"), total.tolist(), strict=True))
    return _Sums(**squares)


def _square(gradient: Any) -> float:
    """Sum of the squares of its elements."""
    pieces = (piece.double() for piece in gradient.flatten().split(_PIECE))
    return float(sum(float(piece.dot(piece)) for piece in pieces))
