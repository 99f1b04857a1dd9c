"""MolmoAct2's raw images, processed on the device: the host's tokens, patches, losses and actions."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lerobot.policies.molmoact2.molmoact2_hf_model.image_processing_molmoact2 import MolmoAct2ImageProcessor
from lerobot.policies.molmoact2.processor_molmoact2 import _normalize_image

import somaspeed_patch
from somaspeed_patch import facts, sites
from somaspeed_patch.molmoact2 import gpu_images, pixels
from somaspeed_patch.testing_lerobot import lerobot_train
from somaspeed_patch.testing_molmoact2 import (
    loss_and_gradients,
    make_policy,
    make_preprocessor,
    make_raw_batch,
)
from somaspeed_patch.testing_parity import lively
from somaspeed_patch.testing_workers import FRAMES, assert_same_batch, frames, natively, staging
from somaspeed_patch.tiny_molmoact2 import redirect

CAMERAS = ["observation.images.cam0", "observation.images.cam1"]
SITE = "molmoact2/gpu_images"
EXPERT = {"action_mode": "continuous", "train_action_expert_only": True}
SIZES = [(60, 81), (60, 81)]  # neither is the 56 of the tiny model, nor square
PLAIN = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "patch": 14}
FUSED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # the host's kernel fuses there


@pytest.fixture(scope="module")
def policy():
    return lively(make_policy(cameras=2, **EXPERT))


@pytest.fixture(scope="module")
def preprocessor(policy):
    return make_preprocessor(policy)


@pytest.fixture
def on():
    sites.clear()
    with somaspeed_patch.patched("molmoact2", gpu_images=True):
        yield


@pytest.fixture(scope="module")
def images():
    """32 frames of LIBERO, [256, 256, 3] uint8 as the pack step hands them to the image processor."""
    dataset = frames()
    keys, places = dataset.meta.camera_keys, torch.linspace(0, len(dataset) - 1, 16).long().tolist()
    shown = [dataset[place] for place in places]
    return [_normalize_image(frame[key].float() / 255) for frame in shown for key in keys]


def counts():
    site = next(one for one in somaspeed_patch.report().sites if one.site == SITE)
    return site.calls, site.native_calls, site.fallbacks


def reason():
    return next(one.reason for one in somaspeed_patch.report().sites if one.site == SITE)


def raw(policy, **shape):
    return make_raw_batch(policy, **{"image_sizes": SIZES, "tasks": ["push", "lift the red cube"], **shape})


def assert_same_gradients(ours, native):
    assert ours[0].equal(native[0])
    assert ours[1].keys() == native[1].keys()
    assert all(gradient.equal(native[1][name]) for name, gradient in ours[1].items())


def test_the_batch_is_the_hosts_but_for_raw_images(policy, preprocessor, on):
    ours = preprocessor(raw(policy))
    with somaspeed_patch.patched("molmoact2", gpu_images=False):
        native = preprocessor(raw(policy))
    expected = [_normalize_image(raw(policy)[key][i]) for i in range(2) for key in CAMERAS]
    assert torch.equal(ours["pixel_values"], torch.from_numpy(np.stack(expected)))
    assert native["pixel_values"].shape == (4, 16, 588)
    assert_same_batch({**ours, "pixel_values": native["pixel_values"]}, native)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}])
@pytest.mark.parametrize("sizes", [SIZES, [(56, 56)] * 2], ids=["resized", "as they are"])
def test_the_model_gets_the_hosts_patches(policy, preprocessor, dtype, settings, sizes):
    preprocessor, model = with_processor(preprocessor, **settings), copy.copy(policy)
    model.config = copy.copy(policy.config)
    model.config.model_dtype = dtype
    native = model._model_inputs(preprocessor(raw(policy, image_sizes=sizes)))
    with somaspeed_patch.patched("molmoact2", gpu_images=True):
        ours = model._model_inputs(preprocessor(raw(policy, image_sizes=sizes)))
    assert native["pixel_values"].dtype == getattr(torch, dtype)
    assert native["pixel_values"].float().std() > 0.1
    assert_same_batch(ours, native)


def with_processor(preprocessor, **settings):
    """A copy of the pipeline whose image processor has other settings."""
    changed = copy.copy(preprocessor)
    changed.steps = [copy.copy(step) for step in preprocessor.steps]
    [pack] = [step for step in changed.steps if hasattr(step, "processor")]
    pack.processor = copy.copy(pack.processor)
    pack.processor.image_processor = copy.copy(pack.processor.image_processor)
    for name, value in settings.items():
        setattr(pack.processor.image_processor, name, value)
    return changed


def off_by(found, native):
    """Share of differing values and the largest difference, in steps of 255, of patches in [-1, 1]."""
    steps = ((found - native) * 127.5).abs().round()
    return (steps > 0).double().mean().item(), steps.max().item()


def hosts(images):
    return MolmoAct2ImageProcessor(crop_mode="resize").preprocess(images, return_tensors="pt")["pixel_values"]


def test_on_a_cpu_no_value_of_32_frames_differs(images):
    native = hosts(images)
    how = pixels.Processing(size=(378, 378), **PLAIN)
    assert native.shape == (32, 729, 588)
    assert pixels.patches(torch.from_numpy(np.stack(images)), how).equal(native)


def test_what_a_gpu_computes_differs_nowhere_where_the_cpu_fuses(images):
    """`interpolated` is made of operations that IEEE defines, so these are a GPU's bits too."""
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    native = F.interpolate(stacked.float(), size=(378, 378), mode="bilinear")
    ours = pixels.interpolated(stacked, (378, 378))
    if FUSED:
        assert ours.equal(native)
    steps = (ours.round() - native.round()).abs()
    assert steps.max() <= 1
    assert (steps > 0).double().mean() < 1e-4  # 0 with AVX2; 6.9e-5 with ATEN_CPU_CAPABILITY=default


def test_other_ways_to_resize_differ_more(images):
    """Why the order of the sum is kept; the numbers of the module's docstring."""
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    native = F.interpolate(stacked.float(), size=(378, 378), mode="bilinear").round()
    for other, least, most in ((stacked.double(), 1.5e-4, 2.5e-4), (stacked.contiguous(), 0.07, 0.08)):
        steps = (F.interpolate(other, size=(378, 378), mode="bilinear").round().double() - native).abs()
        assert steps.max() == 1
        assert least < (steps > 0).double().mean() < most  # 2.1e-4 and 7.6e-2


@pytest.mark.parametrize("size", [(56, 56), (84, 84), (512, 300), (378, 378)])
def test_the_order_of_the_sum_holds_for_other_sizes(size):
    noise = torch.randint(0, 256, (2, 3, 200, 256), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    native = F.interpolate(noise.float(), size=size, mode="bilinear")
    ours = pixels.interpolated(noise, size)
    if FUSED:
        assert ours.equal(native)
    # unfused, a place on 256 pixels is off by up to 2**-17, and neighbours of noise by up to 255
    assert (ours - native).abs().max() < 0.01
    assert (ours.round() - native.round()).abs().max() <= 1


@pytest.mark.gpu
def test_a_gpu_has_the_cpus_bits(images):
    stacked = torch.from_numpy(np.stack(images))
    how = pixels.Processing(size=(378, 378), **PLAIN)
    ours = pixels.patches(stacked.cuda(), how).cpu()
    fraction, largest = off_by(ours, hosts(images))
    assert largest <= 1 and fraction < 1e-4  # 0 where the CPU fuses
    there = pixels.interpolated(stacked.cuda().permute(0, 3, 1, 2), how.size).cpu()
    assert there.equal(pixels.interpolated(stacked.permute(0, 3, 1, 2), how.size))
    other = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
    odd = pixels.Processing(size=(256, 256), **{**PLAIN, **other, "patch": 16})
    assert pixels.patches(stacked.cuda(), odd).cpu().equal(pixels.patches(stacked, odd))


@pytest.mark.gpu
def test_a_step_on_a_gpu_has_the_hosts_loss():
    policy = lively(make_policy(cameras=2, device="cuda", **EXPERT))
    preprocessor = make_preprocessor(policy)
    with somaspeed_patch.patched("molmoact2"):
        native = loss_and_gradients(policy, preprocessor(raw(policy)))
    sites.clear()
    with somaspeed_patch.patched("molmoact2", gpu_images=True):
        batch = preprocessor(raw(policy))
        assert batch["pixel_values"].is_cuda and batch["pixel_values"].dtype == torch.uint8
        ours = loss_and_gradients(policy, batch)
        assert counts() == (1, 0, 0)
    assert ours[0].item() == pytest.approx(native[0].item(), rel=1e-3)


@pytest.mark.parametrize("size", ["made up", "frames"])
def test_a_step_is_the_hosts_to_the_bit(policy, preprocessor, images, size):
    def batch():
        made = raw(policy)
        if size == "frames":
            faces = torch.from_numpy(np.stack(images[:4])).permute(0, 3, 1, 2).float() / 255
            made.update(zip(CAMERAS, faces.split(2), strict=True))
        return made

    with somaspeed_patch.patched("molmoact2"):
        native = loss_and_gradients(policy, preprocessor(batch()))
        black = preprocessor(batch())
        black["pixel_values"] = torch.full_like(black["pixel_values"], -1.0)
        assert not loss_and_gradients(policy, black)[0].equal(native[0])
    sites.clear()
    with somaspeed_patch.patched("molmoact2", gpu_images=True):
        assert_same_gradients(loss_and_gradients(policy, preprocessor(batch())), native)
        assert counts() == (1, 0, 0)


REFUSED = {
    "the images have 2 sizes": {"image_sizes": [(60, 81), (60, 80)]},
    "crop_mode is overlap-and-resize-c2: each image has a number of crops of its own": {
        "crop_mode": "overlap-and-resize-c2", "overlap_margins": [1, 1],
    },
    "resample is 0, not bilinear": {"resample": 0},
    "image_mean or image_std is not a number a channel": {"image_std": 0.5, "image_mean": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_raw_is_the_hosts_and_says_why(policy, preprocessor, on, why):
    settings = dict(REFUSED[why])
    sizes = settings.pop("image_sizes", SIZES)
    preprocessor = with_processor(preprocessor, **settings)
    ours = preprocessor(raw(policy, image_sizes=sizes))
    policy._model_inputs(ours)
    assert (counts(), reason()) == ((0, 1, 0), why)
    with somaspeed_patch.patched("molmoact2", gpu_images=False):
        assert_same_batch(ours, preprocessor(raw(policy, image_sizes=sizes)))


CALLS = {
    "the images are not a list of arrays": ({}, lambda image: image),
    "the images are not uint8 [height, width, 3]": ({}, lambda image: [image[..., 0]]),
    "the call is not LeRobot's: it asks for tensors by name": (
        {"return_tensors": None}, lambda image: [image],
    ),
    "patch_size, pooling_size given for this call only": (
        {"patch_size": 28, "pooling_size": [1, 1]}, lambda image: [image],
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", CALLS)
def test_calls_that_are_unlike_lerobots(why):
    given, form = CALLS[why]
    processor = MolmoAct2ImageProcessor(crop_mode="resize", size={"height": 56, "width": 56})
    with pytest.raises(gpu_images.Declined) as declined:
        gpu_images._raw(processor, form(np.zeros((60, 80, 3), np.uint8)), **{"return_tensors": "pt", **given})
    assert str(declined.value) == why


def test_settings_given_anew_that_are_the_processors_own_are_served():
    processor = MolmoAct2ImageProcessor(crop_mode="resize")
    own = {name: getattr(processor, name) for name in gpu_images._SETTINGS}
    made = gpu_images._raw(processor, [np.zeros((60, 80, 3), np.uint8)], return_tensors="pt", **own)
    assert made["pixel_values"].shape == (1, 60, 80, 3)


def test_who_calls_the_processor_without_the_policys_step_gets_patches(images, on):
    native = hosts(images[:2])
    assert native.shape == (2, 729, 588)
    assert counts() == (0, 0, 0)


def test_an_error_is_the_hosts_and_stays_native(policy, preprocessor, on, monkeypatch):
    preprocessor = with_processor(preprocessor, patch_size=14)  # an image processor that nobody else uses
    with monkeypatch.context() as broken:
        broken.setattr(gpu_images, "_places", lambda *_: (_ for _ in ()).throw(TypeError("no such image")))
        batch = preprocessor(raw(policy))
    policy._model_inputs(batch)
    assert (counts(), reason()) == ((0, 1, 0), "TypeError: no such image")
    policy._model_inputs(preprocessor(raw(policy)))
    assert reason() == "failed once and stays native: TypeError: no such image"


def test_switching_needs_no_care(policy, preprocessor, on):
    before = preprocessor(raw(policy))
    somaspeed_patch.patch("molmoact2", gpu_images=False)
    after = preprocessor(raw(policy))
    expected = policy._model_inputs(after)
    assert_same_batch(policy._model_inputs(before), expected)
    assert counts()[:2] == (1, 0)  # off is no news
    somaspeed_patch.patch("molmoact2", gpu_images=True)
    assert_same_batch(policy._model_inputs(after), expected)
    assert reason() == "the batch was preprocessed where gpu_images is off"


def test_a_copy_of_raw_images_is_refused(policy, preprocessor, on):
    batch = preprocessor(raw(policy))
    batch["pixel_values"] = batch["pixel_values"].clone()
    with pytest.raises(
        ValueError, match=r"^gpu_images: expected uint8 pixel_values .*; pass the preprocessor"
    ):
        policy._model_inputs(batch)


@pytest.mark.parametrize("step", ["forward", "predict_action_chunk"])
def test_raw_images_after_an_unpatch_are_an_error_at_once(policy, preprocessor, step):
    with somaspeed_patch.patched("molmoact2", gpu_images=True):
        batch = preprocessor(raw(policy))
    with pytest.raises(ValueError, match="too many values to unpack"):
        getattr(policy, step)(batch)


def test_inference_gives_the_hosts_actions(policy, preprocessor):
    """In inference mode tensors do not count their versions, which facts go by."""
    policy = copy.deepcopy(policy).eval()

    def actions():
        torch.manual_seed(0)
        made = {key: value for key, value in raw(policy).items() if key != "action"}
        with torch.inference_mode():
            return policy.predict_action_chunk(preprocessor(made))

    native = actions()
    sites.clear()
    with somaspeed_patch.patched("molmoact2", gpu_images=True):
        assert actions().equal(native)
        assert counts() == (1, 0, 0)


def samples(count=16, other=0):
    """As LeRobot's dataset gives them; the second camera is `other` pixels wider."""
    rng = torch.Generator().manual_seed(0)

    def sample(number):
        sizes = zip(CAMERAS, ((3, 60, 80), (3, 60, 80 + other)), strict=True)
        return {
            **{key: torch.randint(0, 256, size, generator=rng).to(torch.uint8) for key, size in sizes},
            "observation.state": torch.rand(6, generator=rng) * 2 - 1,
            "action": torch.rand(4, 6, generator=rng) * 2 - 1,
            "task": f"pick up {'the red ' * (number % 3)}cube.",
        }

    return [sample(number) for number in range(count)]


@pytest.mark.parametrize("other", [0, 4], ids=["raw", "refused"])
def test_through_forked_workers(policy, preprocessor, other):
    batches = natively(copy.deepcopy(preprocessor), samples(other=other), CAMERAS, 4)
    expected = [policy._model_inputs(batch) for batch in batches]
    sites.clear()
    with somaspeed_patch.patched("lerobot_workers", "molmoact2", gpu_images=True):
        forked = {"num_workers": 2, "multiprocessing_context": "fork"}
        loader = staging(samples(other=other), preprocessor, CAMERAS, 4, **forked)
        received = [preprocessor(batch) for batch in Accelerator(cpu=True).prepare(loader)]
        for ours, native in zip(received, expected, strict=True):
            assert ours["pixel_values"].dim() == (3 if other else 4)
            assert_same_batch(policy._model_inputs(ours), native)
        assert counts() == ((0, 4, 0) if other else (4, 0, 0))
        assert reason() == ("the images have 2 sizes" if other else "")


def test_raw_images_cross_a_queue_once(preprocessor, on):
    loader = staging(samples(4), preprocessor, CAMERAS, 4)
    known = next(iter(loader))["complementary_data"][facts.BATCH_KEY].by_key
    assert set(known["pixel_values"]) == {"image_processing"}
    assert facts.TWIN in known["image_num_crops"]


TRAIN = [
    "--dataset.repo_id=somaspeed/libero_spatial_tiny", f"--dataset.root={FRAMES}",
    "--dataset.video_backend=pyav", "--env_eval_freq=0", "--log_freq=1", "--seed=7", "--batch_size=2",
    "--steps=2", "--policy.type=molmoact2", "--policy.device=cpu",
    "--policy.push_to_hub=false", "--policy.model_dtype=float32", "--policy.chunk_size=4",
    "--policy.n_action_steps=4", "--policy.num_flow_timesteps=2", "--policy.action_mode=continuous",
    "--policy.train_action_expert_only=true", f"--policy.checkpoint_path={redirect.CHECKPOINT}",
    f"--policy.discrete_action_tokenizer={redirect.FAST_TOKENIZER}",
    "--dataloader_multiprocessing_context=fork",
]  # fmt: skip


@pytest.fixture
def tiny():
    redirect.install("micro")
    yield
    redirect.uninstall()


def test_lerobot_train_with_and_without_workers(tiny, tmp_path):
    native = lerobot_train([*TRAIN, "--num_workers=0"], tmp_path / "native")
    for workers in (0, 2):
        targets, arguments = ("lerobot_train", "lerobot_workers", "molmoact2"), f"--num_workers={workers}"
        run = lerobot_train([*TRAIN, arguments], tmp_path / f"{workers}", *targets, gpu_images=True)
        assert run.counts(SITE) == (2, 0, 0)
        assert run.counts("lerobot_workers/worker_preprocess")[0] == workers
        assert len(run.updates) == 2
        for ours, theirs in zip(run.updates, native.updates, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
