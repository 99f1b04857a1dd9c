"""The real lerobot-train with a tiny MolmoAct2, native against patched: losses, weights, checkpoints."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import patching
from somaspeed_patch.testing_frames import FRAMES
from somaspeed_patch.testing_train_parity import assert_same_run, run, weights
from somaspeed_patch.tiny_molmoact2 import redirect

STEPS = 20
COMMON = [
    "--dataset.repo_id=somaspeed/libero_spatial_tiny", f"--dataset.root={FRAMES}",
    "--dataset.video_backend=pyav", "--num_workers=0", "--env_eval_freq=0", "--log_freq=10", "--seed=7",
    "--batch_size=2",
]  # fmt: skip
POLICY = [
    "--policy.type=molmoact2", f"--policy.checkpoint_path={redirect.CHECKPOINT}",
    f"--policy.discrete_action_tokenizer={redirect.FAST_TOKENIZER}", "--policy.device=cpu",
    "--policy.push_to_hub=false", "--policy.model_dtype=float32", "--policy.chunk_size=4",
    "--policy.n_action_steps=4",
]  # fmt: skip
EXPERT = ["--policy.action_mode=continuous", "--policy.train_action_expert_only=true"]
LORA = [
    "--policy.action_mode=continuous", "--policy.enable_lora_vlm=true", "--policy.lora_rank=4",
    "--policy.num_flow_timesteps=2",
]  # fmt: skip
CASES = {  # the instructions differ in length, so every batch of two may be padded
    "1 timestep": ([*EXPERT, "--policy.num_flow_timesteps=1"], "molmoact2/frozen_prefix"),
    "8 timesteps": ([*EXPERT, "--policy.num_flow_timesteps=8"], "molmoact2/frozen_prefix"),
    "checkpointing": ([*EXPERT, "--policy.gradient_checkpointing=true"], "molmoact2/frozen_prefix"),
    "LoRA": (LORA, "molmoact2/shared_context"),
}


@pytest.fixture(scope="module", autouse=True)
def tiny():
    redirect.install("micro")
    yield
    redirect.uninstall()


lerobot_train = partial(run, target="molmoact2", site="molmoact2/frozen_prefix")


@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_are_the_same(case, tmp_path):
    policy, site = CASES[case]
    arguments = [*POLICY, *COMMON, *policy]
    native = lerobot_train(arguments, tmp_path / "native", patched=False)
    assert_same_run(native, lerobot_train(arguments, tmp_path / "ours", patched=True, site=site), STEPS)


def test_bf16_stays_as_close_to_fp32_as_native_does(tmp_path):
    arguments = [*POLICY, *COMMON, *EXPERT]
    low = [*arguments, "--policy.model_dtype=bfloat16"]
    native = lerobot_train(low, tmp_path / "native", patched=False)[0]
    ours = lerobot_train(low, tmp_path / "ours", patched=True)[0]
    assert len(native) == len(ours) == STEPS
    # noise and times are drawn in bf16 too, so an fp32 run is another run: the budget is one bf16 rounding
    # of the loss's terms, which native's own eager attention makes once and ours does not
    eps = torch.finfo(torch.bfloat16).eps
    for theirs, mine in zip(native, ours, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2 * eps)


def frames(policy, checkpoint, first):
    """Two frames of the data set, preprocessed as the checkpoint's own pipeline does it."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import make_pre_post_processors

    chunk = {"action": [i / 20 for i in range(policy.config.chunk_size)]}
    dataset = LeRobotDataset("local", root=FRAMES, delta_timestamps=chunk, video_backend="pyav")
    preprocessor, _ = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    return preprocessor(torch.utils.data.default_collate([dataset[first], dataset[first + 300]]))


def go_on(checkpoint, *, patched, updates=3):
    """The losses of further updates from a checkpoint: policy, optimizer, scheduler and random state loaded.

    Not by `lerobot-train --resume=true`: LeRobot 0.6.1 itself cannot resume this policy, for it overrides a
    step `normalizer_processor`, which MolmoAct2's pipeline calls `molmoact2_masked_normalizer`.
    """
    from lerobot.common.train_utils import load_training_state
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    policy = MolmoAct2Policy.from_pretrained(checkpoint).train()
    optimizer = policy.config.get_optimizer_preset().build(policy.get_optim_params())
    scheduler = policy.config.get_scheduler_preset().build(optimizer, 100)
    step, optimizer, scheduler = load_training_state(checkpoint.parent, optimizer, scheduler)
    batch, losses = frames(policy, checkpoint, first=10 * step), []
    with somaspeed_patch.patched("molmoact2") if patched else nullcontext():
        for _ in range(updates):
            loss, _ = policy.forward(batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {name: value.clone() for name, value in policy.state_dict().items()}


def test_a_run_goes_on_from_the_others_checkpoint(tmp_path):
    arguments = [*POLICY, *COMMON, *EXPERT]
    native = lerobot_train(arguments, tmp_path / "native", patched=False, steps=3)[1]
    ours = lerobot_train(arguments, tmp_path / "ours", patched=True, steps=3)[1]
    losses, weights_after = go_on(native, patched=False)
    for checkpoint, patched in ((native, True), (ours, False)):
        further = go_on(checkpoint, patched=patched)
        assert further[0] == pytest.approx(losses, rel=1e-5)
        assert further[1].keys() == weights_after.keys()
        for name, value in weights_after.items():
            assert (further[1][name] - value).abs().max() <= 1e-5, name


def test_a_patched_checkpoint_loads_in_stock_lerobot(tmp_path):
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    checkpoint = lerobot_train([*POLICY, *COMMON, *EXPERT], tmp_path / "ours", patched=True, steps=2)[1]
    assert not patching.active()
    saved, loaded = weights(checkpoint), MolmoAct2Policy.from_pretrained(checkpoint).state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
