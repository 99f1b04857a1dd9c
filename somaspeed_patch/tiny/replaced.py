"""Names of a host that hold something else for a while, and are given back.

Scaffolding for tests and demos, apart from `patch()`: undoing a speed-up must not undo the tiny model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaced:
    """Replaced names, in the order in which they were replaced."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        """Let `owner.name`, of a module or class, hold what `change` makes of what it holds."""
        before = getattr(owner, name)
        self._before.append((owner, name, before))
        setattr(owner, name, change(before))

    def restore(self) -> None:
        """Give all names back, the last replaced first; nothing happens when none is replaced."""
        while self._before:
            owner, name, before = self._before.pop()
            setattr(owner, name, before)
