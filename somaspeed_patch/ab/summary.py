"""The table of a README, made from results.json files, so that no figure is copied by hand.

    python -m somaspeed_patch.ab.summary README.md docs/results/*/*.json

replaces what stands between the lines `<!-- results -->` and `<!-- /results -->`. A row each for the
baseline, the best native cell, and the fastest cell of every arm of ours that is no ablation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import versus
from somaspeed_patch.ab.cells import Cell, speed
from somaspeed_patch.ab.table import Row, markdown_table, rows

Results = Mapping[str, Any]

BEGIN, END = "<!-- results -->", "<!-- /results -->"
_COLUMNS = ("arm", "batch", "samples/s (p20-p80)", "peak GiB", "MFU", "equal batch", "best batch")


def summary(results: Sequence[Results]) -> str:
    """A caption and a table for each."""
    return "\n\n".join(f"{_caption(one)}\n\n{markdown_table(_rows(one))}" for one in results)


def replaced(text: str, new: str) -> str:
    """`text` with what stands between the markers replaced.

    Raises: ValueError: a marker is not there, or not in this order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected a line {BEGIN} and, below it, a line {END}")
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def main(words: Sequence[str]) -> int:
    """Rewrite the file named first by the results named after it."""
    readme = Path(words[0])
    found = [versus.read(Path(word)) for word in words[1:]]
    readme.write_text(replaced(readme.read_text(), summary(found)))
    return 0


def _caption(results: Results) -> str:
    devices, commit = ", ".join(results["machine"]["devices"]), (results["commit"] or "unknown")[:7]
    ran = sorted({cell["repeats"] for cell in _cells(results)})
    repeats = " to ".join(str(number) for number in dict.fromkeys((ran[0], ran[-1])))
    what = f"**{results['recipe']['description']}**: {devices}, {results['date'][:10]}, commit {commit}"
    return f"{what}, {repeats} {'repeat' if ran[-1] == 1 else 'repeats'}"


def _rows(results: Results) -> list[Row]:
    """Of the whole table: these columns, and the rows of these cells."""
    header, *lines = rows(results)
    kept = [header.index(name) for name in _COLUMNS if name in header]
    wanted = {(cell["arm"], cell["batch"]) for cell in _cells(results)}
    chosen = [
        line
        for cell, line in zip(results["cells"], lines, strict=True)
        if (cell["arm"], cell["batch"]) in wanted
    ]
    return [tuple(line[index] for index in kept) for line in (header, *chosen)]


def _cells(results: Results) -> Iterator[Cell]:
    cells = [cell for cell in results["cells"] if "samples_per_second" in cell]
    baseline, best = results["comparison"]["baseline"], results["comparison"]["best_native"]
    ours = dict.fromkeys(cell["arm"] for cell in cells if not cell["native"])
    arms = [baseline, *(arm for arm in ours if arm not in results["recipe"]["ablations"])]
    for arm in arms:
        mine = [cell for cell in cells if cell["arm"] == arm]
        if mine:
            yield max(mine, key=lambda cell: speed(cell))
    yield from (cell for cell in cells if {"arm": cell["arm"], "batch": cell["batch"]} == best)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
