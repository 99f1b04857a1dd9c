"""The real lerobot-train with the preprocessor in its workers: the same run, to the bit."""

import json
import shutil

import pytest
from accelerate import Accelerator
from lerobot.processor.pipeline import DataProcessorPipeline
from lerobot.utils.logging_utils import MetricsTracker
from safetensors.torch import load_file

import somaspeed_patch
from somaspeed_patch.testing_lerobot import TRAIN, Run, lerobot_train, tiny
from somaspeed_patch.testing_pi05 import make_dataset
from somaspeed_patch.workers import hooks

OURS = ("lerobot_train", "lerobot_workers")
SITE, CACHED = "lerobot_workers/worker_preprocess", "lerobot_workers/cached_batches"
WORKERS = [
    *(argument for argument in TRAIN if not argument.startswith("--num_workers")), "--num_workers=2",
    "--dataloader_multiprocessing_context=fork", "--log_freq=0",
]  # fmt: skip
SIX = [*WORKERS, "--steps=6", "--save_freq=3"]
EVALUATION = ["--eval_steps=3", "--dataset.eval_split=0.5", "--max_eval_samples=6"]


@pytest.fixture(scope="module", autouse=True)
def small():
    with tiny():
        yield


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return lerobot_train(SIX, tmp_path_factory.mktemp("native") / "run")


def same_numbers(native, ours, count=6):
    assert len(ours.updates) == count
    for theirs, mine in zip(native.updates[-count:], ours.updates, strict=True):
        assert [mine[name] for name in ("step", "loss", "grad_norm", "lr", "samples")] == [
            theirs[name] for name in ("step", "loss", "grad_norm", "lr", "samples")
        ]


def same_files(native, ours, step=6):
    """Saved preprocessor, and where every random number generator stands."""
    theirs, mine = native.checkpoint(step), ours.checkpoint(step)
    saved = sorted(file.name for file in (theirs / "pretrained_model").glob("policy_*"))
    assert any(name.endswith(".json") for name in saved) and any("safetensors" in name for name in saved)
    for name in saved:
        assert (mine / "pretrained_model" / name).read_bytes() == (
            theirs / "pretrained_model" / name
        ).read_bytes()
    states = [load_file(folder / "training_state" / "rng_state.safetensors") for folder in (theirs, mine)]
    assert states[0].keys() == states[1].keys()
    assert all(state.equal(states[1][name]) for name, state in states[0].items())


def test_the_same_run_and_it_resumes_sample_exact(native, tmp_path):
    ours = lerobot_train(SIX, tmp_path / "run", *OURS)
    assert ours.counts(SITE) == (6, 0, 0)
    assert ours.site(SITE)["reason"] == (
        "in the workers: 6 of 7 steps, to TokenizerProcessorStep; "
        "in the trainer: DeviceProcessorStep (moves to the device)"
    )
    same_numbers(native, ours)
    same_files(native, ours, 3)
    same_files(native, ours)
    same_numbers(resumed(native, tmp_path / "native again"), resumed(ours, tmp_path / "ours again", *OURS), 3)


def resumed(run, folder, *targets):
    """A copy of the run, from its checkpoint after three updates on."""
    shutil.copytree(run.folder, folder, symlinks=True)
    again = ["--resume=true", f"--config_path={Run(folder).config(3)}"]
    return lerobot_train(again, folder, *targets)


def test_spawned_workers_that_do_not_persist(native, tmp_path):
    spawn = ["--dataloader_multiprocessing_context=spawn", "--persistent_workers=false", "--num_workers=1"]
    ours = lerobot_train([*SIX, *spawn], tmp_path / "run", *OURS)
    assert ours.counts(SITE) == (6, 0, 0)
    same_numbers(native, ours)
    same_files(native, ours)


def test_evaluation_gives_the_same_loss(tmp_path, monkeypatch):
    losses, reduce = [], Accelerator.reduce

    def noting(accelerator, value, *args, **kwargs):
        losses.append(value.item())
        return reduce(accelerator, value, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "reduce", noting)
    make_dataset(tmp_path / "noise", episodes=4, frames=8)  # its images are floats already
    arguments = [*SIX, *EVALUATION, f"--dataset.root={tmp_path / 'noise'}"]
    native = lerobot_train(arguments, tmp_path / "native")
    expected = losses[:]
    ours = lerobot_train(arguments, tmp_path / "ours", *OURS)
    assert len(expected) == 2
    assert losses == [*expected, *expected]
    same_numbers(native, ours)
    assert ours.counts(SITE) == (6 + 2 * 3, 0, 0)


def test_unpatched_in_the_middle_the_run_ends_as_it_would(native, tmp_path, monkeypatch):
    """The workers have four batches each on their way; the preprocessor completes them by itself."""
    pipelines, step = [], MetricsTracker.step

    def unpatching(tracker):
        step(tracker)
        if tracker.steps == 2:
            pipelines.append(hooks._runs[-1].pipeline())
            somaspeed_patch.unpatch("lerobot_workers")
            assert type(pipelines[0]) is not DataProcessorPipeline

    monkeypatch.setattr(MetricsTracker, "step", unpatching)
    ours = lerobot_train(SIX, tmp_path / "run", "step_recorder", *OURS)
    same_numbers(native, ours)
    same_files(native, ours)
    assert type(pipelines[0]) is DataProcessorPipeline
    assert not hooks._runs


def test_without_workers_nothing_moves(native, tmp_path):
    ours = lerobot_train([*SIX, "--num_workers=0", "--prefetch_factor=2"], tmp_path / "run", *OURS)
    assert ours.counts(SITE) == (0, 1, 0)
    assert ours.site(SITE)["reason"] == "num_workers=0: there are no workers"
    same_numbers(native, ours)


@pytest.mark.parametrize("worker_preprocess", [True, False])
def test_cached_batches(native, tmp_path, worker_preprocess):
    features = {"cached_batches": "2", "worker_preprocess": worker_preprocess}
    ours = lerobot_train(SIX, tmp_path / "run", *OURS, **features)
    assert ours.counts(CACHED) == (4, 0, 0)
    assert ours.site(CACHED)["reason"] == "trains on its first 2 batches again and again"
    assert ours.counts(SITE)[0] == (2 if worker_preprocess else 0)
    losses, unrepeated = ([update["loss"] for update in run.updates] for run in (ours, native))
    assert losses[:2] == unrepeated[:2] and losses[2:] != unrepeated[2:]
    assert [update["samples"] for update in ours.updates] == [2] * 6
    report = json.loads((ours.folder / "somaspeed_report.json").read_text())
    assert report["features"]["cached_batches"] == "2"
