"""Batches preprocessed in data-loader workers: bit for bit those of the trainer's process, for pi0.5."""

import copy
import os
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState
from lerobot.processor.pipeline import DataProcessorPipeline
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

import somaspeed_patch
from somaspeed_patch import facts, sites
from somaspeed_patch.testing_workers import (
    Cheap,
    assert_same_batch,
    collate_for,
    frames,
    natively,
    pi05_preprocessor,
    staging,
)
from somaspeed_patch.tiny_pi05 import byte_tokenizer
from somaspeed_patch.workers import shared_memory
from somaspeed_patch.workers.collate import DECLINED, STAGE, finish, unit_floats
from somaspeed_patch.workers.steps import split

SAMPLES, SIZE = 200, 8
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
    return [dataset[i] for i in range(SAMPLES)]


@pytest.fixture(scope="module")
def pipeline(dataset):
    return pi05_preprocessor(dataset.meta)


@pytest.fixture(scope="module")
def native(pipeline, samples, dataset):
    return list(natively(copy.deepcopy(pipeline), samples, dataset.meta.camera_keys, SIZE))


@pytest.fixture
def on():
    sites.clear()
    with somaspeed_patch.patched("lerobot_workers"):
        yield


def counts():
    site = sites.site(SITE)
    return site.calls, site.native_calls, site.fallbacks


def cpu_accelerator(**options):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


# ---- equal batches


@pytest.mark.parametrize(("device", "persistent"), [("cpu", True), ("cuda", False)])
def test_200_samples_are_bitwise_equal_through_forked_workers(
    on, dataset, samples, pipeline, native, device, persistent
):
    """Collated for a GPU too: the images then stay uint8 until the trainer."""
    options = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": persistent}
    loader = staging(samples, pipeline, dataset.meta.camera_keys, SIZE, device=device, **options)
    epochs = 1 + persistent
    for _ in range(epochs):
        received = list(cpu_accelerator().prepare(loader))
        image = received[0]["observation"]["observation.images.image"]
        assert image.dtype == (torch.uint8 if device == "cuda" else torch.float32)
        for batch, expected in zip(received, native, strict=True):
            assert_same_batch(pipeline(batch), expected)
    assert counts() == (epochs * SAMPLES // SIZE, 0, 0)


def test_spawned_workers_need_nothing_of_the_parent(on, dataset, pipeline, native):
    """The tokenizer is redirected in this process only: a worker gets it with the step."""
    somaspeed_patch.unpatch()
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = staging(Subset(dataset, range(2 * SIZE)), pipeline, dataset.meta.camera_keys, SIZE, **options)
    for batch, expected in zip(loader, native[:2], strict=True):
        assert_same_batch(finish(pipeline, batch), expected)


@pytest.mark.parametrize(("mode", "device"), [("MEAN_STD", "cpu"), ("IDENTITY", "cpu"), ("IDENTITY", "cuda")])
def test_a_normalizer_of_images_and_a_renamed_camera(on, dataset, samples, mode, device):
    image, other = dataset.meta.camera_keys
    pipeline = pi05_preprocessor(dataset.meta)
    rename, normalizer = pipeline.steps[0], pipeline.steps[3]
    rename.rename_map = {other: "observation.images.wrist"}
    visual = next(kind for kind in normalizer.norm_map if kind.value == "VISUAL")
    normalizer.norm_map = {**normalizer.norm_map, visual: type(normalizer.norm_map[visual])(mode)}
    [expected] = natively(copy.deepcopy(pipeline), samples[:SIZE], [image, other], SIZE)
    staged = collate_for(pipeline, [image, other], device=device)(samples[:SIZE])
    assert staged["observation"]["observation.images.wrist"].is_floating_point() == (device == "cpu")
    assert_same_batch(pipeline(staged), expected)
    last = split(pipeline.steps, "cuda").moved[-1]
    assert type(last).__name__ == (
        "TokenizerProcessorStep" if mode == "IDENTITY" else "RelativeActionsProcessorStep"
    )


def test_a_stream_that_accelerate_dispatches(on, dataset, samples, pipeline, native):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples[: 2 * SIZE])

    loader = staging(
        Stream(), pipeline, dataset.meta.camera_keys, SIZE, num_workers=1, multiprocessing_context="fork"
    )
    prepared = cpu_accelerator().prepare(loader)
    assert type(prepared) is DataLoaderDispatcher
    for batch, expected in zip(prepared, native[:2], strict=True):
        assert_same_batch(pipeline(batch), expected)


def test_raw_batches_take_the_hosts_path_and_facts_ride_along(on, dataset, samples, pipeline, native):
    [raw] = natively(lambda batch: batch, samples[:SIZE], dataset.meta.camera_keys, SIZE)
    assert_same_batch(pipeline(raw), native[0])
    assert counts() == (0, 0, 0)
    staged = collate_for(pipeline, dataset.meta.camera_keys)(samples[:SIZE])
    tokens = staged["observation"]["observation.language.tokens"]
    moved = tokens.clone()  # as a transfer makes a new tensor
    staged["observation"]["observation.language.tokens"] = moved
    batch = pipeline(staged)
    assert batch["observation.language.tokens"] is moved
    assert torch.equal(facts.get(moved, facts.TWIN), tokens)
    assert not any(key.startswith("somaspeed") for key in batch)


def test_the_prompt_lengths_arrive_with_the_mask(dataset, samples, pipeline):
    from somaspeed_patch.pi05 import hints

    with somaspeed_patch.patched("lerobot_workers", "pi05"):
        options = {"num_workers": 1, "multiprocessing_context": "fork"}
        [batch] = map(pipeline, staging(samples[:SIZE], pipeline, dataset.meta.camera_keys, SIZE, **options))
    mask = batch["observation.language.attention_mask"]
    assert facts.get(mask, "valid") == hints.measure(mask)
    assert hints.measure(mask).leading


def test_the_trainers_own_steps_are_not_shared_and_not_changed(dataset, samples):
    pipeline = pi05_preprocessor(dataset.meta)
    before = pickle.dumps(pipeline.steps)
    collate = collate_for(pipeline, dataset.meta.camera_keys)
    collate(samples[:2])
    assert pickle.dumps(pipeline.steps) == before
    list(natively(pipeline, samples[:2], dataset.meta.camera_keys, 2))
    assert pipeline.steps[2]._last_state is not None
    for mine, theirs in zip(split(pipeline.steps, "cpu").moved, pipeline.steps, strict=False):
        assert mine is not theirs
        assert getattr(mine, "_last_state", None) is None and mine._current_transition is None


def test_gr00ts_inputs_are_packed_in_a_worker(on, samples, dataset):
    from lerobot.policies.groot.processor_groot import GrootN17PackInputsStep

    steps = pi05_preprocessor(dataset.meta).steps
    pipeline = DataProcessorPipeline(steps=[*steps[:2], GrootN17PackInputsStep(training=True), steps[-1]])
    [expected] = natively(copy.deepcopy(pipeline), samples[:SIZE], dataset.meta.camera_keys, SIZE)
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    [batch] = staging(samples[:SIZE], pipeline, dataset.meta.camera_keys, SIZE, **options)
    assert len(batch[STAGE].steps) == 3
    assert_same_batch(pipeline(batch), expected)


def test_random_numbers_stay_where_they_are(dataset, samples, pipeline):
    import random

    import numpy as np

    def states():
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()

    before = states()
    staged = collate_for(pipeline, dataset.meta.camera_keys)(samples[:SIZE])
    finish(pipeline, staged)
    assert states() == before


# ---- errors


def test_a_workers_error_has_the_hosts_text(on, samples, dataset, pipeline):
    blind = [{k: v for k, v in sample.items() if k != "observation.state"} for sample in samples[:SIZE]]
    cameras, text = dataset.meta.camera_keys, "State is required for PI05"
    with pytest.raises(ValueError, match=f"^{text}$"):
        next(natively(copy.deepcopy(pipeline), blind, cameras, SIZE))
    batches = iter(staging(blind, pipeline, cameras, SIZE, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(ValueError, match=f"ValueError: {text}\n$"):
        next(batches)
    batches._shutdown_workers()  # left to the garbage collector it waits 5 s


def test_a_batch_staged_for_another_preprocessor_is_refused(on, samples, dataset, pipeline):
    staged = collate_for(pipeline, dataset.meta.camera_keys)(samples[:2])
    with pytest.raises(RuntimeError, match="switch worker_preprocess off to use several"):
        DataProcessorPipeline(steps=pipeline.steps[1:])(staged)


def test_batches_that_shared_memory_cannot_hold_come_raw(on, samples, dataset, pipeline, native):
    collate = collate_for(pipeline, dataset.meta.camera_keys, pending=1 << 30)
    first, second = (collate(samples[:SIZE]) for _ in range(2))
    assert "preprocessed batches need" in first[DECLINED] and STAGE not in first
    assert list(second) == list(default_collate(samples[:1]))
    for raw in (first, second):
        for key in dataset.meta.camera_keys:
            raw[key] = unit_floats(raw[key], "cpu")
        assert_same_batch(pipeline(raw), native[0])
    assert counts() == (0, 1, 0)
    assert "--shm-size" in sites.site(SITE).reason
    assert shared_memory.why_not(first, {}, 1) is None
    assert shared_memory.why_not(first, first, 1 << 30) is None
    assert (
        shared_memory.tensor_bytes({"a": [torch.zeros(3), "b"], "c": torch.zeros(2, dtype=torch.uint8)}) == 14
    )


def test_a_collate_that_gives_no_dict_is_left_alone(pipeline):
    collate = collate_for(pipeline, [])
    collate.own = lambda samples: None
    assert collate([1]) is None


# ---- workers


def test_a_workers_memory_is_flat_over_a_thousand_batches(on, pipeline):
    loader = staging(Cheap(), pipeline, [], 2, num_workers=1, multiprocessing_context="fork")
    used = [int(pipeline(batch)["index"][0]) for batch in loader]
    assert len(used) == 1000
    assert used[-1] - used[100] < 2048  # KiB; one batch kept each time would be 900 * 6


def test_the_steps_run_in_the_worker(pipeline):
    calls, collate = [], collate_for(pipeline, [])
    to_transition = collate._to_transition

    def noting(batch):
        calls.append(os.getpid())
        return to_transition(batch)

    collate._to_transition = noting
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    assert STAGE in next(iter(DataLoader(Cheap(), batch_size=2, collate_fn=collate, **options)))
    assert calls == []
    assert STAGE in collate([Cheap()[0]])
    assert calls == [os.getpid()]


def test_evaluation_runs_without_gradients(pipeline):
    seen = []
    for training in (True, False):
        collate = collate_for(pipeline, [], training=training)
        inner = collate._to_transition
        collate._to_transition = lambda batch, inner=inner: (
            seen.append(torch.is_grad_enabled()) or inner(batch)
        )
        collate([Cheap()[0]])
    assert seen == [True, False]
    assert torch.is_grad_enabled()


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_on_a_gpu_a_worker_has_the_devices_bits(on, dataset, context):
    """A forked worker that touched CUDA would raise: the parent has a context."""
    every = torch.arange(256, dtype=torch.uint8)
    on_device = every.cuda().to(dtype=torch.float32) / 255.0
    assert torch.equal(unit_floats(every, "cuda"), on_device.cpu())
    pipeline = pi05_preprocessor(dataset.meta, device="cuda")
    pipeline.steps[3].to(device="cuda")
    some = Subset(dataset, range(4 * SIZE))
    options = {"device": "cuda", "num_workers": 1, "pin_memory": True, "multiprocessing_context": context}
    loader = staging(some, pipeline, dataset.meta.camera_keys, SIZE, **options)
    AcceleratorState._reset_state(reset_partial_state=True)
    for number, batch in enumerate(Accelerator().prepare(loader)):
        raw = default_collate([some[i] for i in range(number * SIZE, (number + 1) * SIZE)])
        raw = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in raw.items()}
        for key in dataset.meta.camera_keys:
            raw[key] = raw[key].to(dtype=torch.float32) / 255.0
        assert_same_batch(pipeline(batch), pipeline(raw))


@pytest.mark.gpu
def test_a_spawned_worker_starts_no_cuda_context(on, pipeline):
    options = {"device": "cuda", "num_workers": 1, "pin_memory": True, "multiprocessing_context": "spawn"}
    loader = staging(Subset(Cheap(), range(8)), pipeline, [], 2, **options)
    assert not any(pipeline(batch)["task_index"].any() for batch in loader)
