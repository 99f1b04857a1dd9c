"""The bar while an A/B runs, on stderr, so that stdout stays the result's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from somaspeed_patch.ab.child import Watch
from somaspeed_patch.ab.recipe import Recipe

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def bar(recipe: Recipe) -> Iterator[Watch]:
    """A bar over all updates of all runs, with the time left; gives what the runner calls."""
    done: dict[str, int] = {}
    with _progress() as progress:
        total = recipe.repeats * sum(recipe.updates(arm) for arm, _ in recipe.cells)
        task = progress.add_task(recipe.name, total=total)

        def watch(label: str, updates: int) -> None:
            done[label] = updates
            progress.update(task, completed=sum(done.values()), description=f"{recipe.name}: {label}")

        yield watch


@contextmanager
def counter(name: str) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """A bar over repeats of cells, with the time left; gives what prints a line and what moves it."""
    with _progress() as progress:
        task = progress.add_task(name, total=None)

        def say(line: str) -> None:
            progress.console.print(line, highlight=False, markup=False)

        yield say, lambda done, total: progress.update(task, completed=done, total=total)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=600)
