"""What has to be closed, as a context manager."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Closes")


class Closes:
    """Closed at the end of a `with` block, whatever happens in it."""

    def close(self) -> None:
        """Give up what is held; calling it again is harmless."""
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
