"""The tables of the page as plain data: every figure of results.json, with its value beside its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from somaspeed_patch.ab import figures
from somaspeed_patch.ab.ablations import Ablation
from somaspeed_patch.ab.cells import phases_of, speed
from somaspeed_patch.ab.figures import Sentence, Shown
from somaspeed_patch.ab.words import SAME, batch_words, blocked, interval, verdict
from somaspeed_patch.ab_page.charts_ablation import gain
from somaspeed_patch.ab_page.charts_loss import named

Results = Mapping[str, Any]
Cell = Mapping[str, Any]
Lines: TypeAlias = tuple[Sentence, ...]
"""what stands in one place of a table, a line each; () where there is nothing"""

_LOSS_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    title: str
    """its heading"""
    kind: str = "figure"
    """`figure`: to the right; `word`: short; `text`: may wrap"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table; the first column names the row."""

    caption: str
    """what it shows"""
    columns: Sequence[Column]
    """from the left"""
    rows: Sequence[Sequence[Lines]]
    """from the top, as long as `columns`"""


def line(*parts: str | Shown) -> Lines:
    """One line."""
    return (tuple(parts),)


Show: TypeAlias = Callable[[Cell], Lines]


def _table(caption: str, cells: Sequence[Cell], shows: Sequence[tuple[Column, Show]]) -> Table:
    """A row a cell; columns that are empty in every row are left out, and the caption says so."""
    rows = [[show(cell) for _, show in shows] for cell in cells]
    kept = [index for index in range(len(shows)) if index < 2 or any(row[index] for row in rows)]
    gone = [shows[index][0].title for index in range(len(shows)) if index not in kept]
    gone = [title for title in gone if title != "Remarks"]
    note = f" Not measured in any of them: {', '.join(gone)}." if gone else ""
    return Table(
        caption=caption + note,
        columns=[shows[index][0] for index in kept],
        rows=[[row[index] for index in kept] for row in rows],
    )


def _arm(cell: Cell) -> Lines:
    return line(cell["arm"])


def _kind(cell: Cell) -> Lines:
    state = "failed" if cell["failure"] else "withheld" if cell["withheld"] else ""
    return (*line("native" if cell["native"] else "somaspeed"), *(line(state) if state else ()))


def _batch(cell: Cell) -> Lines:
    return line("recipe's" if cell["batch"] is None else figures.count(cell["batch"]))


def _value(key: str, show: Callable[[Any], Shown] = figures.plain) -> Show:
    """A number of the cell, where it has one."""
    return lambda cell: () if cell.get(key) is None else line(show(cell[key]))


def _inner(key: str, name: str, show: Callable[[Any], Shown] = figures.plain) -> Show:
    """A number inside a mapping of the cell, where it has one."""
    return lambda cell: line(show(cell[key][name])) if name in (cell.get(key) or {}) else ()


def _range(key: str, show: Callable[[Any], Shown] = figures.plain) -> Show:
    """From p20 to p80."""
    return lambda cell: line(show(cell[key]["p20"]), " to ", show(cell[key]["p80"])) if cell.get(key) else ()


def _repeats(key: str, show: Callable[[Any], Shown] = figures.plain) -> Show:
    """Every repeat, in order."""

    def shown(cell: Cell) -> Lines:
        values = [show(value) for value in (cell.get(key) or {}).get("repeats", [])]
        parts = [part for value in values for part in (", ", value)]
        return (tuple(parts[1:]),) if parts else ()

    return shown


def _remarks(cell: Cell) -> Lines:
    said = [blocked(cell)] if blocked(cell) else []
    return (*((words,) for words in [*said, *cell.get("notes", [])]), *_loader(cell))


def _loader(cell: Cell) -> Lines:
    found = cell.get("loader")
    if not found:
        return ()
    real, cached = (figures.plain(found[key]) for key in ("samples_per_second", "samples_per_second_cached"))
    with_cached = f" with cached batches ({found['cached']}): bound by the {found['bound']}"
    return line(real, " samples/s with the real loader, ", cached, with_cached)


_ARM = (Column(title="Arm", kind="text"), _arm)
_BATCH = (Column(title="Batch per rank"), _batch)
_KIND = (Column(title="Kind", kind="word"), _kind)


def cells_table(results: Results) -> Table:
    """What every cell reached; withheld ones too, with the reason beside the figures."""
    shows = [
        _ARM,
        _BATCH,
        _KIND,
        (Column(title="Samples/s"), _inner("samples_per_second", "median")),
        (Column(title="p20 to p80"), _range("samples_per_second")),
        (Column(title="Step, ms"), _inner("step_seconds", "median", figures.milliseconds)),
        (Column(title="Peak GiB"), _value("peak_allocated_gib")),
        (Column(title="GPU busy"), _value("busy_share", figures.percent)),
        (Column(title="MFU"), _value("mfu", figures.percent)),
        (Column(title="TFLOP/s"), _value("tflops")),
        (Column(title="Repeats"), _value("repeats", figures.count)),
        (Column(title="Remarks", kind="text"), _remarks),
    ]
    counted = dict.fromkeys(cell["peak_counts"] for cell in results["cells"] if cell.get("peak_counts"))
    caption = "Medians over the repeats. Peak memory counts: " + (", ".join(counted) or "nothing") + "."
    return _table(caption, results["cells"], shows)


def detail_table(results: Results) -> Table:
    """The rest of every cell: phases, communication, work, set-up and every repeat."""
    cells = results["cells"]
    phases = [
        (Column(title=f"{phase}, ms"), _inner("phase_seconds", phase, figures.milliseconds))
        for phase in phases_of(cells)
    ]
    exposed, share = "exposed_communication_seconds", "communication_seconds"
    shows = [
        _ARM,
        _BATCH,
        (Column(title="Global batch"), _value("global_batch", figures.count)),
        (Column(title="Updates"), _value("completed_steps", figures.count)),
        *phases,
        (Column(title="Step p20 to p80, ms"), _range("step_seconds", figures.milliseconds)),
        (Column(title="Communication, ms"), _value(share, figures.milliseconds)),
        (Column(title="of it exposed, ms"), _value(exposed, figures.milliseconds)),
        (Column(title="TFLOP a sample"), _value("tflop_per_sample")),
        (Column(title="Set-up, s"), _inner("setup_seconds", "median")),
        (Column(title="Set-up p20 to p80, s"), _range("setup_seconds")),
        (Column(title="Samples/s of each repeat"), _repeats("samples_per_second")),
        (Column(title="Step of each repeat, ms"), _repeats("step_seconds", figures.milliseconds)),
        (Column(title="Set-up of each repeat, s"), _repeats("setup_seconds")),
    ]
    return _table("Phases are medians, each for itself, so they need not add up to the step.", cells, shows)


def comparison_table(results: Results) -> Table:
    """Every ratio with its interval; equal and best batch in columns of their own."""
    titles = ("Arm", "Equal batch, against its own reference", "Best batch, against the best native cell")
    columns = [Column(title=title, kind="text") for title in (*titles, "No claim, because")]
    rows = [_compared(arm, fields) for arm, fields in results["comparison"]["arms"].items()]
    caption = (
        "How many times as many samples a second, the geometric mean over interleaved repeats, and its "
        "95 % interval (Student's t over the logarithms of the repeats' ratios)."
    )
    return Table(caption=caption, columns=columns, rows=rows)


def _compared(arm: str, fields: Mapping[str, Any]) -> list[Lines]:
    equal = tuple(
        (*batch_words(found["batch"]), ": ", *_times(found), f" of {found['against']}")
        for found in fields["equal_batch"]
    )
    best, withheld = fields["best_batch"], tuple((why,) for why in fields["withheld"])
    return [line(arm), equal, _best(best) if best else (), withheld]


def _best(found: Mapping[str, Any]) -> Lines:
    mine, theirs = batch_words(found["batch"]), batch_words(found["against_batch"])
    return line(*mine, ": ", *_times(found), f" of {found['against']} at ", *theirs)


def _times(found: Mapping[str, Any]) -> Sentence:
    same = ", no difference beyond the noise" if verdict(found) == SAME else ""
    return (figures.ratio(found["ratio"]), " (", *interval(found), same, ")")


def repeats_table(results: Results) -> Table:
    """The ratio of every repeat."""
    rows = []
    for arm, fields in results["comparison"]["arms"].items():
        best = [("best batch", fields["best_batch"])] if fields["best_batch"] else []
        for kind, found in [*(("equal batch", one) for one in fields["equal_batch"]), *best]:
            ratios = [figures.ratio(one) for one in found["ratio_by_repeat"]]
            parts = [part for one in ratios for part in (", ", one)][1:]
            rows.append([line(arm), line(kind), line(*batch_words(found["batch"])), line(*parts)])
    titles = ("Arm", "Kind", "Batch", "Ratio of each repeat")
    return Table(
        caption="Ratios of the comparison, repeat by repeat.",
        columns=[Column(title=title, kind="text") for title in titles],
        rows=rows,
    )


def gate_table(results: Results) -> Table:
    """What the parity gate found."""
    titles = ("Arm", "Verdict", "Largest relative difference", "Remarks")
    rows = [_judged(arm, found) for arm, found in results["gate"].items()]
    return Table(
        caption="The parity gate: does the arm learn what the baseline learns?",
        columns=[Column(title=title, kind="text") for title in titles],
        rows=rows,
    )


def _judged(arm: str, found: Mapping[str, Any]) -> list[Lines]:
    said = [*found.get("reasons", []), *found.get("notes", [])]
    word = "green" if found["green"] else "RED, so no speed is claimed"
    return [line(arm), line(word), parity(found), tuple((reason,) for reason in said)]


def parity(found: Mapping[str, Any]) -> Lines:
    """The largest differences, in words: of loss and gradient norm at any update, and of one gradient."""
    worst, noise = ((found.get(key) or {}).items() for key in ("worst", "noise"))
    lines: list[Sentence] = [
        (f"{_spoken(name)} ", figures.relative(one["relative"]), " at update ", figures.count(one["step"]))
        for name, one in worst
    ]
    lines += [
        (f"{_spoken(name)} between repeats of the baseline ", figures.relative(one["relative"]))
        for name, one in noise
    ]
    nearest = found.get("gradient") or found.get("worst_parameter")
    if nearest:
        lines.append(
            (f"gradient of {nearest['name']} ", figures.percent(nearest["share"]), " of its allowance")
        )
    return tuple(lines)


def _spoken(quantity: str) -> str:
    return {"grad_norm": "gradient norm"}.get(quantity, quantity)


def sites_table(results: Results) -> Table:
    """What was patched and what ran, by cell and site."""
    titles = ("Cell", "Site", "Status", "Calls", "Native", "Fallbacks", "Why")
    columns = [Column(title=title, kind="figure" if title in _COUNTS else "text") for title in titles]
    rows = [_site(cell, site) for cell in results["cells"] for site in cell.get("sites", [])]
    caption = "Calls our code served, calls left to the host, and calls it began and the host redid."
    return Table(caption=caption, columns=columns, rows=rows)


_COUNTS = ("Calls", "Native", "Fallbacks")


def _site(cell: Cell, site: Mapping[str, Any]) -> list[Lines]:
    why = site.get("last_fallback") or site.get("reason")
    counts = [line(figures.count(site[key])) for key in ("calls", "native_calls", "fallbacks")]
    head = [line(named(cell)), line(site["site"]), line(site.get("status") or "ran")]
    return [*head, *counts, line(why) if why else ()]


def ablation_table(group: Sequence[Ablation]) -> Table:
    """The figures of one waterfall."""
    titles = ("Feature", "Samples/s with it", "Samples/s without", "Adds", "Ratio", "95 % interval")
    columns = [Column(title=title, kind="text" if title == "Feature" else "figure") for title in titles]
    full = group[0].full
    rows = [
        [
            line(one.feature),
            line(figures.plain(speed(full))),
            line(figures.plain(speed(one.without))),
            line(gain(one)),
            line(figures.ratio(one.found["ratio"], derived=True)),
            _bounds(one.found),
        ]
        for one in group
    ]
    caption = f"{full['arm']} with and without each feature, computed here from the repeats of both."
    return Table(caption=caption, columns=columns, rows=rows)


def _bounds(found: Mapping[str, Any]) -> Lines:
    if found["low"] is None:
        return line("one repeat, no interval")
    low, high = (figures.ratio(found[end], unit="", derived=True) for end in ("low", "high"))
    return line(low, " to ", high, *([", within the noise"] if verdict(found) == SAME else []))


def loss_table(cells: Sequence[Cell]) -> Table:
    """Losses by update; of long runs every n-th update and the last."""
    by_cell = [dict(cell["loss"]) for cell in cells]
    steps = sorted({step for losses in by_cell for step in losses})
    every = -(-len(steps) // _LOSS_ROWS)
    kept = [step for index, step in enumerate(steps) if index % every == 0 or step == steps[-1]]
    columns = [Column(title="Update"), *(Column(title=named(cell)) for cell in cells)]
    rows = [
        [
            line(figures.count(step)),
            *(line(figures.loss(losses[step])) if step in losses else () for losses in by_cell),
        ]
        for step in kept
    ]
    caption = "Loss by update, first repeat, rank 0." + (f" Every {every}th update." if every > 1 else "")
    return Table(caption=caption, columns=columns, rows=rows)


def links_table(links: Sequence[Sequence[str]]) -> Table:
    """How the GPUs are connected."""
    columns = [Column(title="GPU", kind="word")]
    columns += [Column(title=str(index), kind="word") for index in range(len(links))]
    rows = [[line(str(index)), *(line(str(link)) for link in row)] for index, row in enumerate(links)]
    return Table(caption="Links between the GPUs.", columns=columns, rows=rows)
