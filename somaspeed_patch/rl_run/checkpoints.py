"""Checkpoints in LeRobot's layout, each whole or not there.

    checkpoints/000010/pretrained_model/  for lerobot-eval --policy.path=... and PI05Policy.from_pretrained
                      /training_state/    state.pt: what trains, its optimizer, counters, the rollout;
                                          recipe.json: what a resume compares; training_step.json
    checkpoints/last -> 000010

One is written beside the others under a hidden name, synced to the disk and renamed. Whatever happens before
the rename leaves the finished ones as they are.

Of several ranks all take part, for weights that are sharded are gathered, and rank 0 writes what one process
would write: a run goes on under any layout and on any number of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.rl import heads, spread
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.ranks import Ranks
from somaspeed_patch.rl_run.recipe import Recipe, changes

log = logging.getLogger(__name__)

POLICY, STATE, LAST = "pretrained_model", "training_state", "last"
_HIDDEN = ".writing-"
_IN_A_ROW = 3  # failures after which the run ends: it would train for nothing


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, behind an iteration."""

    iteration: int = 0
    """finished ones"""
    env_steps: int = 0
    """of the rollouts that were trained on"""
    seconds: float = 0.0
    """of wall time, those before a resume included"""
    played: tuple[int, ...] = ()
    """by slot, of the collectors behind the last rollout that was trained on; empty: none was"""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds besides the policy."""

    folder: Path
    progress: Progress
    recipe: Mapping[str, Any]
    """plain"""
    learner: Mapping[str, Any]
    heads: Mapping[str, Tensor]
    backbone: str
    """digest of the weights that do not train"""

    def check(self, recipe: Recipe) -> None:
        """Raises: ValueError: the recipe is another one than the run began with, in words."""
        odd = changes(self.recipe, recipe.plain())
        if odd:
            raise ValueError(
                f"resume: the recipe has changed since {self.folder}: {'; '.join(odd)}. "
                "Go on with the old one, or begin anew with another --out"
            )

    def restore(self, learner: Learner) -> None:
        """Weights, optimizer and counters, exactly.

        Raises: ValueError: the frozen weights are others than when it was written.
        """
        found = learner.policy.tag.backbone
        if found != self.backbone:
            raise ValueError(
                f"resume: the frozen weights have digest {found}, but {self.folder} was trained on "
                f"{self.backbone}; policy.path must give the same weights as before"
            )
        learner.load_state_dict(dict(self.learner))
        heads.load(learner.policy, learner.value_head, self.heads)


def load(folder: Path) -> Saved:
    """Read a checkpoint's training state.

    Raises: ValueError: it is none.
    """
    file = folder / STATE / "state.pt"
    if not file.is_file():
        raise ValueError(f"checkpoint: expected {file}, which is not there")
    state = torch.load(file, map_location="cpu", weights_only=True)
    progress = Progress(**{**state["progress"], "played": tuple(state["progress"]["played"])})
    recipe = json.loads((folder / STATE / "recipe.json").read_text())
    return Saved(
        folder=folder, progress=progress, recipe=recipe, learner=state["learner"], heads=state["heads"],
        backbone=state["backbone"],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint is made of, whole on rank 0."""

    policy: FlowPolicy
    weights: dict[str, Any] | None
    """its state dict where it does not have it whole itself"""
    state: Mapping[str, Any]

    @classmethod
    def of(cls, learner: Learner, progress: Progress) -> Contents:
        """The learner as it is. All ranks call it."""
        policy = learner.policy
        state = {
            "learner": learner.state_dict(),
            "heads": heads.snapshot(policy, learner.value_head),
            "backbone": policy.tag.backbone,
            "progress": asdict(progress),
        }
        weights = spread.policy_state(policy) if learner.ranks.sharded else None
        return cls(policy=policy, weights=weights, state=state)


class Keeper:
    """Writes the checkpoints of one run, and removes the old ones."""

    def __init__(
        self, out: Path, recipe: Recipe, save_policy: Callable[[Path], None], ranks: Ranks | None = None
    ) -> None:
        self.folder, self._recipe, self._save_policy = out / "checkpoints", recipe, save_policy
        self._ranks = ranks or Ranks()
        self._failures: list[str] = []

    def finished(self) -> list[Path]:
        """The whole ones, by number."""
        return finished(self.folder)

    def write(self, learner: Learner, progress: Progress) -> Path | None:
        """A checkpoint of the learner as it is; None where it could not be written, which is logged.

        All ranks call it.
        Raises: OSError: that happened three times in a row; RuntimeError on the ranks that do not write.
        """
        final = self.folder / f"{progress.iteration:06d}"
        if self._ranks.first(final.is_dir):
            return final
        return self._ranks.first(partial(self._written, final, Contents.of(learner, progress)))

    def _written(self, final: Path, contents: Contents) -> Path | None:
        part = self.folder / f"{_HIDDEN}{final.name}"
        try:
            self._fill(part, contents)
            part.rename(final)
            _sync(self.folder)
            _point(self.folder / LAST, final.name)
        except Exception as error:  # safetensors and torch have their own for a full disk
            shutil.rmtree(part, ignore_errors=True)
            self._failed(final, error)
            return None
        except BaseException:  # the run is being stopped
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._failures.clear()
        self._prune()
        return final

    def _fill(self, part: Path, contents: Contents) -> None:
        shutil.rmtree(part, ignore_errors=True)
        for name in (POLICY, STATE):
            (part / name).mkdir(parents=True)
        with spread.shown(contents.policy, contents.weights):
            self._save_policy(part / POLICY)
        torch.save(contents.state, part / STATE / "state.pt")
        _write(part / STATE / "recipe.json", self._recipe.plain())
        _write(part / STATE / "training_step.json", {"step": contents.state["progress"]["iteration"]})
        for path in sorted(part.rglob("*"), reverse=True):
            _sync(path)
        _sync(part)

    def _failed(self, final: Path, error: Exception) -> None:
        self._failures.append(f"{type(error).__name__}: {error}")
        log.warning("checkpoint %s could not be written: %s", final, self._failures[-1])
        if len(self._failures) >= _IN_A_ROW:
            raise OSError(
                f"checkpoint: {_IN_A_ROW} in a row could not be written into {self.folder}, the last one: "
                f"{self._failures[-1]}; make room, then go on with --resume"
            ) from error

    def _prune(self) -> None:
        keep = self._recipe.checkpoint.keep
        for old in self.finished()[: -keep or None] if keep else []:
            shutil.rmtree(old, ignore_errors=True)


def finished(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, by number."""
    found = folder.glob("[0-9]*") if folder.is_dir() else iter(())
    return sorted((each for each in found if each.name.isdigit()), key=lambda each: int(each.name))


def clean(folder: Path) -> None:
    """Remove what a process that was killed has left half-written."""
    for part in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(part, ignore_errors=True)


def _write(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Onto the disk: a rename that outlives a power cut must not outlive what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _point(link: Path, name: str) -> None:
    """Let a link name another checkpoint, at once: there is no moment without one."""
    fresh = link.with_name(f"{_HIDDEN}{link.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(link)
    _sync(link.parent)
