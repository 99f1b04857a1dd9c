"""GR00T on transformers.Trainer under DeepSpeed's ZeRO-2, on a CPU: the runs that test_zero2.py compares.

    DS_ACCELERATOR=cpu python -m somaspeed_patch.testing_zero2 FOLDER

torchrun's agent starts the ranks, on gloo, as forks of this process: importing all of it takes 15 s. The
optimizer is the Trainer's, which DeepSpeed wraps, or AdamW of DeepSpeed's config. Each rank saves what its
runs found, by name, as FOLDER/2.rank0.pt and so on, where 2 is the number of ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import PrinterCallback, TrainingArguments

import somaspeed_patch
from somaspeed_patch.testing_groot_trainer import Batches, Gr00tLikeTrainer, make_model
from somaspeed_patch.testing_optim import forget_counts

LIMIT = 120.0  # seconds for all runs of one rank; they need 10
STEPS, SAVED = 20, 10
KINDS = {1: ("config", 1), 2: ("trainer", 2)}
"""By number of ranks: whose optimizer, and the micro-batches of an update."""
MAX_NORM = 1.0  # the norms are 0.8 to 9
TARGETS = ("groot", "hf_trainer", "accelerate_clip")
EMBODIMENTS = (10, 2)
_ADAMW = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")


def config(optimizer: str) -> dict[str, Any]:
    """A DeepSpeed config of stage 2 in fp32, with small buckets: a tiny model fills several."""
    found: dict[str, Any] = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
        "gradient_clipping": "auto", "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    if optimizer == "config":  # DeepSpeed's own CPU Adam would have to be compiled
        found["optimizer"] = {"type": "AdamW", "params": {**_ADAMW, "torch_adam": True}}
    return found


@dataclass(frozen=True)
class Ranks:
    """The runs of one rank among others of its kind."""

    folder: Path
    optimizer: str
    """whose: "trainer" or "config" """
    accumulate: int
    """micro-batches of an update"""

    def runs(self) -> dict[str, dict[str, Any]]:
        """Native; patched, by name or by plain `patch()`; and each of them behind the other's checkpoint."""
        patched = somaspeed_patch.patched
        return {
            "native": self.train("native", nullcontext()),
            "ours": self.train("ours", patched() if self.optimizer == "config" else patched(*TARGETS)),
            "native from ours": self.train("rest", nullcontext(), resume="ours"),
            "ours from native": self.train("rest", patched(*TARGETS), resume="native"),
        }

    def train(
        self, name: str, patching: AbstractContextManager[Any], resume: str | None = None
    ) -> dict[str, Any]:
        """STEPS updates, or those behind another run's checkpoint of SAVED ones.

        Args:
            name: of the folder for its own checkpoint.
            patching: entered for the training.
            resume: the other run's name.

        Returns: losses [micro-batches of this run] fp32; norms and rates, a float for each of STEPS updates;
            weights by name; engine: its class, its optimizer's and the stage; sites: calls, native calls,
            fallbacks and reason by name.
        """
        forget_counts()
        AcceleratorState._reset_state()
        GradientState._reset_state()
        trainer = self._trainer(self.folder / name, done=0 if resume is None else SAVED)
        with patching:
            saved = None if resume is None else str(self.folder / resume / f"checkpoint-{SAVED}")
            trainer.train(resume_from_checkpoint=saved)
            sites = somaspeed_patch.report().sites
        engine = trainer.model_wrapped
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        return {
            "losses": torch.stack(trainer.losses),
            "norms": [log["grad_norm"] for log in logs],
            "rates": [log["learning_rate"] for log in logs],
            "weights": {key: value.clone() for key, value in trainer.model.state_dict().items()},
            "engine": (
                type(engine).__name__, type(engine.optimizer).__name__, engine.zero_optimization_stage(),
            ),
            "sites": {s.site: (s.calls, s.native_calls, s.fallbacks, s.reason) for s in sites},
        }  # fmt: skip

    def _trainer(self, folder: Path, done: int) -> Gr00tLikeTrainer:
        """One that goes on behind `done` updates.

        The gradient of a key projection's bias is zero but for rounding, of which AdamW makes whole steps,
        but not with this epsilon.
        """
        rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=STEPS, gradient_accumulation_steps=self.accumulate,
            learning_rate=1e-3, adam_epsilon=1e-3, weight_decay=0.1, logging_steps=1, save_steps=SAVED,
            optim="adamw_torch", use_cpu=True, report_to=[], remove_unused_columns=False,
            ignore_data_skip=True, seed=0, max_grad_norm=MAX_NORM, disable_tqdm=True,
            lr_scheduler_type="cosine", warmup_steps=2, deepspeed=config(self.optimizer),
        )  # fmt: skip
        batches = Batches(EMBODIMENTS, start=done * self.accumulate * world + rank, stride=world)
        trainer = Gr00tLikeTrainer(model=make_model(dropout=0.0), args=arguments, train_dataset=batches)
        trainer.remove_callback(PrinterCallback)
        return trainer


def launch(world: int, folder: Path) -> None:
    """The runs of `world` ranks."""
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, start_method="fork", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="127.0.0.1", max_restarts=0,
    )  # fmt: skip
    elastic_launch(settings, _rank)(world, folder)


def _rank(world: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    found = Ranks(folder / str(world), *KINDS[world]).runs()
    torch.save(found, folder / f"{world}.rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    make_model(dropout=0.0)  # imports LeRobot's policies
    for ranks in KINDS:
        launch(ranks, Path(sys.argv[1]))
