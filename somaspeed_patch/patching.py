"""`patch()`, `unpatch()`, `report()`: which adapters are on, in this process and in those it starts."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import wrapt

from somaspeed_patch import features, registry, sites, versions
from somaspeed_patch.adapter import Adapter, adapters

log = logging.getLogger(__name__)

ENVIRONMENT = "SOMASPEED"  # read by _boot.py in child interpreters
_VERSIONS = ("torch", "triton", "lerobot", "transformers", "accelerate", "deepspeed", "wrapt")

_active: dict[str, Adapter] = {}
_hooked: set[tuple[str, str]] = set()  # import hooks cannot be taken back, so each is registered once
_environment_before: list[str | None] = []


def patch(*targets: str, **settings: Any) -> sites.Report:
    """Switch adapters on; the hosts that are imported already are patched now, the others at their import.

    Args:
        targets: adapter names. None means every default adapter whose host fits; what does not fit is left
            native and said so in the report. A target named explicitly must fit.
        settings: feature values by name, see `somaspeed features`; they apply from the next training step on.

    Returns: the report after patching.

    Raises:
        ValueError: an unknown target or feature, a value of the wrong kind, or a named target whose host
            does not fit.
    """
    chosen = _choose(targets)
    _check_settings(settings, chosen)
    for adapter in adapters().values():
        features.declare(adapter.features)
    with _all_or_nothing():
        features.assign(settings)
        for adapter in chosen:
            if adapter.name not in _active:
                _activate(adapter, explicit=adapter.name in targets)
    _export()
    return snapshot()


def unpatch(*targets: str) -> None:
    """Restore everything that was patched (or only the named adapters), exactly as it was.

    Raises:
        ValueError: an unknown target.
        RuntimeError: somebody patched the same name after us; nothing is undone then.
    """
    _known(targets)
    names = [name for name in _active if not targets or name in targets]
    registry.revert(*names)
    for name in names:
        adapter = _active.pop(name)
        if adapter.release is not None:
            adapter.release()
        _mark(adapter, sites.NATIVE, "unpatched")
    if not _active:
        features.reset()
    _export()


@contextmanager
def patched(*targets: str, **settings: Any) -> Iterator[sites.Report]:
    """`patch` on entry; on exit the adapters it switched on are off again and the features as before."""
    active, values = set(_active), features.values()
    try:
        yield patch(*targets, **settings)
    finally:
        added = [name for name in _active if name not in active]
        if added:
            unpatch(*added)
        if active:
            features.assign(values)
            _export()


@contextmanager
def _all_or_nothing() -> Iterator[None]:
    """Take the adapters and feature values back to where they were if the body raises."""
    active, values = set(_active), features.values()
    try:
        yield
    except BaseException:
        for name in [name for name in _active if name not in active]:
            registry.revert(name)
            del _active[name]
        features.assign(values)
        raise


def snapshot() -> sites.Report:
    """Every site with its counts so far: the public `report()`."""
    for adapter in _active.values():
        _mark_features(adapter)
        if adapter.refresh is not None:
            adapter.refresh()
    return sites.Report(
        sites=tuple(replace(site) for site in sites.every()),
        features=features.values(),
        versions=versions.table(_VERSIONS),
    )


def active() -> Mapping[str, Adapter]:
    """The adapters that are switched on, by name."""
    return _active


def _choose(targets: tuple[str, ...]) -> list[Adapter]:
    _known(targets)
    if not targets:
        return [adapter for adapter in adapters().values() if adapter.default]
    chosen = [adapters()[name] for name in targets]
    for adapter in chosen:
        _refuse(adapter, adapter.misfit())
    return chosen


def _refuse(adapter: Adapter, why: str | None) -> None:
    if why:
        raise ValueError(
            f'{adapter.name}: {why}; patch() leaves it native, patch("{adapter.name}") stops here'
        )


def _is_needed(adapter: Adapter) -> bool:
    """Whether a feature is set that only this adapter serves: to train on without it would be another run."""
    return adapter.needed_by is not None and bool(features.value(adapter.needed_by))


def _known(targets: tuple[str, ...]) -> None:
    for name in targets:
        if name not in adapters():
            raise ValueError(features.unknown("target", name, adapters()))


def _check_settings(settings: Mapping[str, Any], chosen: list[Adapter]) -> None:
    features.check(settings, [feature for adapter in adapters().values() for feature in adapter.features])
    reachable = {feature.name for adapter in (*chosen, *_active.values()) for feature in adapter.features}
    for name in settings:
        if name not in reachable:
            owner = next(a.name for a in adapters().values() if name in {f.name for f in a.features})
            raise ValueError(
                f'patch: feature {name} belongs to "{owner}"; name it as a target too: patch("{owner}", ...)'
            )


def _activate(adapter: Adapter, explicit: bool) -> None:
    why = adapter.misfit()
    if why:
        _mark(adapter, sites.NATIVE, why)
        if _is_needed(adapter):
            raise ValueError(f"{adapter.name}: {why}, so {adapter.needed_by} cannot be had; drop it")
        log.log(
            logging.INFO if adapter.optional or adapter.host_missing() else logging.WARNING,
            "%s: %s; left native",
            adapter.name,
            why,
        )
        return
    _active[adapter.name] = adapter
    for _, site in _feature_sites(adapter):
        site.status, site.reason = sites.PATCHED, ""
    for module in adapter.modules:
        if module in sys.modules:
            _apply(adapter, module, explicit or _is_needed(adapter))
        else:
            _mark(adapter, sites.WAITING, f"applies when {module} is imported", module)
            _hook(adapter.name, module)


def _hook(name: str, module: str) -> None:
    if (name, module) in _hooked:
        return
    _hooked.add((name, module))

    def imported(_: Any) -> None:
        if name in _active:  # unpatched meanwhile: nothing to do
            _apply(_active[name], module, explicit=_is_needed(_active[name]))

    wrapt.register_post_import_hook(imported, module)


def _apply(adapter: Adapter, module: str, explicit: bool) -> None:
    """Patch one imported module. A symbol this host lacks takes the whole adapter back to native."""
    try:
        registry.apply(adapter.name, adapter.of_module(module))
    except Exception as error:  # an import hook that raises would fail the host's own import
        registry.revert(adapter.name)
        _active.pop(adapter.name, None)
        why = f"{module} is not as expected ({type(error).__name__}: {error})"
        _mark(adapter, sites.NATIVE, why)
        if explicit:
            raise ValueError(f"{adapter.name}: {why}; patch() leaves it native") from error
        log.warning("%s: %s; left native", adapter.name, why)
    else:
        _mark(adapter, sites.PATCHED, "", module)


def _mark(adapter: Adapter, status: str, reason: str, module: str | None = None) -> None:
    """Set the status of the sites of one host module's patches, or of all and of the features with them."""
    for one in adapter.patches:
        if module in (None, one.module):
            site = sites.site(adapter.site(one), one.target)
            site.status, site.reason = status, reason
    if module is None:
        for _, site in _feature_sites(adapter):
            site.status, site.reason = status, reason


def _mark_features(adapter: Adapter) -> None:
    """A switched off feature is native; switched on again, it is patched."""
    for feature, site in _feature_sites(adapter):
        if not features.value(feature.name):
            site.status, site.reason = sites.NATIVE, "off"
        elif site.reason == "off":
            site.status, site.reason = sites.PATCHED, ""


def _feature_sites(adapter: Adapter) -> list[tuple[features.Feature, sites.Site]]:
    return [(one, sites.site(f"{adapter.name}/{one.name}", one.changes)) for one in adapter.features]


def _export() -> None:
    """Tell child interpreters, through the environment and the package's .pth file, to patch the same."""
    if not _environment_before:
        _environment_before.append(os.environ.get(ENVIRONMENT))
    if _active:
        mine = {feature.name for adapter in _active.values() for feature in adapter.features}
        values = {name: value for name, value in features.values().items() if name in mine}
        os.environ[ENVIRONMENT] = json.dumps({"targets": sorted(_active), "features": values})
        return
    before = _environment_before.pop()
    if before is None:
        os.environ.pop(ENVIRONMENT, None)
    else:
        os.environ[ENVIRONMENT] = before
