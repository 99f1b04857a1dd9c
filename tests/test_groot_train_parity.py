"""The real lerobot-train with a tiny GR00T, native against patched: losses, weights, checkpoints."""

from functools import partial

import pytest

from somaspeed_patch.testing_frames import FRAMES
from somaspeed_patch.testing_train_parity import assert_same_run, run
from somaspeed_patch.tiny_groot import redirect

STEPS = 20
ARGUMENTS = [
    "--policy.type=groot", f"--policy.base_model_path={redirect.CHECKPOINT}", "--policy.device=cpu",
    "--policy.push_to_hub=false", "--policy.max_state_dim=16", "--policy.max_action_dim=16",
    "--policy.embodiment_tag=libero_sim", "--policy.chunk_size=4", "--policy.n_action_steps=4",
    "--dataset.repo_id=somaspeed/libero_spatial_tiny", f"--dataset.root={FRAMES}",
    "--dataset.video_backend=pyav", "--num_workers=0", "--env_eval_freq=0", "--log_freq=10", "--seed=7",
    "--batch_size=2",
]  # fmt: skip
CASES = {  # the instructions differ in length, so every batch of two may be padded
    "frozen backbone": ["--policy.use_bf16=false"],
    "language model trains": ["--policy.use_bf16=false", "--policy.tune_llm=true"],
}


@pytest.fixture(scope="module", autouse=True)
def tiny():
    with redirect.installed("micro"):
        yield


lerobot_train = partial(run, target="groot", site="groot/frozen_prefix")


@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_are_the_same(case, tmp_path):
    arguments = [*ARGUMENTS, *CASES[case]]
    native = lerobot_train(arguments, tmp_path / "native", patched=False)
    assert_same_run(native, lerobot_train(arguments, tmp_path / "ours", patched=True), STEPS)


def half_and_half(folder, first_patched, second_patched):
    """Five updates, then five more from the checkpoint, as `lerobot-train --resume=true` goes on."""
    arguments = [*ARGUMENTS, *CASES["frozen backbone"]]
    checkpoint = lerobot_train(arguments, folder, patched=first_patched, steps=5)[1]
    resume = [f"--config_path={checkpoint / 'train_config.json'}", "--resume=true"]
    return lerobot_train(resume, folder, patched=second_patched, steps=10)


def test_a_run_goes_on_from_the_others_checkpoint(tmp_path):
    native = half_and_half(tmp_path / "native", False, False)
    assert [update["step"] for update in native[0]] == [6, 7, 8, 9, 10]
    assert_same_run(native, half_and_half(tmp_path / "native to patched", False, True), count=5)
    assert_same_run(native, half_and_half(tmp_path / "patched to native", True, False), count=5)
