"""Read an RL recipe from YAML: strictly, with file, line, key and the nearest valid key in every error.

A section's keys are the fields of its dataclass, and what a key may be is the field's annotation, so that a
setting which is new in `rl.settings` can be written in a recipe at once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from somaspeed_patch.ab.recipe import find
from somaspeed_patch.ab.yaml_reader import RecipeError, Section, number, switch, text, whole
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.ppo import Clips
from somaspeed_patch.rl.ranks import checked
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl_run import parity
from somaspeed_patch.rl_run.recipe import (
    TASKS,
    Checkpoints,
    Environment,
    Evaluations,
    Logs,
    Policy,
    Ray,
    Recipe,
    Rollouts,
    Timeouts,
)

T = TypeVar("T")
Kind = tuple[Callable[[Any], Any], str]
"""What makes a value of plain data, and what is expected in words."""
_SECTIONS: Mapping[str, type] = {
    "policy": Policy, "env": Environment, "rollout": Rollouts, "checkpoint": Checkpoints,
    "evaluate": Evaluations, "ray": Ray, "log": Logs, "timeouts": Timeouts,
}  # fmt: skip
_NONE = ("none", "None", None)


def load(name_or_path: str, settings: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, or the shipped recipe of that name.

    Args: settings: `section.key=value` each, over the file's.
    Raises: RecipeError: no such recipe, or what is wrong in it: file, line, key.
    """
    path = find(name_or_path)
    top = _top(path, settings)
    own = [each for each in fields(Recipe) if each.name != "name"]
    top.allow(each.name for each in own)
    found: dict[str, Any] = {name: _section(top, name, cls) for name, cls in _SECTIONS.items()}
    found["ppo"] = _settings(top)
    hints = get_type_hints(Recipe)
    for each in own:
        if each.name not in found and (value := _value(top, each, hints[each.name])) is not MISSING:
            found[each.name] = value
    return _checked(top, _made(top, "policy", partial(Recipe, name=path.stem, **found)))


def _checked(top: Section, recipe: Recipe) -> Recipe:
    """What no key can say by itself."""
    policy, env = recipe.policy, recipe.env
    if (policy.type is None) == (policy.factory is None):
        top.fail("policy", "expected either `type`, one of LeRobot's policies, or `factory`, your own")
    if env.tasks is None and env.suite not in TASKS:
        top.fail("env", f"tasks: name them; only these suites are known whole: {', '.join(TASKS)}")
    if env.tasks is not None and len(env.tasks) > env.slots:
        top.fail("env", f"slots: {env.slots} slots leave some of the {len(env.tasks)} tasks out")
    if recipe.lag is not None and recipe.lag < 0:
        top.fail("lag", f"must be 0 or more, but is {recipe.lag}")
    if recipe.layout_text is not None:
        try:
            checked(recipe.layout_text)
        except ValueError as error:
            top.fail("layout", str(error), error)
    if policy.pool == "all" and policy.type != "pi05":
        top.fail("policy", "pool: `all` is pi0.5's only")
    return parity.applied(recipe)


def _top(path: Path, settings: Iterable[str]) -> Section:
    settings = list(settings)
    if not settings:
        return Section.of_file(path)
    Section.of_file(path)  # its errors have the file's lines
    node = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):  # the line above has said so already
        raise RecipeError(f"{path}: expected a mapping of keys")
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set: expected section.key=value, but is {setting!r}")
        _put(node, key.split("."), yaml.compose(value, Loader=yaml.SafeLoader), setting)
    return Section(f"{path} with --set", node, "")


def _put(node: yaml.Node | None, path: list[str], value: yaml.Node | None, setting: str) -> None:
    """Replace or add what is at a path of keys."""
    if not isinstance(node, yaml.MappingNode) or value is None:
        raise RecipeError(f"--set {setting}: expected section.key=value of a recipe")
    name, *rest = path
    inside = [each for key, each in node.value if key.value == name]
    if rest:
        below = inside[0] if inside else yaml.MappingNode("tag:yaml.org,2002:map", [], node.start_mark)
        _put(below, rest, value, setting)
        value = below
    key = yaml.ScalarNode("tag:yaml.org,2002:str", name, node.start_mark)
    others = [(other, each) for other, each in node.value if other.value != name]
    node.value = [*others, (key, value)]


def _section(top: Section, name: str, cls: type[T]) -> T:
    section = top.section(name, f"a mapping of {', '.join(each.name for each in fields(_as_dataclass(cls)))}")
    if section is None:
        return _made(top, name, cls)
    section.allow(each.name for each in fields(_as_dataclass(cls)))
    return _made(top, name, partial(cls, **_values(section, cls)))


def _settings(top: Section) -> Settings:
    """PPO's, with the flow's and the clips' in the same section."""
    section = top.section("ppo", "a mapping of PPO's settings")
    if section is None:
        return Settings()
    own = [each.name for each in fields(Settings) if each.name not in ("flow", "clips", "seed")]
    flow = [each.name for each in fields(Flow)]
    clips = {f"clip_{each.name}": each for each in fields(Clips)}
    section.allow([*own, *flow, *clips])
    values = _values(section, Settings, own)
    default = Settings().flow
    given = [name for name in flow if name in section.names]
    of_flow = {name: getattr(default, name) for name in flow} | _values(section, Flow, given)
    hints = get_type_hints(Clips)
    of_clips = {
        each.name: value
        for name, each in clips.items()
        if (value := _value(section, each, hints[each.name], name)) is not MISSING
    }
    values["flow"] = _made(top, "ppo", partial(Flow, **of_flow))
    values["clips"] = _made(top, "ppo", partial(Clips, **of_clips))
    values["seed"] = top.get("seed", lambda each: whole(each, 0), "a whole number", 0)
    return _made(top, "ppo", partial(Settings, **values))


def _values(section: Section, cls: type, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The fields that are given."""
    hints = get_type_hints(cls)
    chosen = [each for each in fields(_as_dataclass(cls)) if names is None or each.name in names]
    found = {each.name: _value(section, each, hints[each.name]) for each in chosen}
    return {name: value for name, value in found.items() if value is not MISSING}


def _value(section: Section, one: Field[Any], hint: Any, name: str | None = None) -> Any:
    """MISSING where it is not given."""
    name = name or one.name
    if name not in section.names:
        if one.default is MISSING and one.default_factory is MISSING:
            section.fail(name, f"missing; expected {_kind(one.name, hint)[1]}")
        return MISSING
    inner, optional = _inner(hint)
    if optional and section.plain(name) in (*_NONE, *(("all",) if one.name == "tasks" else ())):
        return None
    return section.get(name, *_kind(one.name, inner))


def _made(top: Section, name: str, make: Callable[[], T]) -> T:
    """What a dataclass refuses is refused where its section is."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        top.fail(name, str(error), error)


def _as_dataclass(cls: type) -> Any:
    return cls


def _inner(hint: Any) -> tuple[Any, bool]:
    """A hint without None, and whether it had one."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    left = [each for each in get_args(hint) if each is not type(None)]
    return left[0], len(left) < len(get_args(hint))


def _kind(name: str, hint: Any) -> Kind:
    """How a value of this type is read."""
    hint, _ = _inner(hint)
    if name == "init_states":
        return _states, "a list of whole numbers, or how many"
    if get_origin(hint) is Literal:
        return partial(_choice, get_args(hint)), f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        one = get_args(hint)[0]
        return partial(_list, _kind("", one)[0]), f"a list, each {_kind('', one)[1]}"
    return _KINDS.get(hint, (_mapping, "a mapping"))


_KINDS: Mapping[Any, Kind] = {
    bool: (switch, "true or false"),
    int: (lambda value: whole(value, 0), "a whole number"),
    float: (number, "a number of at least zero"),
    str: (text, "text"),
}


def _choice(valid: tuple[Any, ...], value: Any) -> Any:
    value = "none" if value is None and "none" in valid else value
    if value not in valid:
        raise ValueError
    return value


def _list(kind: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not value:
        raise TypeError
    return tuple(kind(each) for each in value)


def _states(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return tuple(range(whole(value)))
    return _list(lambda each: whole(each, 0), value)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return value
