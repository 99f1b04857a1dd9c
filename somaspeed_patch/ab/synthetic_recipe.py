"""The `synthetic:` section of a recipe: full-size model, random weights, device batches, one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import recipe as recipes
from somaspeed_patch.ab.arms import ablated, features_with, like_of
from somaspeed_patch.ab.yaml_reader import RecipeError, Section, nearest, switch, text, whole, wholes
from somaspeed_patch.tiny_groot import sizes as tiny_groot
from somaspeed_patch.tiny_molmoact2 import sizes as tiny_molmoact2
from somaspeed_patch.tiny_pi05 import sizes as tiny_pi05


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a recipe may say about one model."""

    counts: Mapping[str, int]
    """keys of its batch, with their defaults"""
    switches: Mapping[str, tuple[str, ...]]
    """the host's own options: the words they take, none for true or false"""
    paddings: tuple[str, ...]
    """sides on which its prompts can be padded"""
    sizes: tuple[str, ...]
    """full, and those of its tiny model"""


_STEPS = {"warmup": 3, "steps": 8, "repeats": 3}
MODELS: Mapping[str, Model] = {
    "pi05": Model(
        counts={"cameras": 2, "slots": 200, "tokens": 64, "chunk": 50},
        switches={"compile_model": (), "gradient_checkpointing": ()},
        paddings=("right",),
        sizes=("full", *tiny_pi05.SIZES),
    ),
    "molmoact2": Model(
        counts={"cameras": 2, "tokens": 80, "chunk": 10},
        switches={
            "attention": ("sdpa", "eager"),
            "autocast": (),
            "compile_blocks": (),
            "gradient_checkpointing": (),
        },
        paddings=("left", "right"),
        sizes=tuple(sorted(tiny_molmoact2.SIZES)),
    ),
    "groot": Model(
        counts={"cameras": 2, "tokens": 44, "chunk": 16, "embodiments": 1},
        switches={
            "all_bf16": (),
            "all_fp32": (),
            "attention": ("sdpa", "eager"),
            "compile_blocks": (),
            "dropout": ("host", "off"),
        },
        paddings=("left",),
        sizes=tuple(sorted(tiny_groot.SIZES)),
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)  # hashed by identity: its settings are dicts
class SyntheticArm:
    """One way to train the model."""

    name: str
    """as in the table"""
    patched: bool
    """whether the policy's adapter is on"""
    features: Mapping[str, bool | str | None]
    """settings of its features"""
    policy: Mapping[str, bool | str]
    """the host's own options: the model's switches"""
    padding: str | None
    """the side on which its prompts are padded to one length; None: all are equally long"""
    batches: tuple[int, ...]
    """batch sizes to run"""
    find_batch: bool = False
    """whether it also runs at the largest batch that it fits"""
    ablates: str | None = None
    """the feature that it lacks, where it is another arm without one feature"""
    like: str | None = None
    """that other arm, or the one whose settings it takes over"""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What `somaspeed ab RECIPE --synthetic` runs."""

    name: str
    """the recipe's name"""
    description: str = ""
    """one line for the table"""
    model: str
    """one of MODELS"""
    size: str
    """one of the model's sizes"""
    dtype: str
    """the policy's dtype, of GR00T its frozen backbone's: bfloat16 or float32"""
    cameras: int
    """images a sample"""
    slots: int
    """language slots a sample; 0: as many as its longest prompt has tokens"""
    tokens: int
    """real language tokens of the longest prompt"""
    chunk: int
    """actions a sample"""
    embodiments: int = 1
    """robots that the samples are spread over"""
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

    def against_itself(self) -> Synthetic:
        """The baseline and nothing but the baseline: what it reports is the noise of this machine."""
        again = replace(self.arms[0], name=f"{self.arms[0].name}_again")
        return replace(self, arms=(self.arms[0], again))

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
    described = top.get("description", text, "one line of text", path.stem)
    return _synthetic(path, described, section)


def _synthetic(path: Path, description: str, section: Section) -> Synthetic:
    name = section.get("model", _one_of(MODELS), f"one of {', '.join(MODELS)}")
    model = MODELS[name]
    defaults = {**model.counts, **_STEPS}
    section.allow(("model", "size", "dtype", "arms", *defaults))
    counts = {key: section.get(key, whole, "a whole number", default) for key, default in defaults.items()}
    arms = section.section("arms", "a mapping of arm names to their settings")
    if arms is None or not arms.names:
        section.fail("arms", "missing; expected at least one arm, the first is the baseline")
    if counts["tokens"] > counts.setdefault("slots", 0) > 0:
        section.fail("tokens", f"must be at most slots, {counts['slots']}, but is {counts['tokens']}")
    return Synthetic(
        name=path.stem,
        description=f"{description}: the training step alone",
        model=name,
        size=section.get("size", _one_of(model.sizes), f"one of {', '.join(model.sizes)}", "full"),
        dtype=section.get("dtype", _one_of(("bfloat16", "float32")), "bfloat16 or float32", "bfloat16"),
        arms=_arms(arms, model),
        **counts,
    )


def _arms(section: Section, model: Model) -> tuple[SyntheticArm, ...]:
    known: dict[str, SyntheticArm] = {}
    for name in section.names:
        known[name] = _arm(section, name, model, known)
    return tuple(known.values())


_BLANK = SyntheticArm(name="", patched=False, features={}, policy={}, padding=None, batches=())
_ARM_KEYS = ("patched", "features", "policy", "padding", "batches", "find_batch", "like", "ablates")


def _arm(arms: Section, name: str, model: Model, known: Mapping[str, SyntheticArm]) -> SyntheticArm:
    section = arms.section(name, "a mapping with batches, and if needed patched, features, policy, padding")
    if section is None:
        raise KeyError(name)
    section.allow(_ARM_KEYS)
    like = like_of(section, known)
    first = like or _BLANK
    return SyntheticArm(
        name=name,
        patched=section.get("patched", switch, "true or false", first.patched),
        features=features_with(section, first.features),
        policy={**first.policy, **_policy(section, model)},
        padding=_padding(section, model) if "padding" in section.names else first.padding,
        batches=section.get("batches", wholes, "a list of batch sizes", first.batches or None),
        find_batch=section.get("find_batch", switch, "true or false", first.find_batch),
        ablates=ablated(section),
        like=None if like is None else like.name,
    )


def _padding(arm: Section, model: Model) -> str:
    return arm.get("padding", _one_of(model.paddings), " or ".join(model.paddings))


def _policy(arm: Section, model: Model) -> Mapping[str, bool | str]:
    section = arm.section("policy", f"a mapping of {' and '.join(model.switches)}")
    if section is None:
        return {}
    section.allow(model.switches)
    return {name: _option(section, name, model.switches[name]) for name in section.names}


def _option(section: Section, name: str, words: tuple[str, ...]) -> bool | str:
    if words:
        return section.get(name, _one_of(words), f"one of {', '.join(words)}")
    return section.get(name, switch, "true or false")


def _one_of(valid: Iterable[str]) -> Callable[[Any], str]:
    known = tuple(valid)

    def kind(value: Any) -> str:
        if value not in known:
            raise ValueError
        return str(value)

    return kind
