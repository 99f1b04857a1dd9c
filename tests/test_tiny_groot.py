"""The tiny GR00T: tokenizer, configurations, checkpoint, the name that stands for it, batches, training."""

import sys

import pytest
import torch

from somaspeed_patch.ab.recipe import fill, load
from somaspeed_patch.testing_groot import (
    loss_and_gradients,
    make_batch,
    make_policy,
    make_preprocessor,
    make_raw_batch,
)
from somaspeed_patch.testing_lerobot import lerobot_train
from somaspeed_patch.tiny_groot import assets, checkpoint, configs, redirect, sizes, tokenizer

INSTRUCTION = "pick up the black bowl next to the ramekin and place it on the plate"
MICRO = sizes.SIZES["micro"]


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What LeRobot's processor reads."""
    folder = tmp_path_factory.mktemp("backbone")
    checkpoint.write_processor(folder, MICRO)
    return folder


@pytest.fixture(scope="module")
def text_tokenizer(files):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(files)


def test_every_token_has_the_id_that_the_backbone_names(text_tokenizer):
    known = tokenizer.ids()
    assert (
        text_tokenizer.convert_tokens_to_ids(list(known)) == list(known.values()) == list(range(len(known)))
    )
    assert [text_tokenizer.encode(token) for token in tokenizer.SPECIAL] == [
        [known[token]] for token in tokenizer.SPECIAL
    ]
    assert text_tokenizer.eos_token_id == known["<|im_end|>"]
    assert text_tokenizer.pad_token_id == known["<|endoftext|>"]
    config = backbone_config("micro")
    assert config.text_config.vocab_size == len(known) and config.image_token_id == known["<|image_pad|>"]


def test_a_word_of_an_instruction_is_one_id_and_unknown_text_one_a_byte(text_tokenizer):
    ids = text_tokenizer.encode(INSTRUCTION)
    assert len(ids) == len(INSTRUCTION.split()) and text_tokenizer.decode(ids) == INSTRUCTION
    other = "Grip \u00e9 2!\n"
    ids = text_tokenizer.encode(other)
    assert len(ids) == len(other.encode()) and max(ids) < 256 and text_tokenizer.decode(ids) == other


def test_the_chat_template_puts_every_image_before_the_text(text_tokenizer):
    content = [{"type": "image", "image": 0}, {"type": "image", "image": 0}, {"type": "text", "text": "lift"}]
    text = text_tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\n{image}{image}lift<|im_end|>\n"


def backbone_config(size):
    from lerobot.policies.groot import groot_n1_7 as host

    return configs.backbone(sizes.SIZES[size], host._cosmos_reason2_qwen3_vl_config)()


def test_the_full_size_is_lerobots_own():
    from lerobot.policies.groot import groot_n1_7 as host

    known = tokenizer.ids()
    expected = host._cosmos_reason2_qwen3_vl_config().to_dict()
    expected["image_token_id"], expected["video_token_id"] = known["<|image_pad|>"], known["<|video_pad|>"]
    expected["vision_start_token_id"] = known["<|vision_start|>"]
    expected["vision_end_token_id"] = known["<|vision_end|>"]
    expected["text_config"]["bos_token_id"] = known["<|endoftext|>"]
    expected["text_config"]["eos_token_id"] = known["<|im_end|>"]
    assert backbone_config("full").to_dict() == expected
    assert configs.model(sizes.SIZES["full"]).to_dict() == host.GR00TN17Config().to_dict()


@pytest.mark.parametrize(
    ("size", "total", "trainable"),
    [
        ("micro", 451_608, 228_568),
        ("small", 12_916_416, 5_211_200),
        ("full", 3_144_016_000, 1_620_515_968),
    ],
)
def test_parameter_counts(size, total, trainable):
    from lerobot.policies.groot.groot_n1_7 import GR00TN17

    found = sizes.SIZES[size]
    with torch.device("meta"), configs.backbone_of(found):
        model = GR00TN17(configs.model(found), load_backbone_weights=False)
    counted = (
        [p.numel() for p in model.parameters()],
        [p.numel() for p in model.parameters() if p.requires_grad],
    )
    assert tuple(map(sum, counted)) == (total, trainable)


def test_an_unknown_size_names_the_known_ones(monkeypatch):
    monkeypatch.setenv(sizes.VARIABLE, "large")
    with pytest.raises(ValueError, match=r"size must be one of \['full', 'micro', 'small'\], but is 'large'"):
        sizes.from_environment()


def test_the_same_seed_gives_the_same_checkpoint_and_leaves_the_rng_alone(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(3)
    state = torch.get_rng_state()
    options = {"first": {}, "again": {}, "other": {"seed": 1}, "half": {"dtype": torch.bfloat16}}
    for name, option in options.items():
        checkpoint.write(tmp_path / name, MICRO, **option)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other, half = (load_file(tmp_path / name / "model.safetensors") for name in options)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [name for name in first if torch.equal(first[name], other[name])] == []
    assert all(torch.equal(first[name].bfloat16(), half[name]) for name in first)
    assert all(weight.std() > 0 for weight in first.values())  # nothing is left at zero, or at one


def test_lerobot_loads_what_the_checkpoint_has(policy):
    from safetensors.torch import load_file

    stored = load_file(assets.ensure() / "model.safetensors")
    model, head = policy._groot_model, "backbone.model.lm_head.weight"
    loaded = model.state_dict()
    assert set(loaded) == {*stored, head}
    assert all(torch.equal(loaded[name], weight) for name, weight in stored.items())
    assert model.backbone.model.lm_head.weight is model.backbone.language_model.embed_tokens.weight
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    half = make_policy(dtype=torch.bfloat16, model_params_fp32=False)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_checkpoint_with_other_fields_is_another_folder():
    policy = make_policy(model={"use_alternate_vl_dit": False, "vl_self_attention_cfg": {"num_layers": 0}})
    head = policy._groot_model.action_head
    assert type(head.model).__name__ == "DiT" and isinstance(head.vl_self_attention, torch.nn.Identity)
    assert assets.ensure("micro", seed=1) != assets.ensure("micro") == assets.ensure("micro")
    loss, _ = loss_and_gradients(policy, make_batch(policy))
    assert loss.isfinite()


def test_the_name_stands_for_the_files_until_it_is_given_back(tmp_path):
    from lerobot.policies.groot import groot_n1_7, processor_groot

    modules = (groot_n1_7, processor_groot)
    before = [dict(vars(module)) for module in modules]
    redirect.install("small")
    redirect.install("micro")
    assert groot_n1_7.snapshot_download(redirect.CHECKPOINT, revision=None) == str(assets.ensure("micro"))
    with pytest.raises(ValueError, match="Repo id must"):  # huggingface_hub's own
        groot_n1_7.snapshot_download(str(tmp_path))
    assert groot_n1_7._cosmos_reason2_qwen3_vl_config().text_config.hidden_size == MICRO.llm_width
    with redirect.installed("small"):
        assert groot_n1_7._cosmos_reason2_qwen3_vl_config().vision_config.depth == 6
    assert groot_n1_7._cosmos_reason2_qwen3_vl_config().vision_config.depth == MICRO.vision_depth
    processor = processor_groot._build_n1_7_processor()
    assert processor.tokenizer.padding_side == "left" and len(processor.tokenizer) == len(tokenizer.ids())
    redirect.uninstall()
    redirect.uninstall()
    with redirect.installed("small"):
        assert dict(vars(groot_n1_7)) != before[0]
    assert [dict(vars(module)) for module in modules] == before


@pytest.mark.parametrize("images", [1, 2, 3])
def test_the_processor_gives_what_the_policy_reads(policy, images):
    batch = make_batch(policy, 3, images=images)
    slots = 8 + 5 + images * (4 + 2) - 3  # im_start user newline ... im_end newline, 5 words, image tokens
    shapes = {
        "input_ids": (3, slots),
        "attention_mask": (3, slots),
        "mm_token_type_ids": (3, slots),
        "pixel_values": (3 * images * 16, 1536),
        "image_grid_thw": (3 * images, 3),
        "state": (3, 1, 16),
        "action": (3, 4, 16),
        "action_mask": (3, 4, 16),
        "embodiment_id": (3,),
    }
    assert {name: tuple(batch[name].shape) for name in shapes} == shapes
    assert batch["attention_mask"].all() and batch["image_grid_thw"].tolist() == [[1, 4, 4]] * (3 * images)
    assert (batch["input_ids"] == tokenizer.ids()["<|image_pad|>"]).sum() == 3 * images * 4
    assert batch["embodiment_id"].tolist() == [10] * 3 and batch["action_mask"].sum() == 3 * 4 * 7
    assert batch["action"].abs().max() == 1  # by the statistics, some are clamped


def test_ragged_text_is_padded_on_the_left_and_arguments_show(policy):
    tasks = ["lift", INSTRUCTION, "lift"]
    batch = make_batch(policy, tasks=tasks, embodiments=[2, 10, 0], valid_actions=[4, 1, 2])
    real = batch["attention_mask"].sum(dim=1).tolist()
    assert real == [max(real) - 11, max(real), max(real) - 11]  # 4 bytes, 15 words
    assert (
        batch["attention_mask"][:, -1].all() and not batch["attention_mask"][0, : max(real) - real[0]].any()
    )
    assert batch["embodiment_id"].tolist() == [2, 10, 0] and batch["embodiment_id"].dtype == torch.int32
    assert batch["action_mask"][..., 0].sum(dim=1).tolist() == [4, 1, 2]
    again = make_batch(policy, tasks=tasks, embodiments=[2, 10, 0], valid_actions=[4, 1, 2])
    other = make_batch(policy, tasks=tasks, seed=1)
    tensors = [name for name, value in batch.items() if torch.is_tensor(value)]
    assert all(torch.equal(batch[name], again[name]) for name in tensors)
    assert not torch.equal(batch["pixel_values"], other["pixel_values"])
    assert not torch.equal(batch["state"], other["state"])


def test_raw_batches_have_images_of_other_sizes_and_numbers(policy):
    batch = make_raw_batch(policy, [[(2, 2), (2, 3)], [], [(1, 4)]], words=[5, 9, 3], embodiments=[0, 1, 11])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 2, 8]]
    assert batch["pixel_values"].shape == (16 + 24 + 16, 1536)
    assert batch["attention_mask"].sum(1).tolist() == [4 + 6 + 4 + 5, 9, 4 + 2 + 3]
    assert batch["mm_token_type_ids"].sum(1).tolist() == [10, 0, 4]
    assert batch["embodiment_id"].tolist() == [0, 1, 11]
    processed = make_batch(policy, 3)
    shared = [name for name, value in batch.items() if processed[name].dtype == value.dtype]
    assert shared == list(batch)
    loss, gradients = loss_and_gradients(policy, batch)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("wrong", [{"embodiments": [1, 2, 3]}, {"valid_actions": [1]}])
def test_batches_refuse_what_does_not_fit(policy, wrong):
    with pytest.raises(ValueError, match=r"must have an entry a sample, 2, but has (3|1)"):
        make_batch(policy, **wrong)


@pytest.mark.parametrize("size", ["micro", "small"])
def test_every_trainable_weight_has_a_gradient_and_the_backbone_none(size):
    policy = make_policy(size)
    batch = make_batch(policy, images=2, tasks=["lift", INSTRUCTION], embodiments=[2, 10])
    before, gradients = loss_and_gradients(policy, batch)
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in policy.named_parameters() if ".backbone." in name}
    assert set(gradients) == {name for name, _ in policy.named_parameters()} - frozen
    assert [name for name, gradient in gradients.items() if not gradient.any()] == []
    torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3).step()
    assert loss_and_gradients(policy, batch)[0] < before


def test_every_input_changes_the_loss(policy):
    batch = make_batch(policy, images=2, tasks=["lift", INSTRUCTION])
    loss = loss_and_gradients(policy, batch)[0]
    assert loss == loss_and_gradients(policy, batch)[0] != loss_and_gradients(policy, batch, seed=8)[0]
    ids = batch["input_ids"]
    changes = {
        "pixel_values": -batch["pixel_values"],
        "state": -batch["state"],
        "action": -batch["action"],
        "input_ids": torch.where(ids < 256, (ids + 1) % 256, ids),
        "embodiment_id": batch["embodiment_id"] - 1,
    }
    for name, value in changes.items():
        other = loss_and_gradients(policy, {**batch, name: value})[0]
        assert abs(other - loss) > 1e-3 * loss, name


def test_every_weight_of_the_frozen_backbone_changes_the_loss():
    policy = make_policy()
    batch = make_batch(policy, images=2, tasks=["lift", INSTRUCTION])

    @torch.no_grad()
    def loss():
        torch.manual_seed(7)
        return policy.forward(dict(batch))[0]

    before, same = loss(), []
    for name, weight in policy._groot_model.backbone.named_parameters():
        if name.endswith(".weight"):  # softmax does not see a bias of the keys
            kept = weight.data.clone()
            rows = torch.linspace(0.5, 1.5, len(kept))  # a factor for all of them could hide in a norm
            weight.data.mul_(rows.view(-1, *[1] * (kept.dim() - 1)))
            if abs(loss() - before) < 1e-4 * before:
                same.append(name)
            weight.data.copy_(kept)
    assert loss() == before and same == ["model.model.language_model.norm.weight"]  # GR00T reads before it


def test_the_preprocessor_is_lerobots_own(policy):
    names = [type(step).__name__ for step in make_preprocessor(policy).steps]
    assert names[2:] == ["GrootN17PackInputsStep", "GrootN17VLMEncodeStep", "DeviceProcessorStep"]


def test_the_shipped_recipe_trains(monkeypatch, tmp_path):
    """lerobot-train takes the recipe's arguments, and discovery makes it find the name."""
    from lerobot.policies.groot import processor_groot

    monkeypatch.setenv(sizes.VARIABLE, "micro")
    monkeypatch.delitem(sys.modules, "somaspeed_patch.tiny_groot.activate", raising=False)
    native = processor_groot._build_n1_7_processor
    words = fill(load("groot_libero_tiny").arguments, out=tmp_path / "host", steps=2)
    try:
        run = lerobot_train([*words, "--num_workers=0", "--batch_size=2"], tmp_path / "host")
    finally:
        redirect.uninstall()
    assert [update["samples"] for update in run.updates] == [2, 2]
    assert all(0 < update["loss"] < 10 and update["grad_norm"] > 0 for update in run.updates)
    assert processor_groot._build_n1_7_processor is native


def test_lerobot_takes_the_arguments_of_the_full_recipe(tmp_path):
    import draccus
    from lerobot.configs.train import TrainPipelineConfig

    words = fill(load("groot_libero").arguments, out=tmp_path / "host", steps=60)
    config = draccus.parse(TrainPipelineConfig, args=[*words, "--policy.device=cpu"])
    assert (config.batch_size, config.policy.chunk_size, config.policy.use_bf16) == (320, 40, True)
    assert config.policy.get_scheduler_preset().num_warmup_steps == 3
    assert config.dataset.image_transforms.tfs["hue"].kwargs == {"hue": [-0.08, 0.08]}
