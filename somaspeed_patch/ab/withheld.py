"""Why no claim may be made of a cell, in words: what a sceptic would hold against its speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LOADER_COST = 0.1  # an arm that is faster by more than this part on cached batches is loader-bound
LOADER_SHARE = 0.5  # data and preprocess above this part of the step: the loader decides the speed
_RECORDER = "step_recorder"  # in native arms too; what it cannot look at changes nothing


def reasons(
    *,
    native: bool,
    verdict: Mapping[str, Any] | None,
    losses: Sequence[float],
    sites: Sequence[Mapping[str, Any]],
    phases: Mapping[str, float],
    loader: Mapping[str, Any] | None,
) -> list[str]:
    """All of them, [] for a cell that may be spoken of.

    Args:
        native: nothing of ours is switched on.
        verdict: of the parity gate, None where it was not asked.
        losses: of its updates.
        sites: of the report: calls, native_calls and fallbacks of each.
        phases: median seconds.
        loader: speed with the real loader and with cached batches, None where unknown.
    """
    found = [*_gate(verdict), *_not_finite(losses), *_fallbacks(sites)]
    found += [] if native else list(_nothing_ran(sites))
    return [*found, *_loader(phases, loader)]


def _gate(verdict: Mapping[str, Any] | None) -> Iterator[str]:
    if verdict is not None and not verdict["green"]:
        yield f"the parity gate is red: {verdict['reasons'][0]}"


def _not_finite(losses: Sequence[float]) -> Iterator[str]:
    wrong = [(number, loss) for number, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    if wrong:
        yield f"the loss is {wrong[0][1]} at update {wrong[0][0]}"


def _ours(sites: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [site for site in sites if site["site"].partition("/")[0] != _RECORDER]


def _fallbacks(sites: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for site in _ours(sites):
        if site["fallbacks"]:
            why = site.get("last_fallback") or "see the report"
            yield f"{site['site']} fell back to the host {site['fallbacks']} times: {why}"


def _nothing_ran(sites: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not any(site["calls"] for site in _ours(sites)):
        yield "nothing of ours ran in it: the report counts no call"


def _loader(phases: Mapping[str, float], loader: Mapping[str, Any] | None) -> Iterator[str]:
    if loader is not None and loader["bound"] == "loader":
        real, cached = loader["samples_per_second"], loader["samples_per_second_cached"]
        yield f"loader-bound: {real:.2f} samples/s with the real loader, {cached:.2f} with cached batches"
        return
    total = sum(phases.values())
    waiting = phases.get("data", 0.0) + phases.get("preprocess", 0.0)
    if total and waiting > LOADER_SHARE * total:
        yield (
            f"loader-bound: data and preprocessing take {waiting / total:.0%} of the step, so a ratio says "
            "little about the model's speed; try more workers"
        )
