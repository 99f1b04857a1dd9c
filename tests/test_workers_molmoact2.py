"""MolmoAct2's prompts, patches and labels made in data-loader workers: bit for bit those of the trainer."""

import copy

import pytest
import torch
from accelerate import Accelerator

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.testing_molmoact2 import loss_and_gradients, make_policy, make_preprocessor
from somaspeed_patch.testing_workers import assert_same_batch, natively, staging
from somaspeed_patch.workers.steps import split

SAMPLES, SIZE = 200, 8
CAMERAS = ["observation.images.cam0", "observation.images.cam1"]
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
IMAGES = "observation.images."


@pytest.fixture(scope="module")
def policy():
    return make_policy(cameras=2)


@pytest.fixture(scope="module")
def pipeline(policy):
    return make_preprocessor(policy)


@pytest.fixture(scope="module")
def samples():
    """As LeRobot's dataset gives them: uint8 images, tasks and actions of several lengths."""
    rng = torch.Generator().manual_seed(0)

    def sample(number):
        image = {key: torch.randint(0, 256, (3, 56, 56), generator=rng).to(torch.uint8) for key in CAMERAS}
        return {
            **image,
            "observation.state": torch.rand(6, generator=rng) * 2 - 1,
            "action": torch.rand(4, 6, generator=rng) * 2 - 1,
            "action_is_pad": torch.arange(4) >= 1 + number % 4,
            "index": torch.tensor(number),
            "task": f"pick up {'the red ' * (number % 5)}cube {number}.",
        }

    return [sample(number) for number in range(SAMPLES)]


@pytest.fixture
def on():
    sites.clear()
    with somaspeed_patch.patched("lerobot_workers"):
        yield


def test_200_samples_are_bitwise_equal_but_for_images_that_nobody_reads(on, policy, pipeline, samples):
    received = iter(Accelerator(cpu=True).prepare(staging(samples, pipeline, CAMERAS, SIZE, **FORKED)))
    lengths = set()
    for expected in natively(copy.deepcopy(pipeline), samples, CAMERAS, SIZE):
        batch = pipeline(next(received))
        assert_same_batch(batch, expected, without=IMAGES)
        assert any(key.startswith(IMAGES) for key in expected)
        lengths.add(batch["input_ids"].shape[1])
    assert next(received, None) is None
    assert len(lengths) > 1
    loss, gradients = loss_and_gradients(policy, batch)
    expected_loss, expected_gradients = loss_and_gradients(policy, expected)
    assert loss.equal(expected_loss)
    assert all(gradient.equal(expected_gradients[name]) for name, gradient in gradients.items())


def test_the_report_says_what_is_left_out(pipeline):
    assert str(split(pipeline.steps, "cuda")) == (
        "in the workers: 6 of 7 steps, to MolmoAct2PackInputsProcessorStep, without the raw images, which "
        "the policy does not read; in the trainer: DeviceProcessorStep (moves to the device)"
    )


def test_a_wrong_camera_name_gives_the_hosts_text(on, pipeline, samples):
    [pack] = [step for step in pipeline.steps if type(step).__name__ == "MolmoAct2PackInputsProcessorStep"]
    strict = copy.copy(pipeline)
    pack = copy.copy(pack)
    pack.image_keys, pack.allow_image_key_fallback = ["observation.images.wrist"], False
    strict.steps = [pack if type(step) is type(pack) else step for step in pipeline.steps]
    text = r"MolmoAct2 image_keys missing from observation: \['observation.images.wrist'\]\."
    with pytest.raises(ValueError, match=text):
        next(natively(strict, samples, CAMERAS, SIZE))
    batches = iter(
        staging(samples[:SIZE], strict, CAMERAS, SIZE, num_workers=1, multiprocessing_context="fork")
    )
    with pytest.raises(ValueError, match=text):
        next(batches)
    batches._shutdown_workers()  # left to the garbage collector it waits 5 s
