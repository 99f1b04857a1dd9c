"""Two results of the same recipe side by side: two machines, two commits, before and after.

A speed is compared with the same cell's in the other file; a claim, which is a ratio within one file, with
the same claim. Machines may differ: then speeds tell of machines, and claims still of the patch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from somaspeed_patch.ab.cells import SCHEMA, cell_name, speed

Results = Mapping[str, Any]
Claim = tuple[str, str, int | None]  # arm, equal_batch or best_batch, batch


def read(path: Path) -> dict[str, Any]:
    """A results.json of this schema.

    Raises: ValueError: it is not there, not JSON, or of another kind.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a results.json of somaspeed ab, but: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: expected a results.json of somaspeed ab with schema {SCHEMA}; run the recipe again"
        )
    return found


def claims(results: Results) -> dict[Claim, float]:
    """Every ratio it states; a best batch is one claim, whatever the batch."""
    found: dict[Claim, float] = {}
    for arm, said in results["comparison"]["arms"].items():
        found.update({(arm, "equal_batch", one["batch"]): one["ratio"] for one in said["equal_batch"]})
        if said["best_batch"]:
            found[arm, "best_batch", None] = said["best_batch"]["ratio"]
    return found


def lines(old: Results, new: Results) -> list[tuple[str, str, str, str]]:
    """Header and rows: what, its value in both, new over old."""
    before, after = claims(old), claims(new)
    rows = [("", "old", "new", "new / old")]
    speeds = _speeds(old), _speeds(new)
    rows += [
        _line(f"{cell_name(*cell)}, samples/s", *(s.get(cell) for s in speeds)) for cell in _keys(*speeds)
    ]
    rows += [_line(_claim(claim), before.get(claim), after.get(claim)) for claim in _keys(before, after)]
    return rows


def differences(old: Results, new: Results) -> list[str]:
    """What else differs between the two: commit, devices, driver, versions."""
    found = [("commit", old["commit"], new["commit"]), ("recipe", _recipe(old), _recipe(new))]
    found += [(key, old["machine"][key], new["machine"][key]) for key in ("devices", "gpus", "cpu", "cores")]
    names = old["versions"].keys() | new["versions"].keys()
    found += [(name, old["versions"].get(name), new["versions"].get(name)) for name in sorted(names)]
    return [f"{name}: {was} -> {now}" for name, was, now in found if was != now]


def dropped(old: Results, new: Results, allow: float) -> list[str]:
    """The claims of `old` that `new` does not keep, in words.

    Args:
        allow: the part of a ratio that it may lose, for example 0.05.
    """
    before, after = claims(old), claims(new)
    return [
        _why(new, claim, ratio, after.get(claim))
        for claim, ratio in before.items()
        if claim not in after or after[claim] < ratio * (1 - allow)
    ]


def _why(new: Results, claim: Claim, ratio: float, now: float | None) -> str:
    if now is not None:
        return f"{_claim(claim)}: {now:.2f}x, was {ratio:.2f}x"
    arm = new["comparison"]["arms"].get(claim[0])
    why = "; ".join(arm["withheld"]) if arm and arm["withheld"] else "it was not measured"
    return f"{_claim(claim)}: no claim, was {ratio:.2f}x: {why}"


def _recipe(results: Results) -> str:
    return str(results["recipe"]["name"])


def _speeds(results: Results) -> dict[tuple[str, int | None], float]:
    return {
        (cell["arm"], cell["batch"]): speed(cell) for cell in results["cells"] if "samples_per_second" in cell
    }


def _keys(*mappings: Mapping[Any, float]) -> Iterator[Any]:
    """Those of all, in order, once."""
    yield from dict.fromkeys(key for mapping in mappings for key in mapping)


def _claim(claim: Claim) -> str:
    arm, kind, batch = claim
    if kind == "best_batch":
        return f"{arm}, best batch"
    return f"{arm}, equal batch" + (f" {batch}" if batch is not None else "")


def _line(name: str, was: float | None, now: float | None) -> tuple[str, str, str, str]:
    both = was is not None and now is not None
    shown = ["-" if value is None else f"{value:.2f}" for value in (was, now)]
    return name, shown[0], shown[1], f"{now / was:.3f}" if both and was and now is not None else "-"
