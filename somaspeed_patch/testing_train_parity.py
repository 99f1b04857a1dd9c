"""What the tests of whole runs share: lerobot-train in this process, native or patched, and what may differ.

train = partial(run, target="pi05", site="pi05/frozen_prefix")
native = train(arguments, folder / "native", patched=False)
assert_same_run(native, train(arguments, folder / "ours", patched=True), count=20)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import somaspeed_patch
from somaspeed_patch.testing_frames import decoded_once
from somaspeed_patch.tiny import help_texts

Run = tuple[list[dict[str, Any]], Path]
"""A run's updates as the recorder saw them, and its last checkpoint."""


def run(
    arguments: Sequence[str], folder: Path, *, target: str, site: str, patched: bool, steps: int = 20
) -> Run:
    """Run lerobot-train.

    Args:
        arguments: the host's, without steps and output folder.
        folder: for the run; the record of its updates lies beside it.
        target: the adapter that a patched run has, beside the recorder.
        site: of it, which has to serve every update of a patched run, and none of a native one.
        patched: which of the two.
        steps: updates.
    """
    from accelerate.state import AcceleratorState
    from lerobot.scripts.lerobot_train import main

    help_texts.drop()
    record = folder.with_suffix(".steps.jsonl")
    targets = ("step_recorder", target) if patched else ("step_recorder",)
    before, sys.argv = sys.argv, ["lerobot-train", *arguments, f"--steps={steps}", f"--output_dir={folder}"]
    try:
        with decoded_once(), somaspeed_patch.patched(*targets, record_steps=str(record)):
            served = calls(site)
            main()
            served = calls(site) - served
    finally:
        sys.argv = before
        AcceleratorState._reset_state(reset_partial_state=True)
    updates = [json.loads(line) for line in record.read_text().splitlines()]
    assert served == (len(updates) if patched else 0)
    return updates, folder / "checkpoints" / f"{steps:06d}" / "pretrained_model"


def calls(site: str) -> int:
    """How often our code served a site."""
    return sum(found.calls for found in somaspeed_patch.report().sites if found.site == site)


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """A checkpoint's weights, or its adapter's, by name."""
    return dict(load_file(next(checkpoint.glob("*model.safetensors"))))


def assert_same_run(native: Run, ours: Run, count: int) -> None:
    """`count` updates with the same losses, norms and rates in fp32, and the same weights after them."""
    assert len(native[0]) == len(ours[0]) == count
    for theirs, mine in zip(native[0], ours[0], strict=True):
        assert math.isclose(mine["loss"], theirs["loss"], rel_tol=1e-5), (mine, theirs)
        assert math.isclose(mine["grad_norm"], theirs["grad_norm"], rel_tol=1e-4), (mine, theirs)
        assert mine["lr"] == theirs["lr"]
    native_weights, our_weights = weights(native[1]), weights(ours[1])
    assert native_weights.keys() == our_weights.keys()
    for name, value in native_weights.items():
        assert our_weights[name].dtype == value.dtype
        assert (our_weights[name] - value).abs().max() <= 1e-5, name
