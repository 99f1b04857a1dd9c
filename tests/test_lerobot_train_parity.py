"""The real lerobot-train, native against patched: losses, gradient norms, weights, checkpoints, resume."""

from functools import partial

import pytest
import torch

from somaspeed_patch import patching
from somaspeed_patch.testing_frames import FRAMES
from somaspeed_patch.testing_train_parity import assert_same_run, run, weights
from somaspeed_patch.tiny_pi05 import byte_tokenizer
from somaspeed_patch.tiny_pi05.shrink import shrunk
from somaspeed_patch.tiny_pi05.sizes import SIZES

STEPS = 20
COMMON = [
    "--dataset.repo_id=somaspeed/libero_spatial_tiny", f"--dataset.root={FRAMES}",
    "--dataset.video_backend=pyav", "--num_workers=0", "--env_eval_freq=0", "--log_freq=10", "--seed=7",
]  # fmt: skip
POLICY = [
    "--policy.type=pi05", "--policy.device=cpu", "--policy.push_to_hub=false", "--policy.chunk_size=4",
    "--policy.n_action_steps=4", "--policy.image_resolution=[28,28]", "--policy.train_expert_only=true",
    "--policy.tokenizer_max_length=200",
]  # fmt: skip
CASES = {
    "fp32": ["--batch_size=2"],
    "checkpointing": ["--batch_size=2", "--policy.gradient_checkpointing=true"],
    "an absent camera": ["--batch_size=2", "--policy.empty_cameras=1"],
    "batch 1": ["--batch_size=1"],
}


@pytest.fixture(scope="module", autouse=True)
def tiny():
    with shrunk(SIZES["micro"]):
        byte_tokenizer.install()
        yield
        byte_tokenizer.uninstall()


lerobot_train = partial(run, target="pi05", site="pi05/frozen_prefix")


@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_are_the_same(case, tmp_path):
    arguments = [*POLICY, *COMMON, *CASES[case]]
    native = lerobot_train(arguments, tmp_path / "native", patched=False)
    assert_same_run(native, lerobot_train(arguments, tmp_path / "ours", patched=True), STEPS)


def test_lora_from_a_checkpoint(tmp_path):
    base = lerobot_train([*POLICY, *COMMON, "--batch_size=1"], tmp_path / "base", patched=False, steps=1)[1]
    arguments = [
        f"--policy.path={base}", "--policy.push_to_hub=false", *COMMON, "--batch_size=2",
        "--peft.method_type=LORA", "--peft.r=4",
    ]  # fmt: skip
    native = lerobot_train(arguments, tmp_path / "native", patched=False)
    ours = lerobot_train(arguments, tmp_path / "ours", patched=True)
    assert all("lora" in name for name in weights(ours[1]))
    assert_same_run(native, ours, STEPS)


def test_bf16_stays_as_close_to_fp32_as_native_does(tmp_path):
    arguments = [*POLICY, *COMMON, "--batch_size=4"]
    exact = lerobot_train(arguments, tmp_path / "fp32", patched=False)[0]
    low = [*arguments, "--policy.dtype=bfloat16"]
    native = lerobot_train(low, tmp_path / "native", patched=False)[0]
    ours = lerobot_train(low, tmp_path / "ours", patched=True)[0]
    eps = torch.finfo(torch.bfloat16).eps

    def worst(run):
        return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(run, exact, strict=True))

    assert worst(ours) <= 2 * worst(native) + eps


def half_and_half(folder, first_patched, second_patched):
    """Five updates, then five more from the checkpoint, as `lerobot-train --resume=true` goes on."""
    arguments = [*POLICY, *COMMON, "--batch_size=2"]
    checkpoint = lerobot_train(arguments, folder, patched=first_patched, steps=5)[1]
    resume = [f"--config_path={checkpoint / 'train_config.json'}", "--resume=true"]
    return lerobot_train(resume, folder, patched=second_patched, steps=10)


def test_a_run_goes_on_from_the_others_checkpoint(tmp_path):
    native = half_and_half(tmp_path / "native", False, False)
    assert [update["step"] for update in native[0]] == [6, 7, 8, 9, 10]
    assert_same_run(native, half_and_half(tmp_path / "native to patched", False, True), count=5)
    assert_same_run(native, half_and_half(tmp_path / "patched to native", True, False), count=5)


def test_a_patched_checkpoint_loads_in_stock_lerobot(tmp_path):
    from lerobot.policies.pi05 import PI05Policy

    arguments = [*POLICY, *COMMON, "--batch_size=1"]
    checkpoint = lerobot_train(arguments, tmp_path / "ours", patched=True, steps=2)[1]
    assert not patching.active()
    saved, loaded = weights(checkpoint), PI05Policy.from_pretrained(checkpoint).state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
