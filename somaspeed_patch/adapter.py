"""Adapters as data: what each module of `somaspeed_patch.adapters` declares, and whether its host fits.

An adapter module holds
    REQUIRES   requirement strings of the host, for example ["lerobot>=0.6.1,<0.7"]
    PATCHES    the `Patch`es to apply
    FEATURES   the `Feature`s it reads (optional)
    DEFAULT    False where `patch()` without targets leaves it out (optional)
    OPTIONAL   True where an unfit host is no news: the report says so, but no warning (optional)
    NEEDED_BY  a feature that nothing else serves: while it is set, an unfit host is an error (optional)
    refresh    called before a report is made, to bring in counts that are kept elsewhere (optional)
    release    called by `unpatch()` to drop what the hooks cached (optional)
and imports neither its host nor torch: it is loaded at the start of every child interpreter.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from packaging.requirements import Requirement

from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch
from somaspeed_patch.versions import installed


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One host seam."""

    name: str
    requires: tuple[str, ...]
    patches: tuple[Patch, ...]
    features: tuple[Feature, ...] = ()
    default: bool = True
    optional: bool = False
    needed_by: str | None = None
    refresh: Callable[[], None] | None = None
    release: Callable[[], None] | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """The host modules it patches, each once, in order."""
        return tuple(dict.fromkeys(patch.module for patch in self.patches))

    def site(self, patch: Patch) -> str:
        """The report's name for the place of a patch."""
        return f"{self.name}/{patch.site or patch.name}"

    def of_module(self, module: str) -> list[Patch]:
        """The patches of one host module."""
        return [patch for patch in self.patches if patch.module == module]

    def misfit(self) -> str | None:
        """Why the installed host cannot be patched, or None."""
        return next((why for why in map(_misfit, self.requires) if why), None)

    def host_missing(self) -> bool:
        """Whether a required distribution is not installed at all."""
        return any(installed(Requirement(text).name) is None for text in self.requires)


def _misfit(requirement: str) -> str | None:
    wanted = Requirement(requirement)
    found = installed(wanted.name)
    if found is None:
        return f"needs {requirement}, but {wanted.name} is not installed"
    if not wanted.specifier.contains(found, prereleases=True):
        return f"needs {requirement}, found {found}"
    return None


@cache
def adapters() -> Mapping[str, Adapter]:
    """Every adapter of the package by name; the name is the module's."""
    package = importlib.import_module("somaspeed_patch.adapters")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: _load(name) for name in names}


def every_feature() -> Mapping[Feature, list[str]]:
    """Every feature once, with the names of the adapters that list it."""
    found: dict[Feature, list[str]] = {}
    for adapter in adapters().values():
        for feature in adapter.features:
            found.setdefault(feature, []).append(adapter.name)
    return found


def _load(name: str) -> Adapter:
    module = importlib.import_module(f"somaspeed_patch.adapters.{name}")
    return Adapter(
        name=name,
        requires=tuple(module.REQUIRES),
        patches=tuple(module.PATCHES),
        features=tuple(getattr(module, "FEATURES", ())),
        default=getattr(module, "DEFAULT", True),
        optional=getattr(module, "OPTIONAL", False),
        needed_by=getattr(module, "NEEDED_BY", None),
        refresh=getattr(module, "refresh", None),
        release=getattr(module, "release", None),
    )
