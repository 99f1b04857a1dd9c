"""Which versions of other distributions are installed."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_version = cache(version)  # 1 ms each: patch() asks for up to 50; what is missing may come


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return _version(distribution)
    except PackageNotFoundError:
        return None


def table(distributions: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the distributions that are installed."""
    found = {name: installed(name) for name in distributions}
    return {"python": platform.python_version(), **{name: v for name, v in found.items() if v is not None}}
