"""A plan for people, within 100 columns, and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from somaspeed_patch.layouts.layout import Layout
from somaspeed_patch.layouts_plan import plan
from somaspeed_patch.layouts_plan.plan import GIB, Row, Settings

WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked, and what was found."""

    recipe: str
    """its name"""
    arm: str
    """of its section `synthetic`"""
    forward: str
    """eager, compiled or recompute"""
    gib: float
    """of a GPU"""
    link_gbs: float
    """GB/s that a GPU sends"""
    settings: Settings
    """of all layouts"""
    rows: list[Row]
    """one a layout"""

    @property
    def taken(self) -> Row | None:
        """The layout to take; None: none fits."""
        return plan.best(self.rows, self.gib)


def show(found: Plan) -> None:
    """Print it."""
    console = Console(width=WIDTH, highlight=False)
    console.print(_headline(found))
    console.print(_table(found))
    for line in _notes(found):
        console.print(line)


def _headline(found: Plan) -> str:
    census, gpus = found.settings.census, found.rows[0].layout.ranks
    trainable, frozen = (census.numbers(trains=trains) / 1e6 for trains in (True, False))
    return (
        f"{found.recipe}, arm {found.arm} ({found.forward}), batch {found.settings.batch} a replica, "
        f"{gpus} GPU{'s' if gpus > 1 else ''} of {found.gib:g} GiB: {trainable:,.1f} M numbers train, "
        f"{frozen:,.1f} M are frozen"
    )


def to_dict(found: Plan) -> dict[str, Any]:
    """It as plain data: memory in GiB, traffic in bytes, time in seconds."""
    taken, census = found.taken, found.settings.census
    return {
        "recipe": found.recipe,
        "arm": found.arm,
        "forward": found.forward,
        "batch": found.settings.batch,
        "gib": found.gib,
        "link_gbs": found.link_gbs,
        "parameters": {name: census.numbers(trains=name == "trainable") for name in ("trainable", "frozen")},
        "reserve": {
            "context_gib": plan.CONTEXT / GIB,
            "nccl_gib": plan.NCCL / GIB,
            "part_of_peak": plan.FRAGMENTS,
        },
        "layouts": [_entry(found, row) for row in found.rows],
        "take": None if taken is None else _asked(taken.layout),
    }


def _entry(found: Plan, row: Row) -> dict[str, Any]:
    memory, sent = row.memory, row.traffic
    names = "trainable", "frozen", "gradients", "optimizer", "gathered", "casts", "activations", "peak"
    return {
        "name": row.name,
        "layout": _asked(row.layout),
        "gib": {name: getattr(memory, name) / GIB for name in (*names, "needed")},
        "fits": plan.fits(row, found.gib),
        "largest_batch": plan.largest_batch(row, found.gib),
        "samples_a_step": row.samples,
        "sent_bytes": {"gathered": sent.gathered, "reduced": sent.reduced, "states": sent.states},
        "least_seconds": sent.seconds(found.link_gbs),
    }


def _table(found: Plan) -> Table:
    names = "train", "frozen", "grads", "Adam", "gath.", "activ.", "peak", "needs", "fits", "gather", "reduce"
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GiB a GPU; GB sent a step", min_width=22)
    for name in (*names, "ms"):
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(row.name, *_cells(found, row), style="bold" if row is found.taken else None)
    return table


def _cells(found: Plan, row: Row) -> Iterable[str]:
    memory, sent = row.memory, row.traffic
    parts = (
        memory.trainable,
        memory.frozen,
        memory.gradients,
        memory.optimizer,
        memory.gathered,
        memory.casts + memory.activations,
        memory.peak,
        memory.needed,
    )
    yield from (f"{part / GIB:.1f}" for part in parts)
    yield "yes" if plan.fits(row, found.gib) else "no"
    yield from (f"{part / 1e9:.1f}" for part in (sent.gathered, sent.reduced + sent.states))
    yield f"{sent.seconds(found.link_gbs) * 1e3:.0f}"


def _notes(found: Plan) -> Iterable[str]:
    nccl = f", {plan.NCCL / GIB:g} for NCCL" if found.rows[0].layout.ranks > 1 else ""
    yield (
        "peak: parameters, Adam, gathered, and the larger of gradients and activations. needs: "
        f"{plan.FRAGMENTS:.0%} more, {plan.CONTEXT / GIB:g} GiB for CUDA{nccl} (assumed). "
        f"ms: at least, at {found.link_gbs:g} GB/s (--link-gbs) and if nothing overlaps."
    )
    taken = found.taken
    if taken is None:
        yield _nearest(found)
        return
    yield f"take {taken.name}: {_asked(taken.layout)}"
    yield "of those that fit it sends least a sample"
    yield _room(found, taken)
    if taken.layout.tp > 1 or taken.layout.pp > 1:
        others = [row for row in found.rows if row.layout.tp == row.layout.pp == 1]
        yield f"without tp and pp {_room(found, max(others, key=lambda row: _samples(found, row)))}"


def _nearest(found: Plan) -> str:
    smallest = min(found.rows, key=lambda row: row.memory.needed)
    return (
        f"none fits: {smallest.name} needs least, {smallest.memory.needed / GIB:.1f} GiB; "
        f"{_room(found, max(found.rows, key=lambda row: _samples(found, row)))}"
    )


def _room(found: Plan, row: Row) -> str:
    most = plan.largest_batch(row, found.gib)
    return f"{row.name} fits batches to {most} a replica, {_samples(found, row)} samples a step"


def _samples(found: Plan, row: Row) -> int:
    """Of a step, at the largest batch that fits."""
    return plan.largest_batch(row, found.gib) * row.samples // found.settings.batch


def _asked(layout: Layout) -> str:
    """The feature `layout` without what is its default."""
    pairs = (
        f"{field.name}={getattr(layout, field.name)}"
        for field in fields(Layout)
        if getattr(layout, field.name) != field.default
    )
    return ",".join(pairs) or "no layout"
