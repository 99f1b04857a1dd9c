"""The step recorder on a small loop with the host's own seams: what is an update, and what is left alone."""

import json

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import testing_accelerate

accelerate = pytest.importorskip("accelerate")
logging_utils = pytest.importorskip("lerobot.utils.logging_utils")


class Trainer:
    """LeRobot's loop in small: the same calls in the same order."""

    def __init__(self, samples=10, batch=4):
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = [{"task": "x", "x": torch.randn(3)} for _ in range(samples)]
        loader = torch.utils.data.DataLoader(rows, batch_size=batch)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        meters = {name: logging_utils.AverageMeter(name) for name in ("loss", "grad_norm", "lr")}
        self.tracker = logging_utils.MetricsTracker(batch, samples, 1, meters, accelerator=self.accelerator)
        self.losses, self.norms = [], []

    def train(self, steps, *, clip=True, evaluate=False):
        batches = iter(())
        for _ in range(steps):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(self.loader)
                batch = next(batches)
            self.update(batch, clip)
            if evaluate:
                self.evaluate()
        return self

    def update(self, batch, clip):
        with self.accelerator.autocast():
            loss = (self.model(batch["x"]) + 0.1 * torch.randn(1)).square().mean()
        self.accelerator.backward(loss)
        clipper = self.accelerator.clip_grad_norm_ if clip else torch.nn.utils.clip_grad_norm_
        norm = clipper(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tracker.loss, self.tracker.grad_norm = loss.item(), norm.item()
        self.tracker.lr = self.optimizer.param_groups[0]["lr"]
        self.losses.append(loss.item())
        self.norms.append(norm.item())
        self.tracker.step()

    def evaluate(self):
        with torch.no_grad(), self.accelerator.autocast():
            for batch in self.loader:
                self.model(batch["x"])


@pytest.fixture
def record(tmp_path):
    """Train with the recorder on; the trainer and the lines."""

    def record(steps, **options):
        file = tmp_path / "deep" / "steps.jsonl"
        with somaspeed_patch.patched("step_recorder", record_steps=str(file)):
            trainer = Trainer().train(steps, **options)
        return trainer, [json.loads(line) for line in file.read_text().splitlines()]

    return record


def test_every_update_has_the_values_of_the_run(record):
    trainer, lines = record(5)
    assert [line["loss"] for line in lines] == trainer.losses
    assert [line["grad_norm"] for line in lines] == trainer.norms
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["samples"] for line in lines] == [4, 4, 2, 4, 4]  # over the end of an epoch
    assert {(line["rank"], line["world"], line["device"], line["lr"]) for line in lines} == {
        (0, 1, "cpu", 0.01)
    }
    assert all(line["peak_kind"] == "process max RSS" and line["peak_bytes"] > 2**26 for line in lines)


def test_phases_add_up_to_the_total(record):
    for line in record(4)[1]:
        phases = {name: value for name, value in line["seconds"].items() if name != "total"}
        assert list(phases) == ["data", "preprocess", "forward", "backward", "optimizer"]
        assert min(phases.values()) > 0
        assert sum(phases.values()) == pytest.approx(line["seconds"]["total"])


def test_on_cuda_phases_are_of_events_and_an_update_synchronizes_once(record, monkeypatch):
    from somaspeed_patch.ab import recorder

    class Event:
        """Each record is one second after the last."""

        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.clock += 1.0
            self.at = Event.clock

        def elapsed_time(self, later):
            return 1e3 * (later.at - self.at)

    synchronized = []
    monkeypatch.setattr(recorder, "_on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(Event.clock))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    for line in record(3)[1]:
        seconds = line["seconds"]
        assert [seconds[name] for name in recorder.PHASES] == [1.0] * 5 and 0 < seconds["total"] < 1
        assert (line["peak_bytes"], line["peak_kind"], line["device"]) == (123, "CUDA allocated", "GPU")
    assert synchronized == [6.0, 12.0, 18.0]


def test_a_norm_that_accelerate_does_not_compute_is_taken_from_the_tracker(record):
    trainer, lines = record(3, clip=False)
    assert [line["grad_norm"] for line in lines] == trainer.norms


def test_evaluation_is_no_update(record):
    trainer, lines = record(3, evaluate=True)
    assert [line["samples"] for line in lines] == [4, 4, 2]
    assert [line["loss"] for line in lines] == trainer.losses


def test_recording_changes_nothing(record):
    plain = Trainer().train(5)
    state = torch.get_rng_state()
    recorded, _ = record(5)
    assert recorded.losses == plain.losses and recorded.norms == plain.norms
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_file_nothing_is_recorded(tmp_path):
    with somaspeed_patch.patched("step_recorder"):
        Trainer().train(2)
    assert not list(tmp_path.iterdir())


def test_unpatching_restores_the_seams(record):
    seams = [accelerate.Accelerator, logging_utils.MetricsTracker, accelerate.optimizer.AcceleratedOptimizer]
    before = [dict(vars(seam)) for seam in seams]
    record(1)
    assert [dict(vars(seam)) for seam in seams] == before


def test_lines_are_on_disk_as_soon_as_an_update_ends(tmp_path):
    file = tmp_path / "steps.jsonl"
    with somaspeed_patch.patched("step_recorder", record_steps=str(file)):
        trainer = Trainer().train(2)
        assert len(file.read_text().splitlines()) == 2
        trainer.train(1)
        assert len(file.read_text().splitlines()) == 3


class Model(torch.nn.Module):
    """Answers a Trainer with its loss; draws, as a policy does."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, batch):
        return {"loss": (self.linear(batch["x"]) + 0.1 * torch.randn(1)).square().mean()}


@pytest.fixture
def train(tmp_path):
    """Train with transformers.Trainer; its log, and the recorded lines."""
    transformers = pytest.importorskip("transformers")

    class RawLoader(transformers.Trainer):
        def get_train_dataloader(self):
            options = {"batch_size": self.args.per_device_train_batch_size, "collate_fn": self.data_collator}
            return torch.utils.data.DataLoader(self.train_dataset, **options)

    def collate(rows):
        x = torch.stack(rows)
        patches = torch.zeros(6 * len(rows), 2)  # a batch has more of them than samples
        return {"batch": {"patches": patches, "x": x, "y": x[:, 0], "task": ["x"] * len(rows)}}

    def train(steps, *, raw=False, accumulation=1, record=True):
        file = tmp_path / f"{raw}-{accumulation}.jsonl"
        testing_accelerate.forget()
        torch.manual_seed(0)
        rows = list(torch.randn(10 * accumulation, 3))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, seed=1,
            gradient_accumulation_steps=accumulation, logging_steps=1, report_to="none", disable_tqdm=True,
            save_strategy="no", remove_unused_columns=False, learning_rate=1e-2, max_grad_norm=0.5,
        )  # fmt: skip
        settings = {"record_steps": str(file)} if record else {}
        with somaspeed_patch.patched("step_recorder", **settings):
            kind = RawLoader if raw else transformers.Trainer
            trainer = kind(model=Model(), args=arguments, train_dataset=rows, data_collator=collate)
            trainer.train()
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        return log, [json.loads(line) for line in file.read_text().splitlines()] if record else []

    return train


@pytest.mark.parametrize("raw", [False, True], ids=["accelerate's loader", "raw loader"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_update_of_a_trainer(train, raw, accumulation):
    log, lines = train(5, raw=raw, accumulation=accumulation)
    for name, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "learning_rate")):
        found, expected = [line[name] for line in lines], [entry[key] for entry in log]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-4 if name == "loss" else 0), name
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    per_epoch = [4, 4, 2] if accumulation == 1 else [8, 8, 4]
    assert [line["samples"] for line in lines] == [*per_epoch, *per_epoch[:2]]
    for line in lines:
        phases = {name: value for name, value in line["seconds"].items() if name != "total"}
        assert min(phases.values()) > 0
        assert sum(phases.values()) == pytest.approx(line["seconds"]["total"])


def test_recording_changes_nothing_of_a_trainer(train):
    plain, _ = train(4, record=False)
    state = torch.get_rng_state()
    recorded, _ = train(4)
    assert [entry["loss"] for entry in recorded] == [entry["loss"] for entry in plain]
    assert torch.equal(torch.get_rng_state(), state)
