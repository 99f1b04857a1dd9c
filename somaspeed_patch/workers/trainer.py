"""The loop of LeRobot's train(), seen from `Accelerator.prepare`, which it calls once its loaders are built.

The frame of train() is looked up among the callers: its variables are what the loop will use, whether its
module is called lerobot.scripts.lerobot_train or, under `-m`, __main__. Noting what
`make_pre_post_processors` returns would miss the second: train() has its own reference to that function.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

_FILE, _FUNCTION = "lerobot/scripts/lerobot_train.py", "train"
_DEEPEST = 12  # callers to look through: hooks of others on prepare() lie in between
# Between the loader and the preprocessor train() converts uint8 images, in training and in evaluation. The
# digest is of these lines in LeRobot 0.6.1: edited ones might do what a worker does not know.
_BETWEEN = (("next(dl_iter)", "preprocessor(batch)"), ("in eval_dataloader:", "preprocessor(eval_batch)"))
_DIGEST = "b8a2282e048bedee"


class UnknownLoopError(Exception):
    """This train() is not the one that is known."""


@dataclass(frozen=True)
class Loop:
    """What train() works with."""

    preprocessor: Any
    cameras: Sequence[str]


def of_caller() -> Loop | None:
    """The loop of the train() that is calling, or None if that is not who calls.

    Raises: UnknownLoopError: it is train(), but with other variables or another loop than in LeRobot 0.6.1.
    """
    frame = _train_frame()
    if frame is None:
        return None
    if any(_digest(frame, *marks) != _DIGEST for marks in _BETWEEN):
        raise UnknownLoopError("between the loader and the preprocessor, train() is not as in LeRobot 0.6.1")
    names = frame.f_locals
    if "preprocessor" not in names or "dataset" not in names:
        raise UnknownLoopError("train() has no variables called preprocessor and dataset")
    return Loop(names["preprocessor"], tuple(names["dataset"].meta.camera_keys))


def _train_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == _FUNCTION and code.co_filename.replace("\\", "/").endswith(_FILE):
            return frame
        frame = frame.f_back
    return None


def _digest(frame: FrameType, first: str, last: str) -> str | None:
    """Of the lines between the one with `first` and the one with `last`, without indentation."""
    try:
        lines = [line.strip() for line in inspect.getsource(frame.f_code).splitlines()]
    except (OSError, TypeError):
        return None
    begin = next((i for i, line in enumerate(lines) if first in line), len(lines))
    end = next((i for i, line in enumerate(lines) if last in line), begin)
    between = "\n".join(lines[begin + 1 : end]).replace("eval_batch", "batch")
    return hashlib.sha256(between.encode()).hexdigest()[:16]
