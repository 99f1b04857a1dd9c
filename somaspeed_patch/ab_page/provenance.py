"""Where a result comes from, as facts for the page: enough to run it again and to doubt it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.figures import Sentence

Results = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line."""

    term: str
    """what it is"""
    lines: tuple[Sentence, ...]
    """what it says"""
    code: bool = False
    """whether it is for a shell"""


def provenance(results: Results) -> list[Fact]:
    """Command, commit, date, machine, versions, environment."""
    machine = results["machine"]
    facts = [
        Fact(term="Command", lines=((_command(results),),), code=True),
        Fact(term="Variables", lines=_pairs(machine.get("variables", {}), "="), code=True),
        Fact(term="Commit", lines=((str(results["commit"] or "unknown"),),)),
        Fact(term="Date", lines=((results["date"],),)),
        Fact(term="Kind", lines=((_KINDS.get(results["kind"], str(results["kind"])),),)),
        Fact(term="Runs", lines=_runs(results)),
        Fact(term="CPU", lines=((f"{machine['cpu']}, ", figures.count(machine["cores"]), " cores"),)),
        Fact(term="Devices", lines=_gpus(machine)),
        Fact(term="System", lines=((machine["system"],),)),
        Fact(term="Versions", lines=_versions(results)),
    ]
    return [fact for fact in facts if fact.lines]


_KINDS = {
    "trainer": "the real trainer, in processes of its own",
    "step": "the training step alone, on synthetic batches",
}


def _command(results: Results) -> str:
    """As a shell reads it."""
    return shlex.join(results["command"])


def _pairs(found: Mapping[str, Any], sign: str) -> tuple[Sentence, ...]:
    return tuple((f"{name}{sign}{shlex.quote(str(value))}",) for name, value in found.items())


def _versions(results: Results) -> tuple[Sentence, ...]:
    named = {"somaspeed": results.get("somaspeed"), **results["versions"]}
    return ((", ".join(f"{name} {version}" for name, version in named.items() if version),),)


def _runs(results: Results) -> tuple[Sentence, ...]:
    recipe, step = results["recipe"], results["kind"] == "step"
    discarded = "at most before them left out" if step else "of them left out"
    told = (("steps", "updates a run"), ("discard", discarded), ("repeats", "repeats of each cell at most"))
    parts: list[Any] = []
    for key, said in told:
        if isinstance(recipe.get(key), int):
            parts += [", ", figures.count(recipe[key]), f" {said}"]
    return (tuple(parts[1:]),) if parts else ()


def _gpus(machine: Mapping[str, Any]) -> tuple[Sentence, ...]:
    """One line a GPU with memory and driver; the devices' names where nothing else is known."""
    gpus = machine.get("gpus") or []
    if not gpus:
        return ((", ".join(machine.get("devices") or []) or "none",),)
    return tuple(_gpu(gpu) for gpu in gpus)


def _gpu(gpu: Mapping[str, Any]) -> Sentence:
    memory: Sentence = (
        () if gpu.get("memory_gib") is None else (", ", figures.plain(gpu["memory_gib"]), " GiB")
    )
    driver = f", driver {gpu['driver']}" if gpu.get("driver") else ""
    return (gpu["name"], *memory, driver)
