"""The bar while an A/B runs, on stderr, so that stdout stays the result's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from somaspeed_patch.ab.recipe import Recipe
from somaspeed_patch.ab.runner import Watch


@contextmanager
def bar(recipe: Recipe) -> Iterator[Watch]:
    """A bar over all updates of all runs, with the time left; gives what the runner calls."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as progress:
        total = recipe.repeats * sum(recipe.updates(arm) for arm in recipe.arms)
        task = progress.add_task(recipe.name, total=total)

        def watch(label: str, updates: int) -> None:
            done[label] = updates
            progress.update(task, completed=sum(done.values()), description=f"{recipe.name}: {label}")

        yield watch
