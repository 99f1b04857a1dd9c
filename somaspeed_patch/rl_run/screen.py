"""What a run shows on the terminal, on stderr: a head, and one line an iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from somaspeed_patch.rl_run.recipe import Recipe

if TYPE_CHECKING:
    from somaspeed_patch.rl_run.build import Built

_MIB = 1 << 20


def say(line: str) -> None:
    """One line, not cut where the terminal is narrow."""
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def head(found: Built, recipe: Recipe) -> list[str]:
    """What is about to run."""
    policy = found.parts.policy
    trained = sum(each.numel() for each in policy.trainable().values())
    critic = sum(each.numel() for each in found.learner.value_head.parameters())
    width = "one behind the other" if recipe.lag is None else f"side by side, lag {recipe.lag}"
    return [
        f"{recipe.name}: {recipe.description}",
        f"{policy.name} on {policy.device}: {trained:,} parameters train, and {critic:,} of the value head",
        f"memory {recipe.memory}, backend {recipe.backend}, {width}, parity {recipe.parity}",
        f"environments: {tasks(recipe)}",
        *([f"{found.ranks.size} ranks, layout {found.ranks.layout}"] if found.ranks.size > 1 else []),
    ]


def tasks(recipe: Recipe) -> str:
    """Which slots play which task."""
    counts = Counter((spec.suite, spec.task) for spec in recipe.env.specs())
    each = ", ".join(f"{task} x{count}" for (_, task), count in counts.items())
    return f"{recipe.env.slots} slots of {recipe.env.suite}; task x slots: {each}"


def sample_size(size: float) -> str:
    """Of an observation's features."""
    return f"a sample keeps {size / _MIB:.3g} MiB"


def iteration(line: Mapping[str, Any], total: int) -> str:
    """One iteration in a line."""
    parts = [
        f"iteration {line['iteration']}/{total}",
        f"success {line['success']:.2f} +- {line['standard_error']:.2f}",
        f"return {line['return']:.2f}",
        f"{line['env_steps']:,} steps",
        f"{line['env_steps_per_second']:.1f} steps/s",
        f"{line['samples_per_second']:.1f} samples/s",
        f"lag {line['lag']:.2g}",
        *([f"queue {line['queue']:.0f}"] if "queue" in line else []),
        *([f"lost {line['lost']}"] if line["lost"] else []),
    ]
    return "  ".join(parts) + " | " + "; ".join(_split(who, each) for who, each in line["phases"].items())


def _split(who: str, seconds: Mapping[str, float]) -> str:
    """A thread's phases by their share of its time."""
    whole = sum(seconds.values()) or 1.0
    shares = [f"{name} {each / whole:.0%}" for name, each in seconds.items() if each / whole >= 0.005]
    return f"{who} {' '.join(shares)}"


def evaluation(line: Mapping[str, Any]) -> str:
    """One evaluation in a line."""
    by_task = "  ".join(f"{task}: {each['success']:.2f}" for task, each in line["tasks"].items())
    return (
        f"evaluation behind {line['iteration']} iterations: success {line['success']:.3f} "
        f"+- {line['standard_error']:.3f} of {line['episodes']:.0f} episodes; by task {by_task}"
    )
