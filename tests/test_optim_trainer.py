"""transformers.Trainer with FusedAdamW, in Triton's interpreter and by torch's own step, against the host.

Checked: logged loss, grad_norm and learning_rate of 20 updates and the final weights, for both torch AdamWs,
accumulation with num_items_in_batch, clipping on and off; checkpoints resumed by the other side; what is left
to the host, and why; unpatch(). The budget is the host's own distance from the run whose clipping and AdamW
are in fp64 (`testing_optim`).

As a script, without TRITON_INTERPRET, it trains every case where torch's own step has to serve.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as replaced

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import somaspeed_patch
from somaspeed_patch import testing_accelerate
from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.sites import Site, site
from somaspeed_patch.testing_optim import (
    ExactAdamW,
    assert_within_budget,
    clip_exactly,
    error,
    forget_counts,
    small_tiles,
)

pytestmark = pytest.mark.skipif(not adamw.INTERPRETED, reason="the kernels reach a CPU in the interpreter")
OPTIMS, ACCUMULATE, CLIPS = ("adamw_torch", "adamw_torch_fused"), (1, 2, 8), (0.5, 0.0)
Case = tuple[str, int, float]
CASES: list[Case] = [*product(OPTIMS, ACCUMULATE, CLIPS)]
SAVING: Case = ("adamw_torch", 2, 0.5)
# Every pair of settings is among them; 20 steps take the interpreter 3 s.
BY_KERNELS: list[Case] = [
    SAVING, ("adamw_torch", 1, 0.0), ("adamw_torch", 8, 0.0),
    ("adamw_torch_fused", 1, 0.5), ("adamw_torch_fused", 2, 0.0), ("adamw_torch_fused", 8, 0.5),
]  # fmt: skip
TARGETS = ("accelerate_clip", "hf_trainer")
BOOT = json.dumps({"targets": TARGETS, "features": {}})
STEPS, ROWS, SAVED = 20, 2, 10
VOCABULARY = 11


class Tokens(nn.Module):
    """A tiny language model whose loss is normalised as transformers' are, by num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.bias = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.randn(8))

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        logits = torch.tanh(self.embed(input_ids) + self.bias) @ self.embed.weight.T
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Sequences of eight tokens, of which one to eight have a label."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (count, 9), generator=generator)
    found = []
    for i, row in enumerate(tokens):
        labels = row[1:].clone()
        labels[1 + i % 8 :] = -100
        found.append({"input_ids": row[:-1], "labels": labels})
    return found


@dataclass
class Result:
    """What a run logged and learned, its checkpoint, and the report's sites."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    checkpoint: Path
    sites: dict[str, Site]

    def logged(self, name: str) -> dict[str, Tensor]:
        return {name: torch.tensor([log[name] for log in self.logs], dtype=torch.float32)}

    def counts(self, name: str) -> tuple[int, int, int]:
        site = self.sites[name]
        return site.calls, site.native_calls, site.fallbacks


def trainer(folder: Path, case: Case, **options: Any) -> Trainer:
    optim, accumulate, max_norm = case
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        max_steps=STEPS, save_steps=SAVED, save_strategy="steps" if case == SAVING else "no",
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=accumulate, seed=3, optim=optim,
        max_grad_norm=max_norm, learning_rate=1e-2, weight_decay=0.1, adam_epsilon=1e-3, warmup_steps=5,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    return Trainer(Tokens(), arguments, train_dataset=rows(STEPS * ROWS * accumulate), **options)


def train(kind: str, case: Case, folder: Path, resume: Path | None = None) -> Result:
    """STEPS updates of one kind: native, exact, ours, or plain, which is ours by torch's own step."""
    forget_counts()
    testing_accelerate.forget()
    ours = somaspeed_patch.patched(*TARGETS) if kind in ("ours", "plain") else nullcontext()
    with small_tiles(128), ours, exact() if kind == "exact" else nullcontext():
        made = trainer(folder / f"{kind} {'-'.join(map(str, case))}", case)
        made.train(resume_from_checkpoint=str(resume) if resume else None)
        sites = {site.site: replace(site) for site in somaspeed_patch.report().sites}
    return Result(
        logs=[log for log in made.state.log_history if "loss" in log],
        weights={name: value.detach().clone() for name, value in made.model.named_parameters()},
        checkpoint=Path(made.args.output_dir) / f"checkpoint-{SAVED}",
        sites=sites,
    )


@contextmanager
def exact() -> Iterator[None]:
    """Clipping and AdamW in fp64."""
    native = Trainer.get_optimizer_cls_and_kwargs

    def optimizer_class(args: Any, model: Any = None) -> Any:
        settings = native(args, model)[1]
        return ExactAdamW, {name: value for name, value in settings.items() if name != "fused"}

    chosen = replaced.object(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(optimizer_class))
    with chosen, replaced.object(Accelerator, "clip_grad_norm_", clip_exactly):
        yield


def train_plain(folder: Path) -> dict[Any, Result]:
    """By case; and the native checkpoint resumed."""
    saved = train("native", SAVING, folder / "native").checkpoint
    resumed = {"resumed": train("plain", SAVING, folder / "resumed", resume=saved)}
    return resumed | {case: train("plain", case, folder) for case in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[Any, Result]:
    """By kind and case."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "SOMASPEED": BOOT}
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, str(folder)], env=environment, stdout=log, stderr=log
        )
    wanted = [*product(("native", "exact"), CASES), *product(("ours",), BY_KERNELS)]
    found = {(kind, case): train(kind, case, folder) for kind, case in wanted}
    assert child.wait(300) == 0, (folder / "log").read_text()[-3000:]
    plain = torch.load(folder / "plain.pt", weights_only=False)
    return found | {("plain", case): Result(**result) for case, result in plain.items()}


def assert_same_run(ours: Result, native: Result, truth: Result) -> None:
    assert len(ours.logs) == len(native.logs) == STEPS
    assert [log["learning_rate"] for log in ours.logs] == [log["learning_rate"] for log in native.logs]
    for name in ("loss", "grad_norm"):
        assert_within_budget(ours.logged(name), native.logged(name), truth.logged(name))
    assert_within_budget(ours.weights, native.weights, truth.weights)


@pytest.mark.parametrize(("kind", "case"), [*product(["ours"], BY_KERNELS), *product(["plain"], CASES)])
def test_twenty_updates_are_the_same(runs: dict[Any, Result], kind: str, case: Case) -> None:
    ours, native, truth = (runs[one, case] for one in (kind, "native", "exact"))
    assert_same_run(ours, native, truth)
    done = (STEPS, 0, 0) if kind == "ours" else (0, STEPS, 0)
    assert ours.counts("accelerate_clip/clip") == ours.counts("accelerate_clip/optimizer") == done
    assert ours.counts("hf_trainer/optimizer_class") == (1, 0, 0)


def test_a_trainer_imported_after_patch_chooses_ours(runs: dict[Any, Result], folder: Path) -> None:
    """SOMASPEED patches at the interpreter's start, before anything is imported."""
    assert (folder / "booted").read_text() == "FusedAdamW"


def test_torchs_own_step_is_reported_with_its_reason(runs: dict[Any, Result]) -> None:
    sites = runs["plain", SAVING].sites
    assert sites["accelerate_clip/clip"].reason == "parameters on cpu"
    assert sites["accelerate_clip/optimizer"].reason == "torch's step: parameters on cpu"


def test_clipping_and_accumulation_matter(runs: dict[Any, Result]) -> None:
    """What differs between the cases is far beyond the budget."""
    native, truth = runs["native", SAVING], runs["exact", SAVING]
    assert min(log["grad_norm"] for log in native.logs) > SAVING[2]
    for case in ((SAVING[0], 8, SAVING[2]), (SAVING[0], SAVING[1], 0.0)):
        other = runs["native", case]
        assert error(other.weights, truth.weights) > 1000 * error(native.weights, truth.weights)


def saved(run: Result) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The groups, and the state by place and name, of a run's checkpoint."""
    found = torch.load(run.checkpoint / "optimizer.pt", weights_only=True)
    state = {f"{i} {name}": value for i, entry in found["state"].items() for name, value in entry.items()}
    return found["param_groups"], state


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_checkpoint_is_as_torch_writes_it(runs: dict[Any, Result], kind: str) -> None:
    (groups, mine), (their_groups, theirs), (_, truth) = (
        saved(runs[one, SAVING]) for one in (kind, "native", "exact")
    )
    assert groups == their_groups
    assert sorted(theirs) == sorted(
        f"{i} {name}" for i in (0, 1) for name in ("exp_avg", "exp_avg_sq", "step")
    )
    assert mine["0 step"].shape == () and mine["0 step"] == SAVED
    assert_within_budget(mine, theirs, truth)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_the_host_resumes_our_checkpoint(runs: dict[Any, Result], kind: str, folder: Path) -> None:
    resumed = train("native", SAVING, folder / f"from {kind}", resume=runs[kind, SAVING].checkpoint)
    assert_same_run(resumed, runs["native", SAVING], runs["exact", SAVING])


def test_we_resume_the_hosts_checkpoint(runs: dict[Any, Result], folder: Path) -> None:
    native, truth = runs["native", SAVING], runs["exact", SAVING]
    ours = train("ours", SAVING, folder / "from native", resume=native.checkpoint)
    assert_same_run(ours, native, truth)
    assert ours.counts("accelerate_clip/optimizer") == (STEPS - SAVED, 0, 0)
    assert_same_run(runs["plain", "resumed"], native, truth)


def choose(arguments: Any, **changed: Any) -> tuple[type, Site]:
    """The class that the patched Trainer chooses, and what the report says."""
    forget_counts()
    arguments = SimpleNamespace(**{**vars(arguments), **changed})
    with somaspeed_patch.patched(*TARGETS):
        chosen = Trainer.get_optimizer_cls_and_kwargs(arguments)[0]
        return chosen, replace(site("hf_trainer/optimizer_class"))


@pytest.mark.parametrize(
    ("optim", "name"), [("sgd", "SGD"), ("adafactor", "Adafactor"), ("rmsprop", "RMSprop")]
)
def test_other_optimizers_are_left_alone_and_reported(folder: Path, optim: str, name: str) -> None:
    chosen, site = choose(trainer(folder, (optim, 1, 0.5)).args)
    assert chosen.__name__ == name
    assert (site.calls, site.native_calls) == (0, 1)
    assert optim in site.reason.lower() and site.reason.endswith("is not plain torch.optim.AdamW")


@pytest.mark.parametrize("launcher", [False, True])
def test_what_deepspeed_owns_is_left_alone_and_reported(
    folder: Path, launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = None if launcher else {"zero_optimization": {"stage": 2}}
    arguments = trainer(folder, ("adamw_torch", 1, 0.5)).args
    assert choose(arguments)[0] is FusedAdamW
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(launcher).lower())
    chosen, site = choose(arguments, deepspeed=config)
    assert chosen is torch.optim.AdamW
    assert site.reason == "DeepSpeed owns the optimizer"


def test_an_optimizer_of_the_scripts_own_stays(folder: Path) -> None:
    forget_counts()
    with somaspeed_patch.patched(*TARGETS):
        made = trainer(folder, ("adamw_torch", 1, 0.5))
        own = torch.optim.AdamW(made.model.parameters(), lr=0.1)
        made = trainer(folder, ("adamw_torch", 1, 0.5), optimizers=(own, None))
        made.train()
        assert site("accelerate_clip/clip").reason == "the optimizer is AdamW, not FusedAdamW"
        assert site("hf_trainer/optimizer_class").calls == 0


def test_switched_off_and_unpatched_it_is_the_hosts(folder: Path) -> None:
    before = dict(vars(Trainer))
    arguments = trainer(folder, ("adamw_torch", 1, 0.5)).args
    with somaspeed_patch.patched(*TARGETS, optimizer=False):
        assert Trainer.get_optimizer_cls_and_kwargs(args=arguments)[0] is torch.optim.AdamW
        assert site("hf_trainer/optimizer_class").reason == "optimizer=False"
    after = dict(vars(Trainer))
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


if __name__ == "__main__":
    where = Path(sys.argv[1])
    booted = Trainer.get_optimizer_cls_and_kwargs(trainer(where, SAVING).args)[0]
    (where / "booted").write_text(booted.__name__)
    somaspeed_patch.unpatch()
    torch.save({case: vars(result) for case, result in train_plain(where).items()}, where / "plain.pt")
