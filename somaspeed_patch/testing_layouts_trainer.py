"""transformers.Trainer under layouts, on gloo ranks: what the tests of it share.

    # in the test file, which is also the script that imports everything once and forks the ranks:
    RUNS = {"fsdp": TrainerRun(ranks=2, layout="dp_shard=2"), ...}
    if __name__ == "__main__":
        serve(RUNS)
    found = run_all(__file__, tmp_path)["fsdp"]   # a list: each rank's dictionary

An update has ROWS samples, whose values, noise and flow times follow from their number alone, however many
ranks and micro-batches share them. The model is LeRobot's tiny GR00T with the interface of NVIDIA's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as replaced

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PrinterCallback, TrainingArguments

import somaspeed_patch
from somaspeed_patch import testing_ranks
from somaspeed_patch.testing_groot import make_config, make_raw_batch
from somaspeed_patch.testing_groot_trainer import Gr00tLikeTrainer, make_model

ROWS, STEPS, SAVED = 8, 5, 2
MAX_NORM = 3.0  # the norms are 1.7 to 4.4
LIMIT = 100.0  # seconds a run may take; they need 1 to 3
TARGETS = ("layouts", "layouts_trainer", "groot", "hf_trainer", "accelerate_clip")
ZERO2: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1e8},
    "gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "communication_data_type": "bf16",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainerRun:
    """One training."""

    ranks: int = 1
    layout: str | None = None
    """None: unpatched"""
    accumulate: int = 1
    """micro-batches of an update"""
    resumes: str | None = None
    """the run behind whose checkpoint it goes on"""
    best: str | None = None
    """the run whose checkpoint it loads as its best one, behind the last update"""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """of TrainingArguments"""
    before: Callable[[Path], None] | None = None
    """called once with the folder of all runs, before the ranks start"""


class Rows(IterableDataset[dict[str, Any]]):
    """A rank's micro-batches, endless: {"inputs": batch, "rows": its numbers [rows]}."""

    def __init__(self, run: TrainerRun, rank: int) -> None:
        self.start = SAVED * ROWS if run.resumes else 0
        self.size = ROWS // run.ranks // run.accumulate
        self.first, self.accumulate = rank * ROWS // run.ranks, run.accumulate

    def __iter__(self) -> Iterator[dict[str, Any]]:
        policy = SimpleNamespace(config=make_config())
        for update in range(self.start, 10**6, ROWS):
            for micro in range(self.accumulate):
                first = update + self.first + micro * self.size
                rows = torch.arange(first, first + self.size)
                yield {"inputs": _joined([_row(policy, row) for row in rows.tolist()]), "rows": rows}


def _row(policy: Any, number: int) -> dict[str, Tensor]:
    robot = (10, 2)[number % 2]
    batch: dict[str, Tensor] = make_raw_batch(policy, [[(2, 2)]], embodiments=[robot], seed=number)
    return batch


def _joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class RowsTrainer(Gr00tLikeTrainer):
    """Tells the model's noise which rows it is for."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The host's."""
        _drawn.rows = inputs.pop("rows").tolist()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


_drawn = SimpleNamespace(rows=[])


@contextmanager
def _draws() -> Iterator[None]:
    from lerobot.policies.groot import groot_n1_7 as host

    def generator(row: int) -> torch.Generator:
        return torch.Generator().manual_seed(row)

    def noise(shape: torch.Size, **options: Any) -> Tensor:
        options.pop("device")
        return torch.stack(
            [torch.randn(shape[1:], generator=generator(row), **options) for row in _drawn.rows]
        )

    def sample_time(self: Any, batch_size: int, device: Any, dtype: Any) -> Tensor:
        times = [torch.rand((), generator=generator(row + 10**6), dtype=dtype) for row in _drawn.rows]
        return torch.stack(times)

    torch_ = replaced.object(host, "torch", testing_ranks.TorchBut(noise))
    with torch_, replaced.object(host.GR00TN17ActionHead, "sample_time", sample_time):
        yield


@contextmanager
def _counted(counts: Counter[str]) -> Iterator[None]:
    """The collectives that reduce gradients, by name."""
    with ExitStack() as stack:
        for name in ("reduce_scatter_tensor", "all_reduce"):
            stack.enter_context(replaced.object(dist, name, _counting(name, counts)))
        yield


def _counting(name: str, counts: Counter[str]) -> Callable[..., Any]:
    collective = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return collective(*args, **kwargs)

    return call


def arguments_of(folder: Path, run: TrainerRun) -> TrainingArguments:
    """fp32, and an epsilon with which a gradient that is zero but for rounding makes no steps."""
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "gradient_accumulation_steps": run.accumulate,
        "learning_rate": 1e-3, "adam_epsilon": 1e-3, "weight_decay": 0.1, "logging_steps": 1,
        "save_steps": SAVED, "optim": "adamw_torch", "use_cpu": True, "report_to": [], "seed": 0,
        "remove_unused_columns": False, "ignore_data_skip": True, "max_grad_norm": MAX_NORM,
        "disable_tqdm": True, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **run.arguments})


def train(run: TrainerRun, folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Train, save, and tell.

    Returns: losses [updates] fp32, the mean of this rank's micro-batches; norms and rates, a float an update;
        counts of collectives; sites: calls, native calls and reason by name; state: see `_held`.
    """
    ours = somaspeed_patch.patched(*TARGETS, layout=run.layout) if run.layout else nullcontext()
    counts: Counter[str] = Counter()
    with ours:
        trainer = RowsTrainer(
            model=make_model(0.0), args=arguments_of(folder / name, run), train_dataset=Rows(run, rank)
        )
        trainer.remove_callback(PrinterCallback)
        saved = folder / run.resumes / f"checkpoint-{SAVED}" if run.resumes else None
        with _counted(counts):
            trainer.train(resume_from_checkpoint=str(saved) if saved else None)
        trainer.save_model(str(folder / name / "final"))
        sites = somaspeed_patch.report().sites
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        refused = _after_the_best(trainer, folder, run.best) if run.best else ""
    if rank == 0:
        (folder / name / "groups.json").write_text(json.dumps(_groups(trainer)))
    return {
        "losses": torch.stack(trainer.losses).view(-1, run.accumulate).mean(1),
        "norms": [float(log["grad_norm"]) for log in logs],
        "rates": [log["learning_rate"] for log in logs],
        "counts": dict(counts),
        "sites": {s.site: (s.calls, s.native_calls, s.reason) for s in sites},
        "state": _held(trainer),
        "refused": refused,
    }


def _after_the_best(trainer: Any, folder: Path, best: str) -> str:
    """Load another run's checkpoint as the best, save what that makes, and train on: why that is refused."""
    trainer.state.best_model_checkpoint = str(folder / best / f"checkpoint-{SAVED}")
    trainer._load_best_model()
    trainer.save_model(str(Path(trainer.args.output_dir) / "best"))
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


def _groups(trainer: Any) -> list[list[str]]:
    """The names of the optimizer's parameters, group by group."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]


def _held(trainer: Any) -> dict[str, Any]:
    """dtypes of the trained parameters and their moments, numbers held here and in all."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return {
        "dtypes": {str(tensor.dtype) for tensor in (*parameters, *moments)},
        "here": sum(p.numel() for p in local),
        "all": sum(p.numel() for p in parameters),
        "optimizer": type(optimizer).__name__,
    }


def run_all(script: str, folder: Path, *names: str) -> dict[str, Any]:
    """Run the script's RUNS (or the named ones) in one process that imports once.

    Returns: by name, the ranks' dictionaries, or the text of the error that ended the run.

    Raises: RuntimeError: the script itself failed.
    """
    ranks = testing_ranks.run_script(script, folder, *names, timeout=600)
    return {name: _found(folder, name, count) for name, count in ranks.items()}


def _found(folder: Path, name: str, ranks: int) -> Any:
    error = folder / f"{name}.error"
    if error.exists():
        return error.read_text()
    return [torch.load(folder / f"{name}.rank{rank}.pt") for rank in range(ranks)]


def serve(runs: Mapping[str, TrainerRun]) -> None:
    """In the script of `run_all`."""
    make_model(0.0)  # imports LeRobot's policies, once for all forks
    testing_ranks.serve(runs, _rank, before=_before, limit=LIMIT)


def _before(run: TrainerRun, folder: Path) -> None:
    if run.before is not None:
        run.before(folder)


def _rank(rank: int, run: TrainerRun, folder: Path, name: str) -> None:
    with _draws():
        found = train(run, folder, name, rank)
    torch.save(found, folder / f"{name}.rank{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
