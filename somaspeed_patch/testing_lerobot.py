"""What the optimizer's LeRobot tests share: lerobot-train on the shipped frames, with a tiny policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import torch
from safetensors.torch import load_file
from torch import Tensor

import somaspeed_patch
from somaspeed_patch.testing_frames import FRAMES, decoded_once
from somaspeed_patch.testing_optim import ExactAdamW, clip_exactly, forget_counts, small_tiles
from somaspeed_patch.tiny import help_texts
from somaspeed_patch.tiny_pi05 import byte_tokenizer
from somaspeed_patch.tiny_pi05.shrink import shrunk
from somaspeed_patch.tiny_pi05.sizes import Size

# The kernels take the interpreter 25 to 35 ms a parameter and step; "micro" trains 33 parameters, this 21.
LEAST = Size(
    vlm_width=32, vlm_mlp=32, expert_width=16, expert_mlp=16, depth=1, head_dim=8,
    vision_width=16, vision_mlp=16, vision_depth=1, vision_heads=2,
)  # fmt: skip
TRAINED = 21
TRAIN = [
    "--dataset.repo_id=somaspeed/libero_spatial_tiny", f"--dataset.root={FRAMES}",
    "--dataset.video_backend=pyav", "--num_workers=0", "--env_eval_freq=0", "--seed=7", "--batch_size=2",
    "--policy.type=pi05", "--policy.device=cpu", "--policy.push_to_hub=false", "--policy.chunk_size=4",
    "--policy.n_action_steps=4", "--policy.image_resolution=[28,28]", "--policy.train_expert_only=true",
    "--policy.tokenizer_max_length=96",
]  # fmt: skip
TARGETS = ("lerobot_train", "lerobot_optimizer", "accelerate_clip")


@dataclass(frozen=True)
class Run:
    """What a run of lerobot-train left in its folder."""

    folder: Path

    @property
    def updates(self) -> list[dict[str, Any]]:
        """Every update, as the recorder saw it."""
        return [json.loads(line) for line in _record(self.folder).read_text().splitlines()]

    def logged(self, name: str) -> dict[str, Tensor]:
        """One number of every update, [steps]."""
        return {name: torch.tensor([update[name] for update in self.updates], dtype=torch.float32)}

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step` updates."""
        return self.folder / "checkpoints" / f"{step:06d}"

    def config(self, step: int) -> Path:
        """What --config_path takes to go on."""
        return self.checkpoint(step) / "pretrained_model" / "train_config.json"

    def weights(self, step: int) -> dict[str, Tensor]:
        """The policy's, by name."""
        return _load(self.checkpoint(step) / "pretrained_model" / "model.safetensors")

    def state(self, step: int) -> dict[str, Tensor]:
        """The optimizer's: "state/<parameter>/<name>"."""
        return _load(self.checkpoint(step) / "training_state" / "optimizer_state.safetensors")

    def site(self, name: str) -> dict[str, Any]:
        """One site of the report in the output folder."""
        report = json.loads((self.folder / "somaspeed_report.json").read_text())
        return next(site for site in report["sites"] if site["site"] == name)

    def counts(self, name: str) -> tuple[int, int, int]:
        """A site's calls, native calls and fallbacks."""
        found = self.site(name)
        return found["calls"], found["native_calls"], found["fallbacks"]


def _load(file: Path) -> dict[str, Tensor]:
    return dict(load_file(file))


def _record(folder: Path) -> Path:
    return folder.with_suffix(".steps.jsonl")


@contextmanager
def tiny() -> Iterator[None]:
    """pi0.5 in the least size, with a byte tokenizer, and kernels in small tiles."""
    with shrunk(LEAST), small_tiles():
        byte_tokenizer.install()
        try:
            yield
        finally:
            byte_tokenizer.uninstall()


@contextmanager
def exact() -> Iterator[None]:
    """accelerate clips, and AdamWConfig's optimizer updates, in fp64."""
    from accelerate import Accelerator
    from lerobot.optim.optimizers import AdamWConfig

    build = AdamWConfig.build

    def build_exact(config: Any, params: Any) -> ExactAdamW:
        return ExactAdamW(build(config, params).param_groups)

    clipping = replaced.object(Accelerator, "clip_grad_norm_", clip_exactly)
    with replaced.object(AdamWConfig, "build", build_exact), clipping:
        yield


def lerobot_train(arguments: Sequence[str], folder: Path, *targets: str, **features: Any) -> Run:
    """Run lerobot-train in this process, with the recorder and `targets`; nothing may be patched yet."""
    from accelerate.state import AcceleratorState
    from lerobot.scripts.lerobot_train import main

    help_texts.drop()
    forget_counts()
    before, sys.argv = sys.argv, ["lerobot-train", *arguments, f"--output_dir={folder}"]
    record = str(_record(folder))
    try:
        ours = somaspeed_patch.patched("step_recorder", *targets, record_steps=record, **features)
        with decoded_once(), ours:
            main()
    finally:
        sys.argv = before
        AcceleratorState._reset_state(reset_partial_state=True)
    return Run(folder)
