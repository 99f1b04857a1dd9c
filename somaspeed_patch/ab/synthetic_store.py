"""What a run of `--synthetic` has finished, on disk, so that a killed one goes on where it was.

    OUT/step/gate.json, OUT/step/batches.json, OUT/step/<arm>-b<batch>-<repeat>.json

Each file says for which recipe, commit and device it holds; one that is for others is not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from somaspeed_patch.ab import machine
from somaspeed_patch.ab.synthetic_recipe import Synthetic
from somaspeed_patch.sites import write_json


class Store:
    """Keeps plain data by name, for one recipe; without a folder it keeps nothing."""

    def __init__(self, out: Path | None, recipe: Synthetic, device: str) -> None:
        self._folder = None if out is None else out / "step"
        settings = {**asdict(recipe), "repeats": None, "commit": machine.commit(), "device": device}
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What is kept under `name`, or what `make` gives, which is then kept."""
        found = self._read(name)
        if found is None:
            found = make()
            self._write(name, found)
        return found

    def has(self, name: str) -> bool:
        """Whether it is kept already."""
        return self._read(name) is not None

    def _read(self, name: str) -> Any:
        file = None if self._folder is None else self._folder / f"{name}.json"
        if file is None or not file.is_file():
            return None
        kept = json.loads(file.read_text())
        return kept["data"] if kept["for"] == self._key else None

    def _write(self, name: str, data: Any) -> None:
        if self._folder is not None:
            write_json(self._folder / f"{name}.json", {"for": self._key, "data": data})
