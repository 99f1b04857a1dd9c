"""Read YAML mappings, with errors that name file, line, key, what was expected, the nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe that cannot be run; the text says what to change."""


class Section:
    """One mapping of the file: typed access by key, and the line of every key."""

    def __init__(self, file: str, node: yaml.MappingNode, key: str) -> None:
        self._file, self._node, self._key = file, node, key
        self._nodes: dict[str, yaml.Node] = {}
        self._lines: dict[str, int] = {}
        for entry, value in node.value:
            self._add(entry, value)

    @classmethod
    def of_file(cls, path: Path) -> Section:
        """The top level of a YAML file."""
        try:
            node = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise RecipeError(f"{path}:{line}: not YAML: {error.problem}") from error
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{path}:1: expected a mapping of keys, see recipes/README.md")
        return cls(str(path), node, "")

    @property
    def names(self) -> tuple[str, ...]:
        """The keys, in the order of the file."""
        return tuple(self._nodes)

    def allow(self, valid: Iterable[str]) -> None:
        """Refuse every key that is not in `valid`."""
        valid = list(valid)
        for key in self._nodes:
            if key not in valid:
                self.fail(key, f"unknown key{nearest(key, valid)}")

    def get(self, key: str, kind: Callable[[Any], T], expected: str, default: T | None = None) -> T:
        """The value of `key` as `kind` makes it; without a default the key must be there."""
        if key not in self._nodes:
            if default is None:
                self.fail(key, f"missing; expected {expected}{nearest(key, self._nodes)}")
            return default
        value = self.plain(key)
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            text = str(error) if isinstance(error, _Refused) else f"expected {expected}, but is {value!r}"
            self.fail(key, text, error)

    def plain(self, key: str) -> Any:
        """The value of `key` as plain Python data."""
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(self._nodes[key])
        finally:
            loader.dispose()

    def section(self, key: str, expected: str) -> Section | None:
        """The mapping at `key`, None when the key is absent."""
        if key not in self._nodes:
            return None
        node = self._nodes[key]
        if not isinstance(node, yaml.MappingNode):
            self.fail(key, f"expected {expected}, but is {self.plain(key)!r}")
        return Section(self._file, node, self._path(key))

    def fail(self, key: str, text: str, cause: Exception | None = None) -> NoReturn:
        """Raise with file, line and full key."""
        line = self._lines.get(key, self._node.start_mark.line + 1)
        raise RecipeError(f"{self._file}:{line}: {self._path(key)}: {text}") from cause

    def _path(self, key: str) -> str:
        return f"{self._key}.{key}" if self._key else key

    def _add(self, entry: yaml.Node, value: yaml.Node) -> None:
        name = entry.value if isinstance(entry, yaml.ScalarNode) else "?"
        known, self._lines[name] = name in self._lines, entry.start_mark.line + 1
        if name == "?" or known:
            self.fail(name, "given twice; keep one" if known else "a key must be one word")
        self._nodes[name] = value


class _Refused(ValueError):
    """A converter's own error text."""


def nearest(key: str, valid: Iterable[str]) -> str:
    """`; did you mean X? valid: ...`, for the end of an error text."""
    valid = sorted(valid)
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{hint}; valid: {', '.join(valid)}"


def text(value: Any) -> str:
    """A string, as written."""
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def whole(value: Any, least: int = 1) -> int:
    """A whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TypeError
    return value


def number(value: Any) -> float:
    """A number of at least zero; YAML reads 1e-5, without a dot, as a string, which is accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    converted = float(value)
    if not 0 <= converted < float("inf"):
        raise ValueError
    return converted


def texts(value: Any) -> tuple[str, ...]:
    """A list of words; numbers are taken as written by YAML."""
    if not isinstance(value, list):
        raise TypeError
    return tuple(_word(item) for item in value)


def variables(value: Any) -> Mapping[str, str]:
    """Environment variables: names to words."""
    if not isinstance(value, dict):
        raise TypeError
    return {text(name): _word(item) for name, item in value.items()}


def _word(item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, (str, int, float)):
        raise _Refused(f"expected words, but one is {item!r}; quote it")
    return str(item)


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError
    return value


def wholes(value: Any) -> tuple[int, ...]:
    """A list of whole numbers from 1 on, each once."""
    if not isinstance(value, list) or not value or len(set(value)) < len(value):
        raise TypeError
    return tuple(whole(item) for item in value)
