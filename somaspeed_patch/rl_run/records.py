"""What a run says of itself while it goes on: metrics.jsonl always, TensorBoard and wandb where asked for."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from somaspeed_patch.rl_run.recipe import Recipe

log = logging.getLogger(__name__)

ITERATION, EVALUATION = "iteration", "evaluation"
Line = Mapping[str, Any]


class Sink(Protocol):
    """Where scalars go."""

    def scalars(self, values: Mapping[str, float], env_steps: int) -> None:
        """Of one moment, by name."""

    def close(self) -> None:
        """Nothing more comes."""


class Lines:
    """A file of JSON lines that a full disk does not end: what does not fit waits for the next line."""

    def __init__(self, file: Path) -> None:
        self._file, self._waiting = file, list[str]()

    def add(self, line: Line) -> None:
        """Append, onto the disk's cache at once."""
        self._waiting.append(json.dumps(_finite(line)) + "\n")
        whole = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("a") as stream:
                stream.write("".join(self._waiting))
        except OSError as error:
            log.warning("%s could not be written: %s; tried again with the next line", self._file, error)
            _cut(self._file, whole)
            return
        self._waiting.clear()

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line; a killed process may leave a part of one."""
        for found, _ in self._whole():
            yield found

    def forget_after(self, iteration: int) -> None:
        """Keep what is of this iteration and before: what comes after it will be done again."""
        kept = [end for found, end in self._whole() if found["iteration"] <= iteration]
        if self._file.exists():
            _cut(self._file, kept[-1] if kept else 0)

    def _whole(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each line, and the byte it ends before."""
        end = 0
        for text in self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else ():
            end += len(text)
            if text.endswith(b"\n"):
                yield json.loads(text), end


class Records:
    """All places at once."""

    def __init__(self, recipe: Recipe, out: Path, *, iteration: int, env_steps: int) -> None:
        """Begin, or go on behind an iteration.

        Raises: ValueError: a logger that is asked for is not installed.
        """
        self.lines = Lines(out / "metrics.jsonl")
        self._sinks: list[Sink] = []
        if recipe.log.tensorboard:
            self._sinks.append(_TensorBoard(out, env_steps))
        if recipe.log.wandb is not None:
            self._sinks.append(_Wandb(recipe, out))
        self.lines.forget_after(iteration)

    def add(self, line: Line, scalars: Mapping[str, float]) -> None:
        """A line, and the numbers that are drawn of it."""
        self.lines.add({**line, **scalars})
        for sink in self._sinks:
            sink.scalars(scalars, int(line["env_steps"]))

    def evaluated(self, iteration: int) -> bool:
        """Whether the policy behind this iteration has been evaluated."""
        found = self.lines.read()
        return any(each["kind"] == EVALUATION and each["iteration"] == iteration for each in found)

    def close(self) -> None:
        """Nothing more comes."""
        for sink in self._sinks:
            sink.close()


class Muted(Records):
    """Of a rank that writes nothing."""

    def __init__(self) -> None:
        self.lines, self._sinks = Lines(Path(os.devnull)), []

    def add(self, line: Line, scalars: Mapping[str, float]) -> None:
        """Rank 0 has it."""

    def evaluated(self, iteration: int) -> bool:
        """Rank 0 knows."""
        raise RuntimeError("rl: only rank 0 knows what has been evaluated")


class _TensorBoard:
    def __init__(self, out: Path, env_steps: int) -> None:
        module = _needed("torch.utils.tensorboard", "log.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(out / "tensorboard"), purge_step=env_steps + 1)

    def scalars(self, values: Mapping[str, float], env_steps: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, env_steps)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, recipe: Recipe, out: Path) -> None:
        module = _needed("wandb", "log.wandb", "wandb")
        self._run = module.init(
            project=recipe.log.wandb, dir=str(out), name=out.resolve().name, id=_identity(out / "wandb_id"),
            resume="allow", config=recipe.plain(),
        )  # fmt: skip

    def scalars(self, values: Mapping[str, float], env_steps: int) -> None:
        self._run.log({**values, "global_step": env_steps})

    def close(self) -> None:
        self._run.finish()


def _identity(file: Path) -> str:
    """What a resumed run is known by to wandb."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


def _needed(module: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{key}: needs {package}, which is not installed: pip install {package}") from error


def _cut(file: Path, size: int) -> None:
    """Take back what is behind a size; it needs no room on the disk."""
    try:
        with file.open("r+") as stream:
            stream.truncate(size)
    except OSError as error:
        log.warning("%s: %s", file, error)


def _finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
