"""A recipe: one run of a host, and the arms in which to compare it. The schema is in recipes/README.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from somaspeed_patch.ab.yaml_reader import (
    RecipeError,
    Section,
    nearest,
    number,
    text,
    texts,
    variables,
    whole,
)
from somaspeed_patch.adapter import Adapter, adapters
from somaspeed_patch.features import Value

Targets = tuple[str, ...] | None

NOBODY = "none"  # `against: none`


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far an arm may be from the baseline, relative, at every update."""

    loss: float = 1e-5
    """of the loss; the default is for fp32"""
    grad_norm: float = 1e-4
    """of the gradient norm before clipping; the default is for fp32"""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the recipe."""

    name: str
    """as in the table"""
    targets: Targets
    """adapters to switch on; None: those that patch() picks; empty: native"""
    features: Mapping[str, Value]
    """settings of the adapters' features"""
    arguments: tuple[str, ...]
    """host arguments after the recipe's own, so they win"""
    environment: Mapping[str, str]
    """variables on top of the recipe's"""
    against: str | None = None
    """the arm to compare with, or NOBODY where this one trains on other data; None: the first arm"""
    stop_after: int | None = None
    """updates after which its runs are ended, for a slow arm; None: the recipe's steps"""
    discard: int | None = None
    """first updates left out of its figures; None: the recipe's"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `somaspeed ab` runs."""

    name: str
    """the file's name without .yaml"""
    path: Path
    """the file"""
    description: str
    """one line for the table"""
    host: str
    """the host's command"""
    arguments: tuple[str, ...]
    """its arguments, with {assets}, {out} and {steps} to be filled in"""
    environment: Mapping[str, str]
    """variables for every arm"""
    steps: int
    """updates of one run"""
    discard: int
    """first updates left out of the speed figures"""
    repeats: int
    """runs of each arm"""
    timeout_seconds: float
    """for one run"""
    tolerance: Tolerance
    """for the parity gate"""
    arms: tuple[Arm, ...]
    """the first one is the baseline"""
    loader: Mapping[str, str]
    """arms, and for each the arm that does the same work on cached batches"""

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with, but for those that say otherwise."""
        return self.arms[0]

    def updates(self, arm: Arm) -> int:
        """How many updates a run of `arm` has."""
        return self.steps if arm.stop_after is None else min(arm.stop_after, self.steps)

    def discarded(self, arm: Arm) -> int:
        """How many of them are left out of its figures."""
        return self.discard if arm.discard is None else arm.discard

    def reference(self, arm: Arm) -> str | None:
        """The arm that `arm` is compared with; None for the baseline, and when it is NOBODY or not chosen."""
        name = self.baseline.name if arm.against is None else arm.against
        others = [other.name for other in self.arms if other is not arm]
        return name if name in others else None

    def chosen(self, names: str | None, repeats: int | None) -> Recipe:
        """With only the arms in a comma-separated list, the first of them the baseline, and other repeats."""
        arms = self.arms if names is None else tuple(self._arm(name.strip()) for name in names.split(","))
        return replace(self, arms=arms, repeats=self.repeats if repeats is None else repeats)

    def _arm(self, name: str) -> Arm:
        by_name = {arm.name: arm for arm in self.arms}
        if name not in by_name:
            raise RecipeError(f"{self.path}: no arm is called {name!r}{nearest(name, by_name)}")
        return by_name[name]


def load(name_or_path: str) -> Recipe:
    """Read a recipe file, or the shipped recipe of that name.

    Raises: RecipeError: no such recipe, or what is wrong in it: file, line, key.
    """
    path = find(name_or_path)
    top = Section.of_file(path)
    top.allow(_KEYS)
    steps = top.get("steps", whole, "the number of updates of a run")
    arms = _arms(top)
    recipe = Recipe(
        name=path.stem,
        path=path,
        description=top.get("description", text, "one line of text", path.stem),
        host=top.get("host", text, "a command, for example lerobot-train"),
        arguments=top.get("arguments", texts, "a list of host arguments", ()),
        environment=top.get("environment", variables, "a mapping of names to values", {}),
        steps=steps,
        discard=top.get("discard", lambda value: whole(value, 0), "a whole number of updates", 5),
        repeats=top.get("repeats", whole, "a whole number of runs", 2),
        timeout_seconds=top.get("timeout_seconds", number, "seconds", 3600.0),
        tolerance=_tolerance(top.section("tolerance", "a mapping of loss and grad_norm")),
        arms=arms,
        loader=_loader(top, arms),
    )
    for arm in arms:
        left, out = recipe.updates(arm), recipe.discarded(arm)
        if out >= left:
            top.fail("discard", f"must leave at least one of the {left} updates of {arm.name}, but is {out}")
    return recipe


_KEYS = (
    "description",
    "host",
    "arguments",
    "environment",
    "steps",
    "discard",
    "repeats",
    "timeout_seconds",
    "tolerance",
    "arms",
    "loader",
    "synthetic",  # read by synthetic_recipe.py
)
_ARM_KEYS = ("targets", "features", "arguments", "environment", "against", "stop_after", "discard")


def find(name_or_path: str) -> Path:
    """The file of a recipe given as a path or as a shipped name."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    folder = Path(str(files("somaspeed_patch.recipes")))
    shipped = folder / f"{name_or_path}.yaml"
    if os.sep not in name_or_path and shipped.is_file():
        return shipped
    names = [file.stem for file in folder.glob("*.yaml")]
    raise RecipeError(
        f"no recipe {name_or_path!r}: expected a file or a shipped name{nearest(path.stem, names)}"
    )


def _tolerance(section: Section | None) -> Tolerance:
    if section is None:
        return Tolerance()
    section.allow(("loss", "grad_norm"))
    expected = "a relative tolerance, for example 1.0e-5"
    return Tolerance(
        loss=section.get("loss", number, expected, Tolerance.loss),
        grad_norm=section.get("grad_norm", number, expected, Tolerance.grad_norm),
    )


def _arms(top: Section) -> tuple[Arm, ...]:
    section = top.section("arms", "a mapping of arm names to their settings")
    if section is None or not section.names:
        top.fail(
            "arms",
            "missing; expected at least one arm, the first is the baseline, for example native, patched",
        )
    return tuple(_arm(section, name) for name in section.names)


def _arm(arms: Section, name: str) -> Arm:
    if not name.replace("_", "").replace("-", "").isalnum():
        arms.fail(name, "an arm's name names a folder: use letters, digits, - and _")
    section = arms.section(name, "a mapping with targets, and if needed features, arguments, environment")
    if section is None:
        raise KeyError(name)
    section.allow(_ARM_KEYS)
    return Arm(
        name=name,
        targets=_targets(section),
        features=features_of(section),
        arguments=section.get("arguments", texts, "a list of host arguments", ()),
        environment=section.get("environment", variables, "a mapping of names to values", {}),
        against=_against(section, name, arms.names),
        stop_after=_count(section, "stop_after", 1),
        discard=_count(section, "discard", 0),
    )


def _count(section: Section, key: str, least: int) -> int | None:
    """A number of updates, or None where the recipe's own counts."""
    if key not in section.names:
        return None
    return section.get(key, lambda value: whole(value, least), f"a whole number of updates from {least} on")


def _against(section: Section, name: str, names: tuple[str, ...]) -> str | None:
    """Checked: the first arm has none, and every other one names another arm, or NOBODY."""
    if "against" not in section.names:
        return None
    if name == names[0]:
        section.fail("against", "the first arm is the baseline; leave it out")
    found = section.get("against", text, "an arm, or none")
    others = [other for other in names if other != name]
    if found not in (*others, NOBODY):
        section.fail("against", f"no other arm is called {found!r}{nearest(found, (*others, NOBODY))}")
    return found


def _loader(top: Section, arms: tuple[Arm, ...]) -> Mapping[str, str]:
    """The arms with cached batches, by the arm whose loader they are to judge."""
    section = top.section("loader", "a mapping of arms to the arms with cached batches")
    if section is None:
        return {}
    section.allow(arm.name for arm in arms)
    twins = {name: section.get(name, text, "the arm with cached batches") for name in section.names}
    apart = [arm.name for arm in arms if arm.against is not None]
    for name, twin in twins.items():
        if twin not in apart:
            why = "cached batches are other data, so it must be an arm with `against`"
            section.fail(name, f"{why}, but is {twin!r}{nearest(twin, apart)}")
    return twins


def _targets(section: Section) -> Targets:
    expected = "none, default, or a list of adapters"
    if "targets" in section.names and section.plain("targets") in ("none", "default"):
        return () if section.plain("targets") == "none" else None
    names = section.get("targets", texts, expected)
    for name in names:
        if name not in adapters():
            section.fail("targets", f"no adapter is called {name!r}{nearest(name, adapters())}")
    return names


def features_of(section: Section) -> Mapping[str, Value]:
    """The `features` of an arm: only declared ones, each with a value of its kind."""
    features = section.section("features", "a mapping of features to on, off or a value")
    if features is None:
        return {}
    declared = {feature.name: feature for adapter in adapters().values() for feature in adapter.features}
    features.allow(declared)
    values: dict[str, Value] = {name: features.plain(name) for name in features.names}
    for name, value in values.items():
        if isinstance(declared[name].default, bool) != isinstance(value, bool):
            kind = "on or off" if isinstance(declared[name].default, bool) else "a quoted value"
            features.fail(name, f"expected {kind}, but is {value!r}")
    return values


def default_adapters() -> list[Adapter]:
    """What patch() without targets switches on here."""
    return [adapter for adapter in adapters().values() if adapter.default and adapter.misfit() is None]


def fill(words: tuple[str, ...], **values: Any) -> list[str]:
    """Replace {assets}, {out} and {steps}; other braces, such as JSON's, stay."""
    values = {"assets": Path(str(files("somaspeed_patch.recipes"))) / "assets", **values}
    filled = list(words)
    for key, value in values.items():
        filled = [word.replace("{" + key + "}", str(value)) for word in filled]
    return filled
