"""Our features as flags of LeRobot's own commands: `lerobot-train ARGS --somaspeed.layout=dp_shard=4`.

LeRobot parses its command line by its configuration's fields and refuses what is none. Before it does, it
takes the arguments out that it handles itself, in one function of its parser; there ours are taken out too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from somaspeed_patch import features, patching
from somaspeed_patch.adapter import every_feature

_PREFIX = "--somaspeed."
_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def filter_path_args(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """parser.filter_path_args(fields, args): the host's, without our flags, which are set."""
    rest: list[str] = wrapped(*args, **kwargs)
    settings, left = taken_out(rest)
    if settings:
        patching.patch(*patching.active(), **settings)
    return left


def taken_out(arguments: Sequence[str]) -> tuple[dict[str, features.Value], list[str]]:
    """The features set by `--somaspeed.NAME=VALUE` or `--somaspeed.NAME VALUE`, and all other arguments.

    A switch without a value is on.

    Raises: ValueError: an unknown feature, or a value of another kind.
    """
    known = {feature.name: feature for feature in every_feature()}
    settings: dict[str, features.Value] = {}
    left: list[str] = []
    words = iter(enumerate(arguments))
    for index, word in words:
        if not word.startswith(_PREFIX):
            left.append(word)
            continue
        flag, given, value = word.removeprefix(_PREFIX).partition("=")
        name = flag.replace("-", "_")
        if name not in known:
            raise ValueError(features.unknown("feature", name, known))
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        if not given and not following.startswith("--"):
            value = next(words)[1]
        settings[name] = _value(known[name], value)
    return settings, left


def _value(feature: features.Feature, text: str) -> features.Value:
    if not isinstance(feature.default, bool):
        return text or None
    if text == "":
        return True
    if text.lower() not in _SWITCHES:
        raise ValueError(f"--somaspeed.{feature.name} takes true or false, but was given {text!r}")
    return _SWITCHES[text.lower()]
