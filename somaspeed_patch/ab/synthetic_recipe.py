"""The `synthetic:` section of a recipe: full-size model, random weights, device batches, one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import recipe as recipes
from somaspeed_patch.ab.yaml_reader import RecipeError, Section, nearest, text, whole

MODELS = ("pi05",)
SWITCHES = ("compile_model", "gradient_checkpointing")


@dataclass(frozen=True, kw_only=True, eq=False)  # hashed by identity: its settings are dicts
class SyntheticArm:
    """One way to train the model."""

    name: str
    """as in the table"""
    patched: bool
    """whether the policy's adapter is on"""
    features: Mapping[str, bool | str | None]
    """settings of its features"""
    policy: Mapping[str, bool]
    """the host's own switches: compile_model, gradient_checkpointing"""
    batches: tuple[int, ...]
    """batch sizes to run; the first one that every arm shares is the equal batch"""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What `somaspeed ab RECIPE --synthetic` runs."""

    name: str
    """the recipe's name"""
    model: str
    """one of MODELS"""
    size: str
    """full, or a size of the tiny model"""
    dtype: str
    """the policy's dtype: bfloat16 or float32"""
    cameras: int
    """images a sample"""
    slots: int
    """language slots a sample"""
    tokens: int
    """of them real tokens"""
    chunk: int
    """actions a sample"""
    warmup: int
    """updates before timing, in the first repeat of each arm and batch; one in the others"""
    steps: int
    """timed updates a repeat"""
    repeats: int
    """times each arm and batch is run, in ABBA order"""
    arms: tuple[SyntheticArm, ...]
    """the first is the baseline"""

    def chosen(self, names: str | None, repeats: int | None) -> Synthetic:
        """With only the arms of a comma-separated list, and other repeats."""
        arms = self.arms if names is None else tuple(self._arm(name.strip()) for name in names.split(","))
        return replace(self, arms=arms, repeats=self.repeats if repeats is None else repeats)

    def _arm(self, name: str) -> SyntheticArm:
        by_name = {arm.name: arm for arm in self.arms}
        if name not in by_name:
            raise RecipeError(f"{self.name}: no synthetic arm is called {name!r}{nearest(name, by_name)}")
        return by_name[name]


def load(name_or_path: str) -> Synthetic:
    """Read the section from a recipe file or a shipped recipe.

    Raises: RecipeError: no such recipe, no such section, or what is wrong in it: file, line, key.
    """
    path = recipes.find(name_or_path)
    top = Section.of_file(path)
    section = top.section("synthetic", "a mapping, see recipes/README.md")
    if section is None:
        top.fail("synthetic", "missing; --synthetic needs this section")
    return _synthetic(path, section)


_KEYS = (
    "model",
    "size",
    "dtype",
    "cameras",
    "slots",
    "tokens",
    "chunk",
    "warmup",
    "steps",
    "repeats",
    "arms",
)
_COUNTS = {"cameras": 2, "slots": 200, "tokens": 64, "chunk": 50, "warmup": 3, "steps": 8, "repeats": 3}


def _synthetic(path: Path, section: Section) -> Synthetic:
    section.allow(_KEYS)
    counts = {key: section.get(key, whole, "a whole number", default) for key, default in _COUNTS.items()}
    arms = section.section("arms", "a mapping of arm names to their settings")
    if arms is None or not arms.names:
        section.fail("arms", "missing; expected at least one arm, the first is the baseline")
    if counts["tokens"] > counts["slots"]:
        section.fail("tokens", f"must be at most slots, {counts['slots']}, but is {counts['tokens']}")
    return Synthetic(
        name=path.stem,
        model=section.get("model", _one_of(MODELS), f"one of {', '.join(MODELS)}"),
        size=section.get("size", text, "full, or a size of the tiny model", "full"),
        dtype=section.get("dtype", _one_of(("bfloat16", "float32")), "bfloat16 or float32", "bfloat16"),
        arms=tuple(_arm(arms, name) for name in arms.names),
        **counts,
    )


def _arm(arms: Section, name: str) -> SyntheticArm:
    section = arms.section(name, "a mapping with batches, and if needed patched, features, policy")
    if section is None:
        raise KeyError(name)
    section.allow(("patched", "features", "policy", "batches"))
    return SyntheticArm(
        name=name,
        patched=section.get("patched", _switch, "true or false", False),
        features=recipes.features_of(section),
        policy=_policy(section),
        batches=section.get("batches", _batches, "a list of batch sizes"),
    )


def _policy(arm: Section) -> Mapping[str, bool]:
    section = arm.section("policy", f"a mapping of {' and '.join(SWITCHES)}")
    if section is None:
        return {}
    section.allow(SWITCHES)
    return {name: section.get(name, _switch, "true or false") for name in section.names}


def _one_of(valid: tuple[str, ...]) -> Any:
    def kind(value: Any) -> str:
        if value not in valid:
            raise ValueError
        return str(value)

    return kind


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _batches(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise TypeError
    return tuple(whole(item) for item in value)
