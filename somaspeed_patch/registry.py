"""The only place that writes into somebody else's module: apply patches, and put everything back."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import wrapt

_ABSENT: Any = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of the host to replace."""

    module: str
    """Where the attribute is found."""
    name: str
    """Dotted name in the module."""
    make: Callable[[Any], Any]
    """`make(original)` is the replacement; what it raises leaves the whole adapter native."""
    site: str | None = None
    """The line of the report it belongs to, where several patches or a feature share one; default: `name`."""

    @property
    def target(self) -> str:
        """`module:name`, as the report prints it."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, eq=False)  # compared by identity: a wrapt proxy equals what it wraps
class _Applied:
    owner: str
    patch: Patch
    parent: Any
    attribute: str
    before: Any  # the entry of vars(parent), _ABSENT where it was inherited
    after: Any

    @property
    def place(self) -> str:
        return f"{getattr(self.parent, '__name__', self.parent)}.{self.attribute}"


_ledger: list[_Applied] = []


def with_parameters(function: Any, expected: Sequence[str], optional: Sequence[str] = ()) -> None:
    """For `make`: refuse a host function whose parameters are not as this adapter knows them.

    Args:
        expected: the names it must have, in order.
        optional: names that a later version adds behind them; the hook has to look whether they are used.

    Raises: AttributeError: which makes the adapter leave this host native.
    """
    found = list(inspect.signature(function).parameters)
    if found[: len(expected)] != list(expected) or set(found[len(expected) :]) - set(optional):
        name = getattr(function, "__qualname__", function)
        raise AttributeError(f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})")


def handed(module: str, hook: str, expected: Sequence[str] = ()) -> Callable[[Any], Any]:
    """A `make` that hands the call to a hook as wrapt calls it.

    Args:
        module: imported when the patch is applied, not before.
        hook: its function `hook(wrapped, instance, args, kwargs)`.
        expected: as of `with_parameters`; empty: whatever the host's function takes.
    """

    def make(original: Any) -> Any:
        if expected:
            with_parameters(original, expected)
        return wrapt.FunctionWrapper(original, getattr(importlib.import_module(module), hook))

    return make


def function(original: Any, hook: Callable[..., Any]) -> Any:
    """For `make`: `hook(wrapped, instance, args, kwargs)` as wrapt calls it, but from a plain function.

    For a policy's forward: under mixed precision accelerate builds on `model.forward.__func__`, with which a
    wrapt proxy hands out the host's function.
    """

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Bound as Python would bind it: `original` may be the wrapt proxy of another adapter.
        return hook(original.__get__(self, type(self)), self, args, kwargs)

    return replacement


def apply(owner: str, patches: Sequence[Patch]) -> None:
    """Apply all of `patches` for `owner`, or none: the first failure undoes what this call had applied.

    Raises: AttributeError, ImportError: a module or name does not exist in this version of the host.
    """
    mark = len(_ledger)
    try:
        for patch in patches:
            _ledger.append(_put(owner, patch))
    except BaseException:
        for done in reversed(_ledger[mark:]):
            _take_out(done)
        raise


def revert(*owners: str) -> None:
    """Undo everything applied for `owners`, newest first; what other owners put on top stays there.

    Nothing is undone unless everything can be: a name that somebody else patched after us is left alone, with
    all others.

    Raises: RuntimeError: names the attributes that were patched again since.
    """
    mine = [done for done in _ledger if done.owner in owners]
    foreign = [done.place for done in mine if not _ours_is_on_top(done)]
    if foreign:
        raise RuntimeError(
            f"unpatch: {', '.join(foreign)} was patched again by someone else since; "
            "undo that first, then unpatch()"
        )
    for done in reversed(mine):
        _take_out(done)


def _put(owner: str, patch: Patch) -> _Applied:
    parent, attribute, original = wrapt.resolve_path(patch.module, patch.name)
    before, after = vars(parent).get(attribute, _ABSENT), patch.make(original)
    setattr(parent, attribute, after)
    return _Applied(owner, patch, parent, attribute, before, after)


def _at(done: _Applied) -> list[_Applied]:
    """The entries at the same place, oldest first."""
    return [e for e in _ledger if e.parent is done.parent and e.attribute == done.attribute]


def _ours_is_on_top(done: _Applied) -> bool:
    return vars(done.parent).get(done.attribute, _ABSENT) is _at(done)[-1].after


def _take_out(done: _Applied) -> None:
    """Undo one entry; those on top of it are taken off first, and made anew on what lay below it."""
    there = _at(done)
    above = there[there.index(done) + 1 :]
    for entry in reversed([done, *above]):
        if entry.before is _ABSENT:
            delattr(entry.parent, entry.attribute)
        else:
            setattr(entry.parent, entry.attribute, entry.before)
    _ledger.remove(done)
    for entry in above:
        _ledger[_ledger.index(entry)] = _put(entry.owner, entry.patch)
