"""The arms of a recipe: named sets of host arguments and of our switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from somaspeed_patch.ab.yaml_reader import Section, nearest, switch, text, texts, variables, whole, wholes
from somaspeed_patch.adapter import adapters
from somaspeed_patch.features import Feature, Value
from somaspeed_patch.layouts import layout

Targets = tuple[str, ...] | None

NOBODY = "none"  # `against: none`


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
    batches: tuple[int, ...] | None = None
    """batches to run it at; None: the recipe's"""
    find_batch: bool | None = None
    """also at the largest batch that fits; None: as the recipe says"""
    ablates: str | None = None
    """the feature that it lacks, where it is another arm without one feature"""
    like: str | None = None
    """that other arm, or the one whose settings it takes over"""

    @property
    def native(self) -> bool:
        """Whether nothing of ours changes how it trains; cached batches come from an adapter of ours."""
        only_cached = self.features.get("worker_preprocess") is False
        helpers = {"step_recorder", *(["lerobot_workers"] if only_cached else [])}
        return self.targets is not None and helpers.issuperset(self.targets)


_BLANK = Arm(name="", targets=(), features={}, arguments=(), environment={})


_KEYS = (
    "targets", "features", "arguments", "environment", "against", "stop_after", "discard", "batches",
    "find_batch", "like", "ablates", "layout",
)  # fmt: skip


def read(top: Section) -> tuple[Arm, ...]:
    """The section `arms`, in order; an arm can be `like` one above it.

    Raises: RecipeError: what is wrong: file, line, key.
    """
    section = top.section("arms", "a mapping of arm names to their settings")
    if section is None or not section.names:
        top.fail(
            "arms",
            "missing; expected at least one arm, the first is the baseline, for example native, patched",
        )
    known: dict[str, Arm] = {}
    for name in section.names:
        known[name] = _arm(section, name, known)
    return tuple(known.values())


def _arm(arms: Section, name: str, known: Mapping[str, Arm]) -> Arm:
    if not name.replace("_", "").replace("-", "").isalnum():
        arms.fail(name, "an arm's name names a folder: use letters, digits, - and _")
    section = arms.section(name, "a mapping with targets, and if needed features, arguments, environment")
    if section is None:
        raise KeyError(name)
    section.allow(_KEYS)
    like = like_of(section, known)
    first = like or _BLANK  # whose settings this one starts from
    own = section.names
    return Arm(
        name=name,
        targets=first.targets if like and "targets" not in own else _targets(section),
        features=features_with(section, first.features),
        arguments=(*first.arguments, *_words(section)),
        environment={**first.environment, **_environment(section)},
        against=_against(section, name, arms.names),
        stop_after=_count(section, "stop_after", 1) if "stop_after" in own else first.stop_after,
        discard=_count(section, "discard", 0) if "discard" in own else first.discard,
        batches=batches(section) or first.batches,
        find_batch=_find(section) if "find_batch" in own else first.find_batch,
        ablates=ablated(section),
        like=None if like is None else like.name,
    )


def _words(section: Section) -> tuple[str, ...]:
    return section.get("arguments", texts, "a list of host arguments", ())


def _environment(section: Section) -> Mapping[str, str]:
    return section.get("environment", variables, "a mapping of names to values", {})


def _find(section: Section) -> bool:
    return section.get("find_batch", switch, "true or false")


def batches(section: Section) -> tuple[int, ...] | None:
    """`batches`, None where it does not say."""
    if "batches" not in section.names:
        return None
    return section.get("batches", wholes, "a list of batch sizes, for example [8, 32]")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


A = TypeVar("A", bound=_Named)


def like_of(section: Section, known: Mapping[str, A]) -> A | None:
    """The arm above that this one is `like`, None where it is like none."""
    if "like" not in section.names:
        if "ablates" in section.names:
            section.fail("ablates", "needs `like`, the arm that has the feature")
        return None
    name = section.get("like", text, "an arm above this one")
    if name not in known:
        section.fail("like", f"no arm above is called {name!r}{nearest(name, known)}")
    return known[name]


def ablated(section: Section) -> str | None:
    """The feature that `ablates` names, None without one."""
    if "ablates" not in section.names:
        return None
    name = section.get("ablates", text, "a feature")
    if name not in _declared():
        section.fail("ablates", f"no feature is called {name!r}{nearest(name, _declared())}")
    return name


def features_with(section: Section, first: Mapping[str, Value]) -> Mapping[str, Value]:
    """Its own settings on top of those of the arm that it is like, and off what it ablates."""
    found, name = {**first, **features_of(section)}, ablated(section)
    if name is None:
        return found
    default = _declared()[name].default
    off = False if isinstance(default, bool) else None
    if found.get(name, default) == off:
        section.fail("ablates", f"{name} is off in {section.plain('like')} already")
    return {**found, name: off}


def _count(section: Section, key: str, least: int) -> int:
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


def _targets(section: Section) -> Targets:
    expected = "none, default, or a list of adapters"
    if "targets" in section.names and section.plain("targets") in ("none", "default"):
        return () if section.plain("targets") == "none" else None
    names = section.get("targets", texts, expected)
    for name in names:
        if name not in adapters():
            section.fail("targets", f"no adapter is called {name!r}{nearest(name, adapters())}")
    return names


def _declared() -> dict[str, Feature]:
    return {feature.name: feature for adapter in adapters().values() for feature in adapter.features}


def features_of(section: Section) -> dict[str, Value]:
    """The `features` of an arm: only declared ones, each with a value of its kind."""
    features = section.section("features", "a mapping of features to on, off or a value")
    if features is None:
        return _layout(section)
    declared = _declared()
    features.allow(declared)
    values: dict[str, Value] = {name: features.plain(name) for name in features.names}
    for name, value in values.items():
        if isinstance(declared[name].default, bool) != isinstance(value, bool):
            kind = "on or off" if isinstance(declared[name].default, bool) else "a quoted value"
            features.fail(name, f"expected {kind}, but is {value!r}")
    return {**values, **_layout(section)}


def _layout(section: Section) -> dict[str, Value]:
    """`layout`, which is that feature, with its keys checked."""
    if "layout" not in section.names:
        return {}
    given = section.get("layout", text, "a layout, for example dp_replicate=2,dp_shard=4")
    try:
        layout.parse(given)
    except ValueError as error:
        section.fail("layout", str(error).removeprefix("layout: "))
    return {"layout": given}


def settings(arm: Arm) -> dict[str, Any]:
    """What the arm is, as plain data for results.json."""
    return {
        "targets": arm.targets if arm.targets is None else list(arm.targets),
        "features": dict(arm.features),
        "arguments": list(arm.arguments),
        "environment": dict(arm.environment),
        "ablates": arm.ablates,
        "like": arm.like,
    }
