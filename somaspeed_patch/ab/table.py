"""Results as a table: on the terminal with rich, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from somaspeed_patch.ab.results import PHASES

if TYPE_CHECKING:
    from rich.table import Table

Results = Mapping[str, Any]
Row = tuple[str, ...]


def rows(results: Results) -> list[Row]:
    """Header and lines: one column an arm, `-` where there is no figure."""
    arms, compared = results["arms"], results["comparison"]
    lines: list[Row] = [("", *arms)]
    lines += [_line(label, arms, show) for label, show in _FROM_ARMS]
    lines += [_line(label, compared, show) for label, show in _FROM_COMPARISON]
    return lines


def sentences(results: Results) -> list[str]:
    """What must be said beside the table: failures, gates, what ran, loader-bound arms, where it was."""
    arms = results["arms"].items()
    said = [f"{name} failed: {arm['failure']}" for name, arm in arms if arm["failure"]]
    runs = [(name, run) for name, arm in arms for run in arm["runs"] if run["note"]]
    said += [f"{name}, run {run['repeat']}: {run['note']}" for name, run in runs]
    said += [line for name, verdict in results["gate"].items() for line in _gate_sentences(name, verdict)]
    said += [
        line for name, fields in results["comparison"].items() for line in _against_sentences(name, fields)
    ]
    said += [_loader_sentence(name, found) for name, found in results["loader"].items()]
    said += [line for name, arm in arms for line in _site_sentences(name, arm["sites"])]
    said += [f"{name} is {arm['loader_bound']}" for name, arm in arms if arm.get("loader_bound")]
    return [*said, _where(results)]


def terminal(results: Results) -> Table:
    """The table for a terminal."""
    from rich.table import Table

    header, *lines = rows(results)
    table = Table(*header, title=results["recipe"]["description"])
    for line in lines:
        table.add_row(*line)
    return table


def markdown(results: Results) -> str:
    """The same as Markdown."""
    header, *lines = rows(results)
    body = ["| " + " | ".join(line) + " |" for line in (header, tuple("---" for _ in header), *lines)]
    notes = [f"- {sentence}" for sentence in sentences(results)]
    return "\n".join([f"# {results['recipe']['description']}", "", *body, "", *notes, ""])


def write_markdown(results: Results, path: Path) -> None:
    """Write `markdown` to a file, replacing an older one as a whole."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(markdown(results))
    draft.replace(path)


Show = Callable[[Mapping[str, Any]], str]


def _line(label: str, by_arm: Mapping[str, Any], show: Show) -> Row:
    return (label, *(_shown(show, fields) for fields in by_arm.values()))


def _shown(show: Show, fields: Mapping[str, Any]) -> str:
    try:
        return show(fields)
    except (KeyError, TypeError):  # a failed run or a red gate leaves the figure out
        return "-"


def _with_spread(fields: Mapping[str, Any], scale: float, digits: int) -> str:
    median, low, high = (f"{fields[key] * scale:.{digits}f}" for key in ("median", "p20", "p80"))
    return f"{median} ({low}-{high})"


def _phase(name: str) -> tuple[str, Show]:
    return f"  {name}, ms", lambda arm: f"{arm['phase_seconds'][name] * 1e3:.1f}"


_FROM_ARMS: list[tuple[str, Show]] = [
    ("samples/s (p20-p80)", lambda arm: _with_spread(arm["samples_per_second"], 1, 2)),
    ("step, ms (p20-p80)", lambda arm: _with_spread(arm["step_seconds"], 1e3, 1)),
    *(_phase(name) for name in PHASES),
    ("peak memory, GiB", lambda arm: f"{arm['peak_allocated_gib']:.2f} ({arm['peak_counts']})"),
    ("setup, s", lambda arm: f"{arm['setup_seconds']['median']:.1f}"),
    ("repeats", lambda arm: str(len(arm["runs"]))),
]
_FROM_COMPARISON: list[tuple[str, Show]] = [
    ("updates", lambda fields: str(fields["completed_steps"])),
    ("loss, first to last", lambda fields: f"{fields['loss_first']:.4f} to {fields['loss_last']:.4f}"),
    ("speed against baseline", lambda fields: _ratio(fields)),
]


def _ratio(fields: Mapping[str, Any]) -> str:
    other = fields.get("against", "")
    if other is None:
        return "not compared"
    return f"{fields['ratio']:.2f}x" + (f" of {other}" if other else "")


def _against_sentences(name: str, fields: Mapping[str, Any]) -> list[str]:
    """What is said of an arm that is not compared with the baseline."""
    if "against" not in fields:
        return []
    other = fields["against"]
    what = f"compared with {other} only" if other else "not compared with any arm: no gate, no ratio"
    return [f"{name} trains on other data than the baseline and is {what}"]


def _loader_sentence(name: str, found: Mapping[str, Any]) -> str:
    real, cached = (f"{found[key]:.2f}" for key in ("samples_per_second", "samples_per_second_cached"))
    both = f"{real} samples/s with the real loader, {cached} with cached batches"
    return f"{name}: {both}: {found['bound']}-bound"


def _gate_sentences(name: str, verdict: Mapping[str, Any]) -> list[str]:
    if not verdict["green"]:
        withheld = f"{name}: the parity gate is RED, so no speed is given"
        return [withheld, *(f"  {reason}" for reason in verdict["reasons"])]
    worst = ", ".join(f"{quantity} {found['relative']:.2g}" for quantity, found in verdict["worst"].items())
    noise = ", ".join(f"{quantity} {found['relative']:.2g}" for quantity, found in verdict["noise"].items())
    return [
        f"{name}: the parity gate is green; largest relative difference at any update: {worst}; "
        f"between repeats of the baseline: {noise or 'not measured, one repeat'}"
    ]


def _site_sentences(name: str, sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """What really ran in an arm: calls of our code, and calls left to the host with the last reason."""
    lines = []
    for site in sites:
        if site["native_calls"] or site["fallbacks"] or (site["calls"] and site["site"] != "step_recorder"):
            why = site["last_fallback"] or site["reason"]
            counts = f"{site['calls']} calls, {site['native_calls']} native, {site['fallbacks']} fallbacks"
            lines.append(f"{name} ran {site['site']}: {counts}" + (f" ({why})" if why else ""))
    return lines


def _where(results: Results) -> str:
    machine, recipe = results["machine"], results["recipe"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    updates = f"{recipe['steps']} updates a run, the first {recipe['discard']} discarded"
    devices, cores = ", ".join(machine["devices"]) or "no device", f"{machine['cores']} cores"
    commit = f"commit {results['commit'] or 'unknown'}"
    return "; ".join([devices, f"{machine['cpu']}, {cores}", versions, updates, commit])
