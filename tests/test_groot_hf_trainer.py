"""GR00T under transformers.Trainer with the interface of NVIDIA's Gr00tTrainer, native against patched.

The model is LeRobot's port, see testing_groot_trainer. What NVIDIA's own classes do is in tests/real_gr00t.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

import somaspeed_patch
from somaspeed_patch import testing_accelerate
from somaspeed_patch.sites import site
from somaspeed_patch.testing_groot_trainer import Batches, Gr00tLikeTrainer, make_model

STEPS = 20
TARGETS = ("groot", "hf_trainer", "accelerate_clip")
SETTINGS = {"optimizer": False}  # Triton's interpreter takes a minute an update; test_optim_trainer has it


class Gradients(TrainerCallback):
    """Those of the last update, before the optimizer uses them and after clipping."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Run:
    """What a run leaves behind."""

    logs: list[dict[str, float]]
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(folder: Path, *, patched, accumulate=1, embodiments=(10,), dropout=0.0, steps=STEPS, resume=None):
    testing_accelerate.forget()
    model, gradients = make_model(dropout), Gradients()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, gradient_accumulation_steps=accumulate, learning_rate=1e-4,
        logging_steps=1, save_steps=10, optim="adamw_torch", use_cpu=True,
        report_to=[], remove_unused_columns=False, ignore_data_skip=True, seed=0, max_grad_norm=1.0,
        disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=2,
    )  # fmt: skip
    trainer = Gr00tLikeTrainer(
        model=model, args=arguments, train_dataset=Batches(embodiments), callbacks=[gradients]
    )
    if patched:
        with somaspeed_patch.patched(*TARGETS, **SETTINGS):
            before = site("groot/frozen_prefix").calls
            trainer.train(resume_from_checkpoint=resume)
            served = site("groot/frozen_prefix").calls - before
        assert served == (steps if resume is None else steps - 10) * accumulate
    else:
        trainer.train(resume_from_checkpoint=resume)
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Run(logs, trainer.losses, gradients.found, weights)


def assert_same(native, ours):
    assert len(native.logs) == len(ours.logs) > 0
    for theirs, mine in zip(native.logs, ours.logs, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1.01e-4), (
            theirs,
            mine,
        )  # 4 digits
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), (theirs, mine)
        assert mine["learning_rate"] == theirs["learning_rate"]
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(native.losses), rtol=1e-5, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in native.gradients.values())
    assert native.gradients.keys() == ours.gradients.keys()
    for name, gradient in native.gradients.items():
        assert float((ours.gradients[name] - gradient).abs().max()) <= 1e-4 * largest, name
    assert native.weights.keys() == ours.weights.keys()
    for name, weight in native.weights.items():
        if name.endswith("to_k.bias"):
            continue  # it moves a row's scores alike, so its gradient is rounding, of which Adam makes steps
        assert float((ours.weights[name] - weight).abs().max()) <= 1e-5, name


@pytest.mark.parametrize(
    ("accumulate", "embodiments", "dropout"),
    [(1, (10,), 0.0), (1, (2, 10, 3), 0.2), (2, (2, 10, 3), 0.0), (4, (10,), 0.2)],
)
def test_twenty_updates_are_the_same(tmp_path, accumulate, embodiments, dropout):
    settings = {"accumulate": accumulate, "embodiments": embodiments, "dropout": dropout}
    native = train(tmp_path / "native", patched=False, **settings)
    assert_same(native, train(tmp_path / "ours", patched=True, **settings))


@pytest.mark.parametrize("first_patched", [False, True])
def test_a_checkpoint_goes_on_at_the_other(tmp_path, first_patched):
    train(tmp_path / "half", patched=first_patched, steps=10)
    saved = tmp_path / "half" / "checkpoint-10"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 10
    rest = train(tmp_path / "native", patched=False, resume=str(saved))
    assert_same(rest, train(tmp_path / "ours", patched=True, resume=str(saved)))
    assert len(rest.logs) == STEPS
