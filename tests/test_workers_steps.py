"""Which steps move into data-loader workers, which stay in the trainer, and how the report puts it."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from lerobot.processor import ObservationProcessorStep
from lerobot.processor.pipeline import DataProcessorPipeline
from torch.utils.data import DataLoader, IterableDataset

from somaspeed_patch.testing_workers import (
    assert_same_batch,
    collate_for,
    frames,
    natively,
    pi05_preprocessor,
)
from somaspeed_patch.tiny_pi05 import byte_tokenizer
from somaspeed_patch.workers import hooks
from somaspeed_patch.workers.collate import finish
from somaspeed_patch.workers.steps import KINDS, split


@pytest.fixture(scope="module", autouse=True)
def tokenizer():
    byte_tokenizer.install()
    yield
    byte_tokenizer.uninstall()


@pytest.fixture(scope="module")
def dataset():
    return frames()


class UsersStep(ObservationProcessorStep):
    def observation(self, observation):
        return observation

    def transform_features(self, features):
        return features


def test_an_unknown_step_stays_and_is_named(dataset):
    pipeline = pi05_preprocessor(dataset.meta)
    pipeline.steps.insert(3, UsersStep())
    samples, cameras = [dataset[0], dataset[1]], dataset.meta.camera_keys
    [expected] = natively(copy.deepcopy(pipeline), samples, cameras, 2)
    parts = split(pipeline.steps, "cpu")
    assert str(parts) == (
        "in the workers: 3 of 8 steps, to RelativeActionsProcessorStep; in the trainer: UsersStep (not known "
        "to give the same in a worker), and after it NormalizerProcessorStep, "
        "Pi05PrepareStateTokenizerProcessorStep, TokenizerProcessorStep, DeviceProcessorStep"
    )
    assert_same_batch(finish(pipeline, collate_for(pipeline, cameras)(samples)), expected)


def test_a_step_that_cannot_be_pickled_stays(dataset):
    pipeline = pi05_preprocessor(dataset.meta)
    pipeline.steps[4].task_key = lambda: "task"
    parts = split(pipeline.steps, "cpu")
    assert len(parts.moved) == 4
    assert str(parts.why).startswith("cannot be pickled: ")


def test_groots_random_steps_and_its_resize_on_the_device_stay():
    from lerobot.policies.groot.processor_groot import GrootN17PackInputsStep, GrootN17VLMEncodeStep

    def why(step):
        return split([step], "cuda").why

    assert why(GrootN17PackInputsStep()) is None
    assert why(GrootN17PackInputsStep(training=True)) is None
    dropout = GrootN17PackInputsStep(training=True, state_dropout_prob=0.1)
    assert why(dropout) == "draws random numbers (state dropout)"
    assert why(GrootN17VLMEncodeStep()) is None
    assert why(GrootN17VLMEncodeStep(use_albumentations=True, device="cuda")) is None
    crop = GrootN17VLMEncodeStep(use_albumentations=True, training=True)
    assert why(crop) == "draws random numbers (crop)"
    assert "round differently" in why(GrootN17VLMEncodeStep(device="cuda"))


def test_a_resize_of_uint8_on_a_cpu_is_not_that_of_floats():
    """Why GR00T's resize on the device stays there: on a GPU torchvision resizes uint8 in floats."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    image = torch.randint(0, 256, (3, 256, 256), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    how = {"interpolation": InterpolationMode.BICUBIC, "antialias": True}
    here = functional.resize(image, [224, 224], **how)
    there = functional.resize(image.float(), [224, 224], **how).round().clamp(0, 255)
    assert (here.float() - there).abs().max() > 1


def test_every_known_step_exists():
    for name in KINDS:
        module, attribute = name.rsplit(".", 1)
        assert isinstance(getattr(importlib.import_module(module), attribute), type)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_workers": 0}, "num_workers=0: there are no workers"),
        ({"device": "mps"}, "device mps"),
        ({"processes": 2, "stream": True}, "a streamed dataset"),
        ({"subclass": True}, "the preprocessor is a Own, not LeRobot's pipeline"),
        ({"hooks": [print]}, "step hooks"),
        ({"to_transition": dict}, "a to_transition of its own"),
        ({"steps": [UsersStep()]}, "nothing moves: UsersStep (not known to give the same in a worker)"),
        ({"steps": []}, "nothing moves: there are no steps"),
    ],
)
def test_what_keeps_everything_in_the_trainer(dataset, change, why):
    class Own(DataProcessorPipeline):
        pass

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    pipeline = (Own if change.get("subclass") else DataProcessorPipeline)(
        steps=change.get("steps", pi05_preprocessor(dataset.meta).steps)
    )
    pipeline.before_step_hooks = change.get("hooks", [])
    pipeline.to_transition = change.get("to_transition", pipeline.to_transition)
    accelerator = SimpleNamespace(
        device=torch.device(change.get("device", "cpu")), num_processes=change.get("processes", 1)
    )
    loader = DataLoader(Stream() if change.get("stream") else [1], num_workers=change.get("num_workers", 1))
    with pytest.raises(hooks._StayError) as stays:
        hooks._split(accelerator, pipeline, [loader])
    assert why in str(stays.value)
