"""The hooks around LeRobot's train(): how its loop is found, what its loaders get, and how they come off."""

from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lerobot.processor.pipeline import DataProcessorPipeline
from torch.utils.data import DataLoader, default_collate

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.testing_workers import (
    assert_same_batch,
    frames,
    natively,
    pi05_preprocessor,
    train_function,
)
from somaspeed_patch.tiny_pi05 import byte_tokenizer
from somaspeed_patch.workers import hooks, trainer
from somaspeed_patch.workers.collate import STAGE

SIZE = 8
SITE = "lerobot_workers/worker_preprocess"


@pytest.fixture(scope="module", autouse=True)
def tokenizer():
    byte_tokenizer.install()
    yield
    byte_tokenizer.uninstall()


@pytest.fixture(scope="module")
def dataset():
    return frames()


@pytest.fixture(scope="module")
def samples(dataset):
    return [dataset[i] for i in range(4 * SIZE)]


@pytest.fixture(scope="module")
def pipeline(dataset):
    return pi05_preprocessor(dataset.meta)


@pytest.fixture(scope="module")
def native(dataset, samples):
    return list(natively(pi05_preprocessor(dataset.meta), samples, dataset.meta.camera_keys, SIZE))


@pytest.fixture
def on():
    sites.clear()
    with somaspeed_patch.patched("lerobot_workers"):
        yield


def counts():
    site = sites.site(SITE)
    return site.calls, site.native_calls, site.fallbacks


def test_the_loop_is_found_by_its_frame(tmp_path):
    train = train_function(tmp_path)
    dataset = SimpleNamespace(meta=SimpleNamespace(camera_keys=["a", "b"]))
    assert train("pre", dataset, trainer.of_caller) == trainer.Loop("pre", ("a", "b"))
    assert trainer.of_caller() is None

    renamed = train_function(tmp_path / "renamed", ("def train(preprocessor", "def train(processor"))
    with pytest.raises(trainer.UnknownLoopError, match="no variables called preprocessor and dataset"):
        renamed("pre", dataset, trainer.of_caller)


@pytest.mark.parametrize("place", ["    batch = preprocessor(batch)", "        eval_batch = preprocessor("])
def test_an_edited_loop_is_not_taken_for_lerobots(tmp_path, place):
    indent = place[: len(place) - len(place.lstrip())]
    train = train_function(tmp_path, (place, f"{indent}batch = augment(batch)\n{place}"))
    with pytest.raises(trainer.UnknownLoopError, match=r"not as in LeRobot 0\.6\.1"):
        train("pre", None, trainer.of_caller)


def prepared(folder, pipeline, dataset, *loaders):
    """What accelerate makes of the loaders in train(): the hook runs as in a training run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    return train_function(folder)(pipeline, dataset, lambda: accelerator.prepare(*loaders))


def test_prepare_gives_both_loaders_a_collate_and_unpatch_takes_it_back(
    dataset, samples, tmp_path, pipeline, native
):
    def touched():  # by identity: a wrapt proxy equals what it wraps
        kinds = (Accelerator, DataProcessorPipeline, DataLoader)
        return [{name: id(value) for name, value in vars(kind).items()} for kind in kinds]

    before = touched()
    somaspeed_patch.patch("lerobot_workers")
    assert all(now != then for now, then in zip(touched(), before, strict=True))
    options = {"batch_size": SIZE, "num_workers": 1, "multiprocessing_context": "fork"}
    loaders = [DataLoader(samples[: 2 * SIZE], **options) for _ in range(2)]
    ready = prepared(tmp_path, pipeline, dataset, *loaders)
    assert [one.collate_fn._training for one in loaders] == [True, False]
    assert all(a.collate_fn is b.collate_fn for a, b in zip(loaders, ready, strict=True))
    for loader in ready:
        for batch, expected in zip(loader, native[:2], strict=True):
            assert STAGE in batch
            assert_same_batch(pipeline(batch), expected)
    del loader, batch
    somaspeed_patch.unpatch()
    assert touched() == before
    assert [one.collate_fn for one in (*loaders, *ready)] == [default_collate] * 4
    assert type(pipeline) is DataProcessorPipeline
    assert STAGE not in next(iter(ready[0]))


def test_batches_on_their_way_are_completed_after_unpatch(dataset, samples, tmp_path, pipeline, native):
    somaspeed_patch.patch("lerobot_workers")
    options = {"batch_size": SIZE, "num_workers": 1, "multiprocessing_context": "fork"}
    [loader] = [prepared(tmp_path, pipeline, dataset, DataLoader(samples[: 4 * SIZE], **options), None)[0]]
    batches = iter(loader)
    assert_same_batch(pipeline(next(batches)), native[0])
    somaspeed_patch.unpatch()
    for expected in native[1:4]:
        assert isinstance(pipeline, DataProcessorPipeline) and type(pipeline) is not DataProcessorPipeline
        batch = next(batches)
        assert STAGE in batch
        assert_same_batch(pipeline(batch), expected)
    assert next(batches, None) is None
    del batches
    assert type(pipeline) is DataProcessorPipeline
    assert loader.collate_fn is default_collate


def test_nothing_moves_without_workers_and_the_report_says_so(on, dataset, samples, tmp_path, pipeline):
    loader = DataLoader(samples[:SIZE], batch_size=SIZE)
    assert prepared(tmp_path, pipeline, dataset, loader) is not None
    assert loader.collate_fn is default_collate
    assert counts() == (0, 1, 0) and sites.site(SITE).reason == "num_workers=0: there are no workers"


def test_our_own_failure_leaves_the_run_native(on, dataset, samples, tmp_path, pipeline, monkeypatch):
    monkeypatch.setattr(hooks, "split", lambda *args: 1 / 0)
    loader = DataLoader(samples[:SIZE], batch_size=SIZE, num_workers=1)
    prepared(tmp_path, pipeline, dataset, loader)
    assert loader.collate_fn is default_collate
    assert counts() == (0, 0, 1) and sites.site(SITE).last_fallback.startswith("ZeroDivisionError")
