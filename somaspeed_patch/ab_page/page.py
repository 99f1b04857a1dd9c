"""The results of `somaspeed ab` as one HTML page: no script, no network, no second file.

Needs matplotlib, the extra `ab`. About 1 s a results dict, most of it the charts, each drawn for two widths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from somaspeed_patch.ab import words
from somaspeed_patch.ab.ablations import Ablation, ablations
from somaspeed_patch.ab.cells import SCHEMA
from somaspeed_patch.ab.figures import Sentence, Shown
from somaspeed_patch.ab_page import tables
from somaspeed_patch.ab_page.charts import Chart
from somaspeed_patch.ab_page.charts_ablation import waterfall
from somaspeed_patch.ab_page.charts_bars import speed_bars
from somaspeed_patch.ab_page.charts_loss import loss_curves
from somaspeed_patch.ab_page.charts_phases import drawn, phase_stacks
from somaspeed_patch.ab_page.provenance import Fact, provenance
from somaspeed_patch.ab_page.tables import Lines, Table

if TYPE_CHECKING:
    from markupsafe import Markup

Results = Mapping[str, Any]

_OPEN = 3  # sentences that are shown without asking
_LONG = 12  # rows from which a table is folded


class PageError(ImportError):
    """The page cannot be drawn here; the text says what to install."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A chapter: a heading, words, a chart, tables."""

    heading: str
    """what it is about"""
    intro: Lines
    """paragraphs above the chart"""
    chart: Chart | None
    """None where tables are enough"""
    open: Sequence[Table]
    """tables in sight"""
    folded: Sequence[tuple[str, Table]]
    """tables behind their names"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One results dict on the page."""

    id: str
    """unique in the page; its other ids begin with it"""
    heading: str
    """the recipe's description"""
    finding: Sentence
    """the one sentence"""
    beside: Sequence[Sentence]
    """in sight below it"""
    more: Sequence[Sentence]
    """behind a click"""
    parts: Sequence[Part]
    """the chapters"""
    facts: Sequence[Fact]
    """where it comes from"""
    links: Table | None
    """how the GPUs are connected"""


def render(results: Sequence[Mapping[str, Any]], title: str) -> str:
    """The page.

    Args:
        results: results dicts of schema 2, a section each, at least one.
        title: the page's heading.
    Returns: HTML; the same for the same results.
    Raises:
        PageError: matplotlib is missing.
        ValueError: a results dict is of another schema.
    """
    _check(results)
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = _shown
    template = environment.from_string(_file("page.html.j2"))
    sections = [_section(one, f"r{number}") for number, one in enumerate(results, 1)]
    return template.render(title=title, sections=sections, style=Markup(_file("page.css")), svg=Markup)


def write(results: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write `render` to a file, replacing an older one as a whole.

    Raises: what `render` does; OSError.
    """
    draft = path.with_name(path.name + ".part")
    draft.write_text(render(results, title), encoding="utf-8")
    draft.replace(path)


def _check(results: Sequence[Results]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise PageError("page: expected matplotlib, found none: pip install 'somaspeed-patch[ab]'")
    if not results:
        raise ValueError("page: expected at least one results dict, came none")
    for index, one in enumerate(results):
        if one.get("schema") != SCHEMA:
            came = one.get("schema", "none")
            raise ValueError(
                f"page, results[{index}]: expected schema {SCHEMA}, came {came!r}: run somaspeed ab again"
            )


def _file(name: str) -> str:
    return (files("somaspeed_patch.ab_page") / name).read_text(encoding="utf-8")


def _shown(sentence: Sentence) -> Markup:
    """Words escaped, and each figure in an element with its value."""
    from markupsafe import Markup, escape

    figure = Markup('<span class="n" data-value="{}"{}>{}</span>')
    derived = Markup(" data-derived")
    return Markup("").join(
        figure.format(repr(part.value), derived if part.derived else "", part.text)
        if isinstance(part, Shown)
        else escape(part).replace("_", Markup("_<wbr>"))
        for part in sentence
    )


def _section(results: Results, name: str) -> Section:
    finding, *others = words.sentences(results)
    links = results["machine"].get("links")
    return Section(
        id=name,
        heading=results["recipe"].get("description") or results["recipe"]["name"],
        finding=finding,
        beside=others[: _OPEN - 1],
        more=others[_OPEN - 1 :],
        parts=list(_parts(results, name)),
        facts=provenance(results),
        links=tables.links_table(links) if links else None,
    )


def _parts(results: Results, name: str) -> Iterator[Part]:
    yield _speeds(results, name)
    yield from _phases(results, name)
    groups = groupby(ablations(results), key=lambda one: (one.full["arm"], one.full["batch"]))
    by_cell: dict[Any, list[Ablation]] = {}
    for key, group in groups:
        by_cell.setdefault(key, []).extend(group)
    for number, found in enumerate(by_cell.values(), 1):
        yield _ablation(found, f"{name}-ablation{number}")
    yield from _losses(results, name)
    yield _gate(results)
    yield from _sites(results)


def _part(heading: str, intro: str | Lines, chart: Chart | None, **more: Any) -> Part:
    said: Lines = ((intro,),) if isinstance(intro, str) else intro
    return Part(heading=heading, intro=said, chart=chart, **{"open": [], "folded": [], **more})


def _speeds(results: Results, name: str) -> Part:
    intro = (
        "The bar is the median over the repeats, a dot each repeat, the line p20 to p80. "
        "Grey and hatched is native: nothing of somaspeed is switched on."
    )
    folded = [("Ratio of each repeat", tables.repeats_table(results))]
    return _part(
        "Speed",
        intro,
        speed_bars(results["cells"], f"{name}-speed"),
        open=[tables.comparison_table(results), tables.cells_table(results)],
        folded=folded if folded[0][1].rows else [],
    )


def _phases(results: Results, name: str) -> Iterator[Part]:
    cells = [cell for cell in results["cells"] if drawn(cell)]
    folded = [("Phases, set-up and every repeat", tables.detail_table(results))]
    left = len(results["cells"]) - len(cells)
    intro = "Median milliseconds of each phase; the figure at the right is the median of the whole step."
    if left:
        intro += f" {left} failed or withheld {'cells are' if left > 1 else 'cell is'} left out."
    chart = phase_stacks(cells, f"{name}-phases") if cells else None
    yield _part("Where a step goes", intro if cells else "No cell has phases to show.", chart, folded=folded)


def _ablation(group: Sequence[Ablation], name: str) -> Part:
    full = group[0].full
    at = "" if full["batch"] is None else f", batch {full['batch']}"
    intro = (
        "Each row switches one feature off and leaves the others on, at the same batch. "
        "Every row hangs from the full arm's speed, so the contributions do not add up."
    )
    heading = f"What each feature contributes: {full['arm']}{at}"
    return _part(heading, intro, waterfall(group, name), open=[tables.ablation_table(group)])


def _losses(results: Results, name: str) -> Iterator[Part]:
    cells = [cell for cell in results["cells"] if cell.get("loss")]
    if results["kind"] != "trainer" or not cells:
        return
    chart = loss_curves(cells, results["comparison"]["baseline"], f"{name}-loss")
    said = [_parity(arm, found) for arm, found in results["gate"].items()]
    intro: Lines = (("The baseline is the broad pale line below the others.",), *said)
    yield _part("Loss", intro, chart, folded=[("Loss by update", tables.loss_table(cells))])


def _parity(arm: str, found: Mapping[str, Any]) -> Sentence:
    """What the gate measured, in one sentence; red ones say so."""
    lines = tables.parity(found) or ((f"not comparable, {'; '.join(found['reasons'])}",),)
    joined = [part for line in lines for part in ("; ", *line)][1:]
    color = "green" if found["green"] else "RED"
    return (f"{arm}, gate {color}, largest relative difference: ", *joined, ".")


def _gate(results: Results) -> Part:
    if not results["gate"]:
        return _part("Parity gate", "No arm was judged: there was nothing to compare.", None)
    return _part("Parity gate", (), None, open=[tables.gate_table(results)])


def _sites(results: Results) -> Iterator[Part]:
    table = tables.sites_table(results)
    if not table.rows:
        return
    several = len(table.rows) >= _LONG
    shown = {"folded": [("All sites", table)]} if several else {"open": [table]}
    intro = "What was patched in each cell, and what really ran. A fallback withholds the cell's claim."
    yield _part("What ran", intro, None, **shown)
