"""What `somaspeed ab` does with results that exist: compare two, write pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import table, versus

log = logging.getLogger(__name__)


def compare(old: Path, new: Path, *, check: bool, allow: float) -> int:
    """Print both side by side; with `check` 4 where a ratio of `old` drops by more than the part `allow`.

    Raises: ValueError: a file is no results.json.
    """
    from rich.console import Console
    from rich.table import Table

    before, after = versus.read(old), versus.read(new)
    header, *lines = versus.lines(before, after)
    shown = Table(*header)
    for line in lines:
        shown.add_row(*line)
    console = Console()
    console.print(shown)
    for difference in versus.differences(before, after):
        console.print(difference, highlight=False, markup=False)
    drops = versus.dropped(before, after, allow) if check else []
    for drop in drops:
        console.print(f"DROPPED {drop}", highlight=False, markup=False)
    return 4 if drops else 0


def render(paths: Sequence[Path], out: Path) -> int:
    """Write index.html and results.md of these results into `out`.

    Raises: ValueError: a file is no results.json.
    """
    found = [versus.read(path) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    print(f"written: {', '.join(map(str, write_pages(found, out)))}")
    return 0


def write_pages(results: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """results.md, and where matplotlib is installed index.html; what was written."""
    from somaspeed_patch.ab_page import page

    table.write_markdown(results, out / "results.md")
    written = [out / "results.md"]
    try:
        page.write(results, out / "index.html", title=_title(results))
        written.append(out / "index.html")
    except page.PageError as error:
        log.warning("%s", error)
    return written


def _title(results: Sequence[Mapping[str, Any]]) -> str:
    return "somaspeed ab: " + ", ".join(dict.fromkeys(found["recipe"]["name"] for found in results))
