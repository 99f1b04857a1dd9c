"""What was patched, what ran, and why not: one `Site` for each place that can run our code or the host's.

A site's `status` says what was arranged (`patched`, `native`, `waiting` for an import). Its counters say
what happened: `calls` through our code, `native_calls` that took the host's path for `reason`, `fallbacks`
that started on our path, failed, and were redone by the host.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from somaspeed_patch._version import __version__

PATCHED, NATIVE, WAITING = "patched", "native", "waiting"
_LONG = 30  # columns


@dataclass(kw_only=True)
class Site:
    """One place of the host, and what became of it."""

    site: str
    """`adapter` or `adapter/feature`."""
    target: str
    """The host's own name for the place."""
    status: str = WAITING
    reason: str = ""
    """Why it is native, or the last reason for which a call was left to the host."""
    calls: int = 0
    native_calls: int = 0
    fallbacks: int = 0
    last_fallback: str | None = None

    def ran(self) -> None:
        """Our code served one call."""
        self.calls += 1

    def declined(self, reason: str) -> None:
        """The host served one call, because of `reason`."""
        self.native_calls += 1
        self.reason = reason

    def failed(self, error: BaseException) -> None:
        """Our code raised; the host served the call."""
        self.fallbacks += 1
        self.last_fallback = f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """A snapshot of every site, printable and serialisable."""

    sites: tuple[Site, ...]
    features: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"somaspeed": version, "versions": {...}, "features": {...}, "sites": [...]}."""
        return {
            "somaspeed": __version__,
            "versions": dict(self.versions),
            "features": dict(self.features),
            "sites": [asdict(site) for site in self.sites],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` as JSON, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read what `save` wrote."""
        data = json.loads(Path(path).read_text())
        sites = tuple(Site(**site) for site in data["sites"])
        return cls(sites=sites, features=data["features"], versions=data["versions"])

    def __str__(self) -> str:
        rows = [("site", "status", "calls", "native", "fallbacks", "why"), *_rows(self.sites)]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        padded = [[cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in padded)


def _rows(sites: Iterable[Site]) -> Iterator[tuple[str, ...]]:
    """The table's lines; a long reason is written once for the sites that share it."""
    above = ""
    for site in sites:
        *cells, why = _row(site)
        yield (*cells, "(same)" if why == above and len(why) > _LONG else why)
        above = why


def _row(site: Site) -> tuple[str, str, str, str, str, str]:
    why = f"fell back: {site.last_fallback}" if site.last_fallback else site.reason
    counts = [str(n) for n in (site.calls, site.native_calls, site.fallbacks)]
    return site.site, site.status, counts[0], counts[1], counts[2], why


_sites: dict[str, Site] = {}


def site(name: str, target: str = "") -> Site:
    """The site called `name`, made at its first mention."""
    return _sites.setdefault(name, Site(site=name, target=target))


def every() -> tuple[Site, ...]:
    """Every site mentioned so far, in the order of mention."""
    return tuple(_sites.values())


def clear() -> None:
    """Forget all sites and their counts."""
    _sites.clear()


def write_json(path: str | Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
