"""Results as a table and sentences: on the terminal with rich, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.cells import Cell, cell_name, phases_of
from somaspeed_patch.ab.words import findings

if TYPE_CHECKING:
    from rich.table import Table

Results = Mapping[str, Any]
Row = tuple[str, ...]


def rows(results: Results, brief: bool = False) -> list[Row]:
    """Header and a line a cell; `-` where there is no figure. Equal and best batch have their own columns.

    Args:
        brief: only the columns that fit a terminal of 80 characters.
    """
    columns = [
        (label, show)
        for label, show in (_BRIEF if brief else _COLUMNS)
        if any(_shown(show, cell) for cell in results["cells"])
    ]
    header = ("arm", "batch", *(label for label, _ in columns), "equal batch", "best batch")
    return [header, *(_row(cell, columns, results["comparison"], brief) for cell in results["cells"])]


def phase_rows(results: Results) -> list[Row]:
    """Header and a line for each cell that was measured: ms of each phase of a step."""
    cells = [cell for cell in results["cells"] if cell.get("phase_seconds")]
    phases = phases_of(cells)
    lines = [
        (
            cell["arm"],
            _batch(cell),
            *(str(figures.milliseconds(cell["phase_seconds"].get(phase, 0.0))) for phase in phases),
        )
        for cell in cells
    ]
    return [("phases, ms", "batch", *phases), *lines] if lines else []


def sentences(results: Results, brief: bool = False) -> list[str]:
    """What must be said beside the tables: claims, what withholds them, gates, what ran, where it was.

    Args:
        brief: of what ran only what did not run through our code.
    """
    cells = results["cells"]
    said = findings(results)
    said += [f"{_name(cell)}: {note}" for cell in cells for note in cell["notes"]]
    said += [line for name, verdict in results["gate"].items() for line in _gate_sentences(name, verdict)]
    said += [_loader_sentence(cell) for cell in cells if cell["loader"]]
    ran = [line for cell in cells for line in _site_sentences(_name(cell), cell["sites"])]
    return [*said, *(_left_to_the_host(cells) if brief else ran), where(results)]


def terminal(results: Results) -> list[Table]:
    """The tables for a terminal."""
    from rich.table import Table

    found = []
    for lines, title in (
        (_without_empty(rows(results, brief=True)), results["recipe"]["description"]),
        (phase_rows(results), None),
    ):
        if lines:
            table = Table(title=title)
            for column in lines[0]:
                table.add_column(column, overflow="fold", no_wrap=column == lines[0][0])
            for line in lines[1:]:
                table.add_row(*line)
            found.append(table)
    return found


def _without_empty(lines: Sequence[Row]) -> list[Row]:
    """Without the columns in which no line has anything."""
    kept = [i for i, _ in enumerate(lines[0]) if any(line[i] != "-" for line in lines[1:])]
    return [tuple(line[i] for i in kept) for line in lines]


def markdown(results: Results) -> str:
    """The same as Markdown."""
    tables = [markdown_table(lines) for lines in (rows(results), phase_rows(results)) if lines]
    notes = "\n".join(f"- {sentence}" for sentence in sentences(results))
    return "\n\n".join([f"# {results['recipe']['description']}", *tables, notes]) + "\n"


def write_markdown(results: Sequence[Results], path: Path) -> None:
    """Write `markdown` of each to a file, replacing an older one as a whole."""
    draft = path.with_name(path.name + ".part")
    draft.write_text("\n".join(markdown(one) for one in results))
    draft.replace(path)


def markdown_table(lines: Sequence[Row]) -> str:
    """Header and lines as a table of Markdown."""
    header, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, tuple("---" for _ in header), *body))


Show = Callable[[Cell], str]


def _with_spread(fields: Mapping[str, Any]) -> str:
    median, low, high = (str(figures.plain(fields[key])) for key in ("median", "p20", "p80"))
    return f"{median} ({low}-{high})"


_COLUMNS: list[tuple[str, Show]] = [
    ("samples/s (p20-p80)", lambda cell: _with_spread(cell["samples_per_second"])),
    ("step, ms", lambda cell: str(figures.milliseconds(cell["step_seconds"]["median"]))),
    ("peak GiB", lambda cell: str(figures.plain(cell["peak_allocated_gib"]))),
    ("GPU busy", lambda cell: str(figures.percent(cell["busy_share"]))),
    ("comm., ms", lambda cell: str(figures.milliseconds(cell["communication_seconds"]))),
    ("TFLOP/s", lambda cell: str(figures.plain(cell["tflops"]))),
    ("MFU", lambda cell: str(figures.percent(cell["mfu"]))),
    ("repeats", lambda cell: str(cell["repeats"])),
]
_BRIEF: list[tuple[str, Show]] = [
    ("samples/s", lambda cell: str(figures.plain(cell["samples_per_second"]["median"]))),
    *_COLUMNS[1:3],
]


def _row(cell: Cell, columns: Sequence[tuple[str, Show]], comparison: Mapping[str, Any], brief: bool) -> Row:
    arm = comparison["arms"][cell["arm"]]
    equal = [one for one in arm["equal_batch"] if one["batch"] == cell["batch"]]
    best = arm["best_batch"]
    mine = best is not None and best["batch"] == cell["batch"]
    figures = [_shown(show, cell) or "-" for _, show in columns]
    return (
        cell["arm"],
        _batch(cell),
        *figures,
        _ratio(equal[0], brief) if equal else "-",
        _ratio(best, brief) if mine else "-",
    )


def _shown(show: Show, cell: Cell) -> str:
    try:
        return show(cell)
    except (KeyError, TypeError):  # a failed run or a red gate leaves the figure out
        return ""


def _ratio(found: Mapping[str, Any], brief: bool) -> str:
    """With its interval; brief: without the cell it is a ratio to, which the sentences name."""
    low, high = (found[end] and figures.ratio(found[end], unit="") for end in ("low", "high"))
    times = f"{figures.ratio(found['ratio'])}" + (f" ({low}-{high})" if low and high else "")
    at = f" at {found['against_batch']}" if found.get("against_batch") else ""
    return times if brief else f"{times} of {found['against']}{at}"


def _batch(cell: Cell) -> str:
    return "-" if cell["batch"] is None else str(cell["batch"])


def _name(cell: Cell) -> str:
    return cell_name(cell["arm"], cell["batch"])


def _loader_sentence(cell: Cell) -> str:
    found = cell["loader"]
    real, cached = (figures.plain(found[key]) for key in ("samples_per_second", "samples_per_second_cached"))
    both = f"{real} samples/s with the real loader, {cached} with cached batches"
    return f"{_name(cell)}: {both}: {found['bound']}-bound"


def _gate_sentences(name: str, verdict: Mapping[str, Any]) -> Iterator[str]:
    if not verdict["green"]:
        yield f"{name}: the parity gate is RED, so no speed is given"
        yield from (f"  {reason}" for reason in verdict["reasons"])
    elif "worst" in verdict:
        yield from _updates_sentences(name, verdict)
    else:
        worst = verdict["worst_parameter"]
        used = f"{worst['share']:.2f} ({worst['name']})"
        yield f"{name}: the parity gate is green; largest use of its allowance: {used}"


def _updates_sentences(name: str, verdict: Mapping[str, Any]) -> Iterator[str]:
    worst = ", ".join(f"{quantity} {found['relative']:.2g}" for quantity, found in verdict["worst"].items())
    noise = ", ".join(f"{quantity} {found['relative']:.2g}" for quantity, found in verdict["noise"].items())
    yield (
        f"{name}: the parity gate is green; largest relative difference at any update: {worst}; "
        f"between repeats of the baseline: {noise or 'not measured, one repeat'}"
    )
    if gradient := verdict["gradient"]:
        yield (
            f"{name}: {gradient['parameters']} gradients of one update compared; the nearest to its "
            f"allowance uses {gradient['share']:.2g} of it ({gradient['name']})"
        )
    yield from (f"{name}: {note}" for note in verdict["notes"])


def _site_sentences(name: str, sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """What really ran in a cell: calls of our code, and calls left to the host with the last reason."""
    lines = []
    for site in sites:
        if site["native_calls"] or site["fallbacks"] or (site["calls"] and site["site"] != "step_recorder"):
            why = site["last_fallback"] or site["reason"]
            counts = f"{site['calls']} calls, {site['native_calls']} native, {site['fallbacks']} fallbacks"
            lines.append(f"{name} ran {site['site']}: {counts}" + (f" ({why})" if why else ""))
    return lines


def _left_to_the_host(cells: Sequence[Cell]) -> list[str]:
    """A line for each site and reason, with the arms in which no call went through our code."""
    arms: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for site in cell["sites"]:
            if not site["calls"] and site["native_calls"]:
                arms.setdefault((site["site"], site["reason"]), []).append(cell["arm"])
    return [
        f"{site} was left to the host in {', '.join(dict.fromkeys(names))}: {why}"
        for (site, why), names in arms.items()
    ]


# Of the step alone, what is discarded comes before the updates that are counted; a cell that the process has
# run already needs one.
_DISCARDED = {"trainer": "the first {} discarded", "step": "up to {} more before them discarded"}


def where(results: Results) -> str:
    """Devices, processor, versions, length of a run, commit."""
    machine, recipe = results["machine"], results["recipe"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    updates = f"{recipe['steps']} updates a run, {_DISCARDED[results['kind']].format(recipe['discard'])}"
    devices, cores = ", ".join(machine["devices"]) or "no device", f"{machine['cores']} cores"
    drivers = sorted({gpu["driver"] for gpu in machine["gpus"]})
    driver = f"driver {', '.join(drivers)}; " if drivers else ""
    commit = f"commit {results['commit'] or 'unknown'}"
    return "; ".join([devices, f"{driver}{machine['cpu']}, {cores}", versions, updates, commit])
