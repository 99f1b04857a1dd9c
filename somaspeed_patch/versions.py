"""Which versions of other distributions are installed."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def table(distributions: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the distributions that are installed."""
    found = {name: installed(name) for name in distributions}
    return {"python": platform.python_version(), **{name: v for name, v in found.items() if v is not None}}
