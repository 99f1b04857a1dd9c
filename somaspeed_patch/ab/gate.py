"""The parity gate: does an arm learn what the baseline learns, update by update?

For loss and gradient norm the relative difference to the baseline's first run is taken at every update, on
every rank, for every repeat; the largest decides. It must not exceed the recipe's tolerance. Noise never
widens it: where the baseline's own repeats differ by more than the tolerance, the gate is red too, because it
could not tell a wrong gradient from noise. Also red: a value that is not finite, updates missing, another
number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from somaspeed_patch.ab.recipe import Tolerance
from somaspeed_patch.ab.steps import Series, Step

QUANTITIES = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest relative difference of one quantity between two sets of runs."""

    relative: float
    """|arm - baseline| / |baseline|"""
    step: int
    """the update"""
    baseline: float
    """its value there"""
    arm: float
    """the other's"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the gate found."""

    green: bool
    """whether a speed figure may be given"""
    reasons: tuple[str, ...]
    """why not, one a line"""
    worst: dict[str, Difference]
    """per quantity, of the arm against the baseline; empty when they could not be compared"""
    noise: dict[str, Difference]
    """per quantity, between repeats of the baseline; empty with one repeat"""
    gradient: Mapping[str, Any] | None = None
    """of the parameter nearest to or beyond its allowance, at one update; None: not compared"""
    notes: tuple[str, ...] = ()
    """what could not be compared, and why"""


def judge(
    baseline: Sequence[Series],
    arm: Sequence[Series],
    *,
    steps: int,
    tolerance: Tolerance,
    names: tuple[str, str] = ("native", "patched"),
) -> Verdict:
    """Compare every run of `arm` with the first of `baseline`.

    Args:
        baseline: its runs, at least one.
        arm: its runs, at least one.
        steps: updates that each run must have.
        tolerance: the largest allowed relative differences.
        names: of baseline and arm, for the reasons.
    """
    unfit = [
        why for runs, name in ((baseline, names[0]), (arm, names[1])) for why in _unfit(runs, steps, name)
    ]
    unfit += _unlike(baseline, arm, names) if not unfit else []
    if unfit:
        return Verdict(green=False, reasons=tuple(unfit), worst={}, noise={})
    worst = {quantity: _worst(baseline[0], arm, quantity) for quantity in QUANTITIES}
    noise = {quantity: _worst(baseline[0], baseline[1:], quantity) for quantity in QUANTITIES if baseline[1:]}
    reasons = [why for quantity in QUANTITIES for why in _reasons(quantity, worst, noise, tolerance, names)]
    return Verdict(green=not reasons, reasons=tuple(reasons), worst=worst, noise=noise)


def _unfit(runs: Sequence[Series], steps: int, name: str) -> Iterator[str]:
    """Why these runs cannot be compared with anything."""
    if not runs:
        yield f"{name}: no run was finished"
    for number, run in enumerate(runs, 1):
        where = f"{name}, run {number}"
        if not run.ranks:
            yield f"{where}: no updates were recorded"
        for rank, recorded in run.ranks.items():
            yield from _incomplete(recorded, steps, f"{where}, rank {rank}")
            yield from _not_finite(recorded, f"{where}, rank {rank}")


def _incomplete(recorded: Sequence[Step], steps: int, where: str) -> Iterator[str]:
    found = [step.step for step in recorded]
    wanted = list(range(found[0], found[0] + steps))
    if found == wanted:
        return
    lacking = sorted(set(wanted) - set(found))
    detail = f"update {lacking[0]} is missing" if lacking else "updates are repeated or out of order"
    yield f"{where}: expected {steps} updates from {found[0]} on, found {len(found)}; {detail}"


def _not_finite(recorded: Sequence[Step], where: str) -> Iterator[str]:
    for quantity in QUANTITIES:
        for step in recorded:
            if not math.isfinite(getattr(step, quantity)):
                yield f"{where}: {quantity} is {getattr(step, quantity)} at update {step.step}"
                break


def _unlike(baseline: Sequence[Series], arm: Sequence[Series], names: tuple[str, str]) -> list[str]:
    """Why complete runs are still not the same work: ranks, numbering, samples."""
    reference, reasons = _shape(baseline[0]), []
    for runs, name in ((baseline, names[0]), (arm, names[1])):
        for number, run in enumerate(runs, 1):
            if _shape(run) != reference:
                reasons.append(
                    f"{name}, run {number}: its ranks, update numbers or samples are not those of the first "
                    f"run of {names[0]}; only equal batches are compared"
                )
    return reasons


def _shape(run: Series) -> dict[int, list[tuple[int, int]]]:
    return {rank: [(step.step, step.samples) for step in steps] for rank, steps in run.ranks.items()}


def _worst(reference: Series, others: Sequence[Series], quantity: str) -> Difference:
    """The largest difference over runs, ranks and updates; the earliest one of equals."""
    pairs = [
        (a, b)
        for other in others
        for rank, steps in other.ranks.items()
        for a, b in zip(reference.ranks[rank], steps, strict=True)
    ]
    differences = [_difference(getattr(a, quantity), getattr(b, quantity), a.step) for a, b in pairs]
    return max(differences, key=lambda difference: (difference.relative, -difference.step))


def _difference(baseline: float, arm: float, step: int) -> Difference:
    gap = abs(arm - baseline)
    relative = 0.0 if gap == 0 else gap / abs(baseline) if baseline else math.inf
    return Difference(relative=relative, step=step, baseline=baseline, arm=arm)


def _reasons(
    quantity: str,
    worst: dict[str, Difference],
    noise: dict[str, Difference],
    tolerance: Tolerance,
    names: tuple[str, str],
) -> Iterator[str]:
    allowed = getattr(tolerance, quantity)
    if worst[quantity].relative > allowed:
        yield _exceeds(quantity, worst[quantity], allowed, names)
    if quantity in noise and noise[quantity].relative > allowed:
        yield (
            _exceeds(quantity, noise[quantity], allowed, (names[0], f"{names[0]} again"))
            + "; the baseline does not repeat itself, so nothing can be said: make it deterministic, or set "
            f"tolerance.{quantity} knowingly"
        )


def _exceeds(quantity: str, found: Difference, allowed: float, names: tuple[str, str]) -> str:
    return (
        f"{quantity} differs by {found.relative:.3g} relative, allowed {allowed:.3g}, at update "
        f"{found.step}: {names[0]} {found.baseline!r}, {names[1]} {found.arm!r}"
    )
