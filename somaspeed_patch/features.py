"""What can be switched: each adapter declares its features as data, `patch()` sets them, hooks read them.

A feature's value is read at call time, never captured, so `patch(compile=True)` after `patch()` takes
effect at the next step. All features are on one flat namespace; what several policies have in common is one
feature, declared here and listed by each of their adapters.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | str | None


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One switch of an adapter."""

    name: str
    """Keyword of `patch()` and, with dashes, flag of `somaspeed run`."""
    changes: str
    """What it does, in one line of the feature table."""
    exact: bool
    """True: loss and gradients stay within the native run's own rounding."""
    default: Value
    """Value without a keyword; a feature that is not exact must be off (False or None)."""
    check: Callable[[Value], object] | None = None
    """Raises ValueError for a value that cannot be, when it is set and not when it is used."""

    def __post_init__(self) -> None:
        if not self.exact and self.default not in (False, None):
            raise ValueError(
                f"feature {self.name}: changes numbers, so its default must be off, not {self.default!r}"
            )


FROZEN_PREFIX = Feature(
    name="frozen_prefix",
    changes="run the frozen vision-language side once, without gradient, its last layer only for K and V",
    exact=True,
    default=True,
)
CAST_ONCE = Feature(
    name="cast_once",
    changes="cast frozen fp32 weights to the autocast dtype once, not at every call",
    exact=True,
    default=True,
)
COMPILE = Feature(
    name="compile",
    changes="torch.compile the layers of the frozen stack and of the expert (also on with compile_model)",
    exact=True,
    default=False,
)

DEFERRED_METRICS = Feature(
    name="deferred_metrics",
    changes="MolmoAct2, GR00T: read the step's metrics when somebody looks, not between forward and backward",
    exact=True,
    default=True,
)

TRAIN_MODE = Feature(
    name="train_mode",
    changes="MolmoAct2, GR00T: train() at every step without setting every module's mode one by one",
    exact=True,
    default=True,
)

LAYOUT = Feature(
    name="layout",
    changes="split the training over ranks: dp_replicate=2,dp_shard=4 and reshard=, frozen=",
    exact=True,
    default=None,
)

_values: dict[str, Value] = {}


def value(name: str) -> Value:
    """The current value of a feature; None where nothing is patched: somebody kept a hook from before."""
    return _values.get(name)


def values() -> dict[str, Value]:
    """All current values by name, a copy."""
    return dict(_values)


def declare(declared: Iterable[Feature]) -> None:
    """Make features known at their defaults; what is set already stays."""
    for feature in declared:
        _values.setdefault(feature.name, feature.default)


def assign(settings: Mapping[str, Value]) -> None:
    """Set the named features, which `check` has accepted."""
    _values.update(settings)


def reset() -> None:
    """Forget every value; the next `declare` starts from the defaults."""
    _values.clear()


def check(settings: Mapping[str, Any], declared: Iterable[Feature]) -> None:
    """Refuse unknown names and values of the wrong kind.

    Raises: ValueError: names the valid features, or the kind of value that was expected.
    """
    known = {feature.name: feature for feature in declared}
    for name, given in settings.items():
        if name not in known:
            raise ValueError(unknown("feature", name, known))
        wants_switch = isinstance(known[name].default, bool)
        if wants_switch and not isinstance(given, bool):
            raise ValueError(f"patch: feature {name} must be True or False, but is {given!r}")
        if not wants_switch and not (given is None or isinstance(given, str)):
            raise ValueError(f"patch: feature {name} must be a string or None, but is {given!r}")
        further = known[name].check
        if further is not None:
            further(given)


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """The error text for a name that does not exist: the nearest one, then all of them."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"patch: no {kind} is called {name!r}; {hint}valid: {', '.join(valid) or 'none'}"
