"""What an A/B found, in sentences: for the terminal, Markdown and the page. Pure functions of a results dict.

Best batch and equal batch are never in one sentence. An interval with room for 1 is "no difference beyond the
noise"; without an interval, or with a reason to withhold it, there is "no claim" and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.ablations import Ablation, ablated, ablations
from somaspeed_patch.ab.figures import Sentence, say
from somaspeed_patch.ab.ratios import within_noise

Results = Mapping[str, Any]

FASTER, SAME, SLOWER, SINGLE = "faster", "same", "slower", "single"
_ORDER = (SINGLE, SLOWER, SAME, FASTER)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One ratio of the comparison."""

    arm: str
    """whose"""
    best: bool
    """own best batch against the best native cell; else equal batches"""
    found: Mapping[str, Any]
    """the entry in results.json"""

    @property
    def rank(self) -> tuple[int, float]:
        """Larger for the better result."""
        return _ORDER.index(verdict(self.found)), self.found["ratio"]


def findings(results: Results) -> list[str]:
    """The sentences as text, the most important one first.

    Args:
        results: a results dict of schema 2.
    """
    return [say(sentence) for sentence in sentences(results)]


def sentences(results: Results) -> list[Sentence]:
    """The finding; what else is said of its arm; the other arms; what each feature contributes."""
    claims = [claim for arm in judged(results) for claim in _claims(results, arm)]
    first = _headline(results, claims)
    refusals = [refused(arm, why) for arm, why in _refusals(results)]
    if first is None:
        return [*(refusals or [_nothing(results)]), *_contributions(results)]
    rest = sorted((claim for claim in claims if claim is not first), key=lambda claim: claim.arm != first.arm)
    return [claimed(first), *(claimed(claim) for claim in rest), *refusals, *_contributions(results)]


def verdict(found: Mapping[str, Any]) -> str:
    """FASTER, SAME within the noise, SLOWER, or SINGLE: one repeat, of which nothing can be claimed."""
    low, high = found["low"], found["high"]
    if low is None or high is None:
        return SINGLE
    if within_noise(found):
        return SAME
    return FASTER if low > 1 else SLOWER


def blocked(cell: Mapping[str, Any]) -> str:
    """Why a cell has no bar: failed or withheld, and the reasons; "" when it has one."""
    if cell["failure"]:
        return cell["failure"] if cell["failure"].startswith("failed") else f"failed: {cell['failure']}"
    if cell["withheld"]:
        return "withheld: " + "; ".join(cell["withheld"])
    return "" if "samples_per_second" in cell else "no figure"


def batch_words(batch: int | None) -> Sentence:
    """Such as `batch 8`; the recipe's where the JSON does not say."""
    return ("the recipe's batch",) if batch is None else ("batch ", figures.count(batch))


def judged(results: Results) -> list[str]:
    """The arms to speak of: ours but for the ablations; without any, all but the baseline."""
    compared, named = results["comparison"]["arms"], ablated(results)
    native = {cell["arm"] for cell in results["cells"] if cell["native"]}
    ours = [arm for arm in compared if arm not in native]
    others = [arm for arm in compared if arm != results["comparison"]["baseline"]]
    return [arm for arm in ours if arm not in named] or ours or others


def interval(found: Mapping[str, Any]) -> Sentence:
    """Such as `95 % interval 2.47 to 2.53`."""
    if verdict(found) == SINGLE:
        return ("one repeat, so no interval",)
    low, high = (figures.ratio(found[end], unit="", derived=found.get("derived", False)) for end in _ENDS)
    return ("95 % interval ", low, " to ", high)


_ENDS = ("low", "high")


def claimed(claim: Claim) -> Sentence:
    """The sentence of one ratio."""
    found = claim.found
    against = f"the best native arm, {found['against']}" if claim.best else found["against"]
    return _sentence(claim.arm, against, found, _batches(claim))


def contributed(one: Ablation) -> Sentence:
    """The sentence of one ablation."""
    found = {**one.found, "derived": True}
    against = f"{one.without['arm']}, which lacks {one.feature}"
    return _sentence(one.full["arm"], against, found, ("both at ", *batch_words(one.full["batch"])))


def refused(arm: str, why: str) -> Sentence:
    """The sentence of an arm of which nothing may be claimed."""
    return (f"No claim for {arm}: {why}",)


def _sentence(arm: str, against: str, found: Mapping[str, Any], batches: Sentence) -> Sentence:
    times = figures.ratio(found["ratio"], derived=found.get("derived", False))
    where: Sentence = ("; ", *batches)
    bounds = interval(found)
    match verdict(found):
        case "faster":
            return (
                f"{arm} trains ",
                times,
                f" as many samples a second as {against} (",
                *bounds,
                ")",
                *where,
            )
        case "slower":
            slower = f"{arm} is slower, it trains "
            return (slower, times, f" as many samples a second as {against} (", *bounds, ")", *where)
        case "same":
            pair = f"No difference beyond the noise between {arm} and {against} ("
            return (pair, times, ", ", *bounds, ")", *where)
        case _:
            once = f"No claim for {arm}: one repeat has no interval; in it {arm} trained "
            return (once, times, f" as many samples a second as {against}", *where)


def _batches(claim: Claim) -> Sentence:
    found = claim.found
    if not claim.best:
        return ("both at ", *batch_words(found["batch"]))
    mine, theirs = found["batch"], found["against_batch"]
    if mine is None or theirs is None:
        return ("each at the recipe's batch",)
    return ("each at its best batch, ", figures.count(mine), " against ", figures.count(theirs))


def _claims(results: Results, arm: str) -> list[Claim]:
    fields = results["comparison"]["arms"][arm]
    best = [Claim(arm=arm, best=True, found=fields["best_batch"])] if fields["best_batch"] else []
    return best + [Claim(arm=arm, best=False, found=found) for found in fields["equal_batch"]]


def _headline(results: Results, claims: list[Claim]) -> Claim | None:
    """Of the best batches, for an equal batch can be picked to please; else of the equal ones."""
    pool = [claim for claim in claims if claim.best] or claims
    return max(pool, key=lambda claim: claim.rank, default=None)


def _refusals(results: Results) -> Iterator[tuple[str, str]]:
    """Arms and reasons, once each; ablations too, for a red gate there is news."""
    gate = results["gate"]
    for arm in dict.fromkeys([*judged(results), *ablated(results)]):
        fields = results["comparison"]["arms"].get(arm, {"withheld": []})
        red = [] if gate.get(arm, {}).get("green", True) else _red(gate[arm])
        yield from ((arm, why) for why in fields["withheld"] or red)


def _red(found: Mapping[str, Any]) -> list[str]:
    reasons = found.get("reasons") or ["no reason was recorded"]
    return [f"the parity gate is red: {reason}" for reason in reasons]


def _nothing(results: Results) -> Sentence:
    base = results["comparison"]["baseline"]
    failures = [blocked(cell) for cell in results["cells"] if cell["arm"] == base and blocked(cell)]
    return (f"No claim: {base} {failures[0]}" if failures else "No claim: there was nothing to compare",)


def _contributions(results: Results) -> list[Sentence]:
    return [contributed(one) for one in ablations(results)]
