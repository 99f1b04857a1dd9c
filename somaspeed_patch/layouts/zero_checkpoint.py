"""A checkpoint of ZeRO-1 or ZeRO-2, read without DeepSpeed: fp32 masters, moments and steps, by name.

Each rank of the run has written its part of one flat tensor a parameter group; the parts in rank order are
the group's parameters one after the other, in the order of `param_shapes`, and padding. The files are mapped,
so a rank that reads one parameter at a time holds no more than that one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MODEL = "mp_rank_00_model_states.pt"
_PART = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def tag(checkpoint: Path) -> Path | None:
    """The folder that DeepSpeed made in a checkpoint of the Trainer's, or None."""
    latest = checkpoint / "latest"
    return checkpoint / latest.read_text().strip() if latest.is_file() else None


class Reader:
    """The trained parameters of one such folder.

    Raises: ValueError: it is of ZeRO-3, of tensor parallelism, of another optimizer than Adam, or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts = [_mapped(file)["optimizer_state_dict"] for file in self._files()]
        self._where: dict[str, tuple[int, int, torch.Size]] = {}
        for group, shapes in enumerate(_mapped(folder / _MODEL)["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                self._where[name] = group, start, shape
                start += shape.numel()
            self._holds(group, start)

    @property
    def names(self) -> list[str]:
        """All parameters that were trained."""
        return list(self._where)

    def entry(self, name: str, shape: torch.Size) -> dict[str, Tensor]:
        """One parameter's `master`, `exp_avg` and `exp_avg_sq`, fp32, whole; and `step`, fp32 [].

        Raises: ValueError: it has another shape there.
        """
        group, start, saved = self._where[name]
        if saved != shape:
            raise ValueError(f"layout: {name} is {list(saved)} in {self._folder}, but {list(shape)} here")
        found = {"master": self._cut(self._masters(group), start, saved)}
        for moment in _MOMENTS:
            parts = [_state(part)["state"][group][moment] for part in self._parts]
            found[moment] = self._cut(parts, start, saved)
        return {**found, "step": torch.tensor(self._step(group), dtype=torch.float32)}

    def _files(self) -> list[Path]:
        matches = [(file, _PART.match(file.name)) for file in self._folder.iterdir()]
        files = sorted((int(match[2]), file) for file, match in matches if match)
        wide = any(match and int(match[3]) for _, match in matches)
        if (
            wide
            or not (self._folder / _MODEL).is_file()
            or [rank for rank, _ in files] != [*range(len(files))]
        ):
            self._refuse("is not a whole checkpoint of ZeRO-1 or ZeRO-2 without tensor parallelism")
        return [file for _, file in files]

    def _masters(self, group: int) -> list[Tensor]:
        return [part["single_partition_of_fp32_groups"][group] for part in self._parts]

    def _holds(self, group: int, numbers: int) -> None:
        part = self._parts[0]
        partitions = part.get("partition_count")
        counts = [partitions] if isinstance(partitions, int) else partitions or []
        if any(count != len(self._parts) for count in counts):
            self._refuse(f"has {len(self._parts)} of {counts[0]} ranks' parts")
        if "single_partition_of_fp32_groups" not in part or not isinstance(_state(part), dict):
            self._refuse("is not of ZeRO-1 or ZeRO-2, or is an elastic one")
        state = _state(part)["state"].get(group, {})
        if not all(moment in state for moment in _MOMENTS):
            self._refuse(f"has no {' and '.join(_MOMENTS)}: its optimizer was not Adam")
        if sum(part.numel() for part in self._masters(group)) < numbers:
            self._refuse(f"has fewer numbers in parameter group {group} than its parameters")

    def _step(self, group: int) -> float:
        state = _state(self._parts[0])
        step = state["state"][group].get("step", state["param_groups"][group].get("step"))
        if step is None:
            self._refuse("does not say how many updates there were")
        return float(step)

    def _cut(self, parts: list[Tensor], start: int, shape: torch.Size) -> Tensor:
        stop, pieces, first = start + shape.numel(), [], 0
        for part in parts:
            last = first + part.numel()
            if first < stop and start < last:
                pieces.append(part[max(start - first, 0) : stop - first])
            first = last
        return torch.cat(pieces).float().view(shape) if pieces else torch.zeros(shape)

    def _refuse(self, why: str) -> None:
        raise ValueError(
            f"layout: {self._folder} {why}; make whole weights of it with zero_to_fp32.py, which lies beside "
            "it, and train from those: the optimizer's moments and the step count are lost"
        )


class _Unread:
    """In place of DeepSpeed's own objects, which nobody here looks at."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _state(part: dict[str, Any]) -> Any:
    return part["base_optimizer_state"]


def _mapped(file: Path) -> Any:
    """What torch saved in a file, with tensors that are read when used; DeepSpeed's classes stay unread."""
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    unread = [(_Unread, name) for name in foreign if name.startswith("deepspeed.")]
    with torch.serialization.safe_globals(unread):  # type: ignore[arg-type]
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
