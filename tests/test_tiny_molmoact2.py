"""The tiny MolmoAct2: tokenizers, checkpoint, files built once, the two names, batches, that it trains."""

import multiprocessing
import sys
import tempfile
import time

import numpy as np
import pytest
import torch

from somaspeed_patch.ab.recipe import fill, load
from somaspeed_patch.testing_lerobot import lerobot_train
from somaspeed_patch.testing_molmoact2 import loss_and_gradients, make_batch, make_policy, make_raw_batch
from somaspeed_patch.tiny import episodes
from somaspeed_patch.tiny_molmoact2 import assets, checkpoint, fast_tokenizer, redirect, sizes, tokenizer

EXPERT_ONLY = {"action_mode": "continuous", "train_action_expert_only": True}
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def text_tokenizer(tmp_path_factory):
    from transformers import Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(folder)
    return Qwen2Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor

    folder = tmp_path_factory.mktemp("fast")
    fast_tokenizer.write(folder)
    return UniversalActionProcessor.from_pretrained_local(str(folder))


def test_every_token_has_the_id_that_the_checkpoint_names(text_tokenizer):
    known = tokenizer.ids()
    assert text_tokenizer.convert_tokens_to_ids(list(known)) == list(known.values()) == list(range(990))
    named = [token for token in known if token.startswith("<")]
    assert [text_tokenizer.encode(token, add_special_tokens=False) for token in named] == [
        [known[token]] for token in named
    ]
    config = make_policy().model.config
    assert (
        config.action_token_start_id == known["<action_0>"] and config.image_patch_id == known["<im_patch>"]
    )
    assert (
        config.eos_token_id
        == text_tokenizer.eos_token_id
        == text_tokenizer.pad_token_id
        == known[tokenizer.END]
    )


def test_unknown_text_is_one_id_a_byte(text_tokenizer):
    text = "Grip \u00e9 2!\n"
    ids = text_tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode()) and max(ids) < 256 and text_tokenizer.decode(ids) == text


def test_a_word_of_a_prompt_is_one_id(text_tokenizer):
    text = "The task is to pick up the black bowl from table center. The setup is single franka robotic arm"
    ids = text_tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.split()) + 1 and text_tokenizer.decode(ids) == text  # and the full stop


@pytest.mark.parametrize("horizon", [4, 10, 30])
def test_actions_come_back_within_the_rounding_of_their_coefficients(fast, horizon):
    rng = np.random.default_rng(0)
    random, ends = rng.uniform(-1, 1, (8, horizon, 6)), np.ones((1, horizon, 6))
    actions = np.concatenate([random, ends, -ends])
    ids = fast(actions)
    assert [len(row) for row in ids[:8]] == [horizon * 6] * 8 and len(ids[8]) == horizon * 6 - 4
    assert max(map(max, ids)) < tokenizer.ACTIONS
    back = fast.decode(ids, time_horizon=horizon, action_dim=6)
    # a coefficient is off by at most 0.05, and the orthonormal transform keeps the length of a column
    assert np.linalg.norm(back - actions, axis=1).max() <= 0.05 * horizon**0.5 + 1e-9


def test_the_same_seed_gives_the_same_checkpoint_and_leaves_the_rng_alone(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(3)
    state = torch.get_rng_state()
    options = {"first": {}, "again": {}, "other": {"seed": 1}, "half": {"dtype": torch.bfloat16}}
    for name, option in options.items():
        checkpoint.write(tmp_path / name, sizes.SIZES["micro"], **option)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other, half = (load_file(tmp_path / name / "model.safetensors") for name in options)
    assert all(torch.equal(first[name], again[name]) for name in first)
    same = [name for name in first if torch.equal(first[name], other[name])]
    assert same == ["model.transformer.rotary_emb.inv_freq"]  # no weight
    assert all(torch.equal(first[name].bfloat16(), half[name]) for name in first)
    assert all(weight.std() > 0 for weight in first.values())  # nothing is left at zero, or at one


def test_a_checkpoint_with_other_layers_or_attention(tmp_path):
    assert len(make_policy(layers=3).model.model.action_expert.blocks) == 3
    for given, found in ((None, "eager"), ("sdpa", "sdpa")):
        config = make_policy(attn_implementation=given).model.config
        parts = (config.text_config, config.vit_config, config.adapter_config)
        assert [part._attn_implementation for part in parts] == [found] * 3
    with pytest.raises(ValueError, match=r"crop_mode must be one of \('resize', .*\), but is 'crop'"):
        checkpoint.write(tmp_path, sizes.SIZES["micro"], crop_mode="crop")


@pytest.mark.parametrize(
    ("size", "total", "trainable"), [("micro", 319744, 58944), ("small", 3169056, 415456)]
)
def test_parameter_counts(size, total, trainable):
    policy = make_policy(size=size, **EXPERT_ONLY)
    counted = (
        [p.numel() for p in policy.parameters()],
        [p.numel() for p in policy.parameters() if p.requires_grad],
    )
    assert tuple(map(sum, counted)) == (total, trainable)
    if size == "small":  # the frozen language model is most of it
        assert sum(p.numel() for p in policy.model.model.transformer.parameters()) > 0.7 * total


def test_an_unknown_size_names_the_known_ones(monkeypatch):
    monkeypatch.setenv(sizes.VARIABLE, "large")
    with pytest.raises(ValueError, match=r"size must be one of \['full', 'micro', 'small'\], but is 'large'"):
        sizes.from_environment()


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_files_are_built_once_for_each_kind(empty):
    first = assets.ensure()
    written = (first.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert assets.ensure() == first
    assert (first.checkpoint / "model.safetensors").stat().st_mtime_ns == written
    assert assets.ensure(seed=1) != first
    assert len(list(empty.iterdir())) == 2
    assert all(folder.name.startswith("somaspeed-tiny-molmoact2-micro-") for folder in empty.iterdir())


def test_processes_that_build_at_once_agree(empty):
    children = [FORK.Process(target=assets.ensure) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    [folder] = empty.iterdir()
    assert assets.ensure().checkpoint.parent == folder


def test_a_killed_build_leaves_nothing_under_the_name_that_is_read(empty, monkeypatch):
    with monkeypatch.context() as never:
        never.setattr(fast_tokenizer, "write", lambda folder: time.sleep(60))
        child = FORK.Process(target=assets.ensure)
        child.start()
        while not list(empty.glob("*/checkpoint/processor_config.json")):  # written last
            time.sleep(0.05)
        child.kill()
        child.join()
    [draft] = empty.iterdir()
    built = assets.ensure()
    assert built.checkpoint.parent != draft and (built.fast_tokenizer / "tokenizer.json").is_file()


def test_a_failed_build_is_cleared_away_and_says_why(empty, monkeypatch):
    def full(folder):
        raise OSError("no space left")

    monkeypatch.setattr(fast_tokenizer, "write", full)
    with pytest.raises(OSError, match="no space left"):
        assets.ensure()
    assert list(empty.iterdir()) == []


def test_the_two_names_stand_for_the_files_until_they_are_given_back(tmp_path):
    from lerobot.policies.molmoact2 import modeling_molmoact2, processor_molmoact2
    from lerobot.policies.molmoact2.molmoact2_hf_model import action_tokenizer

    modules = (modeling_molmoact2, processor_molmoact2, action_tokenizer)
    before = [dict(vars(module)) for module in modules]
    redirect.install("small")
    redirect.install("micro")
    for module in modules[:2]:
        found = module._resolve_checkpoint_location(redirect.CHECKPOINT, revision=None, force_download=False)
        assert found == str(assets.ensure("micro").checkpoint)
        assert module._resolve_checkpoint_location(str(tmp_path)) == str(tmp_path)
    assert action_tokenizer._resolve_tokenizer_location(redirect.FAST_TOKENIZER) == str(
        assets.ensure("micro").fast_tokenizer
    )
    redirect.uninstall()
    redirect.uninstall()
    assert [dict(vars(module)) for module in modules] == before


def test_loading_the_full_size_draws_no_weights_that_the_checkpoint_brings():
    from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as host
    from safetensors.torch import load_file

    own = host.MolmoAct2PreTrainedModel._init_weights
    files = assets.ensure("micro").checkpoint
    redirect.install("full")
    try:
        torch.manual_seed(5)
        model = host.MolmoAct2ForConditionalGeneration.from_pretrained(files, dtype=torch.float32)
        after = torch.get_rng_state()
    finally:
        redirect.uninstall()
    assert torch.equal(after, torch.manual_seed(5).get_state())
    stored = load_file(files / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    assert host.MolmoAct2PreTrainedModel._init_weights is own


def test_an_epoch_can_hold_each_episode_several_times(monkeypatch):
    from lerobot.datasets import EpisodeAwareSampler

    own = EpisodeAwareSampler.__init__
    monkeypatch.setenv(episodes.VARIABLE, "3")
    episodes.repeat_from_environment()
    try:
        several = EpisodeAwareSampler([0, 4], [4, 6], drop_n_last_frames=1, shuffle=True, seed=1)
    finally:
        episodes.restore()
    order = list(several)
    assert len(several) == 12 and sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 4, 4, 4] != order
    assert sorted(EpisodeAwareSampler([0, 4], [4, 6])) == [0, 1, 2, 3, 4, 5]
    assert EpisodeAwareSampler.__init__ is own


def test_the_processor_gives_the_keys_that_the_policy_reads():
    policy = make_policy(cameras=2, state_dim=8, action_dim=7)
    batch = make_batch(policy, batch_size=3)
    slots = batch["input_ids"].shape[1]
    shapes = {
        "input_ids": (3, slots),
        "attention_mask": (3, slots),
        "token_type_ids": (3, slots),
        "labels": (3, slots),
        "pixel_values": (6, 16, 588),
        "image_token_pooling": (24, 4),
        "image_grids": (6, 4),
        "image_num_crops": (6,),
        "action": (3, 4, 32),
        "action_dim_is_pad": (3, 32),
        "action_horizon_is_pad": (3, 4),
    }
    assert {name: tuple(batch[name].shape) for name in shapes} == shapes
    assert batch["attention_mask"].all() and batch["token_type_ids"].sum() == 3 * 2 * (4 + 2)
    assert batch["action_dim_is_pad"].sum() == 3 * 25 and not batch["action_horizon_is_pad"].any()
    raw = make_raw_batch(policy, batch_size=3)["action"] / 0.9
    assert (raw.abs() > 1).any()  # by the statistics of make_preprocessor, some values are clamped
    torch.testing.assert_close(batch["action"][..., :7], raw.clamp(-1, 1))


def test_tasks_and_still_samples_pad_and_valid_actions_mask():
    batch = make_batch(make_policy(), tasks=["a", "put it back", "a"], valid_actions=[4, 1, 2], still=[2])
    real = batch["attention_mask"].sum(dim=1).tolist()
    assert real == [max(real) - 7, max(real), max(real) - 11]
    assert batch["attention_mask"][:, -1].all() and (batch["labels"] >= 0).sum(1).tolist() == [27, 27, 23]
    assert batch["action_horizon_is_pad"].sum(dim=1).tolist() == [0, 3, 2]


def test_larger_images_have_more_crops():
    policy = make_policy(cameras=2, crop_mode="overlap-and-resize-c2", **EXPERT_ONLY)
    batch = make_batch(policy, batch_size=2, image_sizes=[(56, 56), (56, 140)])
    assert batch["image_num_crops"].tolist() == [2, 5, 2, 5]
    assert loss_and_gradients(policy, batch)[0].isfinite()


@pytest.mark.parametrize("wrong", [{"valid_actions": [1, 2]}, {"image_sizes": [(56, 56)] * 2}])
def test_batches_refuse_what_does_not_fit(wrong):
    with pytest.raises(ValueError, match=r"must have an entry a (sample, 4|camera, 1), but has 2"):
        make_raw_batch(make_policy(), **wrong)


def test_trains_one_step_and_every_trainable_weight_has_a_gradient():
    policy = make_policy(cameras=2)
    batch = make_batch(policy, tasks=["lift", "put it on the plate", "push"], valid_actions=[4, 2, 3])
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    before, gradients = loss_and_gradients(policy, batch)
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert frozen == {f"model.model.transformer.wte.{kind}" for kind in ("embedding", "new_embedding")}
    assert set(gradients) == {name for name, _ in policy.named_parameters()} - frozen
    assert [name for name, gradient in gradients.items() if not gradient.any()] == []
    optimizer.step()
    assert loss_and_gradients(policy, batch)[0] < before


def test_expert_only_trains_all_of_the_expert_and_nothing_else():
    policy = make_policy(**EXPERT_ONLY, gradient_checkpointing=True)
    batch = make_batch(policy)
    loss, gradients = loss_and_gradients(policy, batch)
    assert set(gradients) == {name for name, _ in policy.named_parameters() if "action_expert" in name}
    assert all(gradient.any() for gradient in gradients.values())
    single, weighted = loss_and_gradients(policy, batch, reduction="none")
    torch.testing.assert_close(single.mean(), loss)
    assert single.shape == (4,) and not torch.equal(
        weighted[next(iter(weighted))], gradients[next(iter(weighted))]
    )
    mixed, _ = loss_and_gradients(policy, batch, autocast=True)
    assert mixed != loss
    torch.testing.assert_close(mixed, loss, rtol=2e-2, atol=0)


def test_the_shipped_recipe_trains(monkeypatch, tmp_path):
    """lerobot-train takes the recipe's arguments, and discovery makes it find the two names."""
    from lerobot.policies.molmoact2 import processor_molmoact2

    monkeypatch.setenv(sizes.VARIABLE, "micro")
    monkeypatch.delitem(sys.modules, "somaspeed_patch.tiny_molmoact2.activate", raising=False)
    native = processor_molmoact2._resolve_checkpoint_location
    words = fill(load("molmoact2_libero_tiny").arguments, out=tmp_path / "host", steps=2)
    try:
        run = lerobot_train([*words, "--num_workers=0", "--batch_size=2"], tmp_path / "host")
    finally:
        redirect.uninstall()
    assert [update["samples"] for update in run.updates] == [2, 2]
    assert all(0 < update["loss"] < 10 and update["grad_norm"] > 0 for update in run.updates)
    assert processor_molmoact2._resolve_checkpoint_location is native
