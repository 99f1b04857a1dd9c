"""A recipe: one run of a host, and the arms in which to compare it. The schema is in recipes/README.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from somaspeed_patch.ab.arms import NOBODY, Arm, batches
from somaspeed_patch.ab.arms import read as read_arms
from somaspeed_patch.ab.yaml_reader import (
    RecipeError,
    Section,
    nearest,
    number,
    switch,
    text,
    texts,
    variables,
    whole,
)
from somaspeed_patch.adapter import Adapter, adapters


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far an arm may be from the baseline, relative, at every update."""

    loss: float = 1e-5
    """of the loss; the default is for fp32"""
    grad_norm: float = 1e-4
    """of the gradient norm before clipping; the default is for fp32"""
    gradient: float = 1e-4
    """of every parameter's gradient, at one update; the default is for fp32"""


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
    batches: tuple[int, ...] = ()
    """for {batch} in the arguments, as the host counts it; empty: the arguments say it themselves"""
    find_batch: bool = False
    """whether every arm also runs at the largest batch that it fits"""
    gradients: int | None = 1
    """the update whose gradients are compared one by one; None: none"""
    cool_seconds: float = 0.0
    """rest between two runs, for a device that runs slower when it is hot"""
    necessary_tflop_per_sample: float | None = None
    """work of one sample's update that the gradient needs; None: nobody counted it"""

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

    @property
    def cells(self) -> list[tuple[Arm, int | None]]:
        """What is run: every arm at every batch of its own."""
        return [(arm, batch) for arm in self.arms for batch in self.batches_of(arm) or (None,)]

    def batches_of(self, arm: Arm) -> tuple[int, ...]:
        """Its own, or the recipe's."""
        return self.batches if arm.batches is None else arm.batches

    def finds_batch(self, arm: Arm) -> bool:
        """Whether the largest batch of `arm` is looked for."""
        return self.find_batch if arm.find_batch is None else arm.find_batch

    def against_itself(self) -> Recipe:
        """The baseline and nothing but the baseline: what it reports is the noise of this machine."""
        again = replace(self.baseline, name=f"{self.baseline.name}_again")
        return replace(self, arms=(self.baseline, again), loader={})

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
    arms = read_arms(top)
    recipe = Recipe(
        name=path.stem,
        path=path,
        description=top.get("description", text, "one line of text", path.stem),
        host=top.get("host", text, "a command, for example lerobot-train"),
        arguments=top.get("arguments", texts, "a list of host arguments", ()),
        environment=top.get("environment", variables, "a mapping of names to values", {}),
        steps=steps,
        discard=top.get("discard", lambda value: whole(value, 0), "a whole number of updates", 5),
        repeats=top.get("repeats", whole, "a whole number of runs", 3),
        timeout_seconds=top.get("timeout_seconds", number, "seconds", 3600.0),
        tolerance=_tolerance(top.section("tolerance", "a mapping of loss, grad_norm and gradient")),
        arms=arms,
        loader=_loader(top, arms),
        batches=batches(top) or (),
        find_batch=top.get("find_batch", switch, "true or false", False),
        gradients=_gradients(top),
        cool_seconds=top.get("cool_seconds", number, "seconds", 0.0),
        necessary_tflop_per_sample=_tflop(top),
    )
    _check(top, recipe)
    return recipe


def _gradients(top: Section) -> int | None:
    if "gradients" in top.names and top.plain("gradients") == NOBODY:
        return None
    return top.get("gradients", whole, "the number of an update, or none", Recipe.gradients)


def _tflop(top: Section) -> float | None:
    if "necessary_tflop_per_sample" not in top.names:
        return None
    return top.get("necessary_tflop_per_sample", number, "a number of TFLOP, for example 2.75")


def _check(top: Section, recipe: Recipe) -> None:
    """What no key can say by itself."""
    for arm in recipe.arms:
        left, out = recipe.updates(arm), recipe.discarded(arm)
        if out >= left:
            top.fail("discard", f"must leave at least one of the {left} updates of {arm.name}, but is {out}")
        wanted = any("{batch}" in word for word in (*recipe.arguments, *arm.arguments))
        if wanted and not recipe.batches_of(arm):
            top.fail("batches", f"missing: the arguments of {arm.name} have {{batch}}")
        if recipe.batches_of(arm) and not wanted:
            top.fail("batches", f"the arguments of {arm.name} have no {{batch}} to put them in")
        if recipe.finds_batch(arm) and not wanted:
            top.fail("find_batch", f"the arguments of {arm.name} have no {{batch}} to try others in")


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
    "batches",
    "find_batch",
    "gradients",
    "cool_seconds",
    "necessary_tflop_per_sample",
    "synthetic",  # read by synthetic_recipe.py
)


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
    names = tuple(field.name for field in fields(Tolerance))
    section.allow(names)
    expected = "a relative tolerance, for example 1.0e-5"
    return Tolerance(
        **{name: section.get(name, number, expected, getattr(Tolerance, name)) for name in names}
    )


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


def default_adapters() -> list[Adapter]:
    """What patch() without targets switches on here."""
    return [adapter for adapter in adapters().values() if adapter.default and adapter.misfit() is None]


def fill(words: tuple[str, ...], **values: Any) -> list[str]:
    """Replace {assets}, {out}, {steps} and {batch}; other braces, such as JSON's, stay."""
    values = {"assets": Path(str(files("somaspeed_patch.recipes"))) / "assets", **values}
    filled = list(words)
    for key, value in values.items():
        filled = [word.replace("{" + key + "}", str(value)) for word in filled]
    return filled
