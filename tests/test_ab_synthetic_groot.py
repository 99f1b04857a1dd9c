"""`somaspeed ab --synthetic` on GR00T N1.7: the full size counted, a tiny one run, batch and switches."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from somaspeed_patch import cli, facts
from somaspeed_patch.ab import (
    synthetic,
    synthetic_gate,
    synthetic_groot,
    synthetic_groot_batch,
    synthetic_groot_model,
    synthetic_recipe,
)
from somaspeed_patch.ab.yaml_reader import RecipeError
from somaspeed_patch.testing_groot import make_batch, make_policy

RECIPE = """
description: tiny
host: lerobot-train
steps: 1
arms:
  native: { targets: none }
synthetic:
  model: groot
  size: micro
  tokens: 24
  embodiments: 2
  warmup: 1
  steps: 1
  repeats: 2
  arms:
    native: { batches: [2, 3] }
    native_documented: { policy: { all_fp32: true }, batches: [2] }
    native_bf16: { policy: { all_bf16: true, dropout: "off" }, batches: [2] }
    patched: { patched: true, features: { optimizer: false }, batches: [2] }
    patched_bf16:
      patched: true
      features: { optimizer: false } # its kernels are slow in Triton's interpreter
      policy: { all_bf16: true, dropout: "off" }
      batches: [2]
    patched_padded: { patched: true, features: { optimizer: false }, padding: left, batches: [2] }
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def recipe(recipe_file):
    return synthetic_recipe.load(str(recipe_file))


@pytest.fixture(scope="module")
def subject(recipe):
    return synthetic_groot.Subject(recipe, CPU)


def counted(policy):
    """Parameters by part, dtype and whether they learn."""
    found = Counter()
    for name, parameter in policy.named_parameters():
        part = "head" if name.startswith("_groot_model.action_head.") else "backbone"
        found[part, parameter.dtype, parameter.requires_grad] += parameter.numel()
    return dict(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_full_size_has_the_published_parameters(recipe, dtype):
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    full = replace(recipe, size="full", dtype=dtype)
    with synthetic_groot_model.without_checkpoint(full, torch.device("meta")):
        policy = GrootPolicy(synthetic_groot_model.policy_config(full, "cpu"))
    assert counted(policy) == {
        ("backbone", getattr(torch, dtype), False): 3_144_016_000 - 1_620_515_968,
        ("head", torch.float32, True): 1_620_515_968,
    }
    config = policy._groot_model.config
    assert (config.state_dropout_prob, config.action_horizon, config.max_action_dim) == (0.2, 40, 132)
    model = policy._groot_model
    batch = synthetic_groot_batch.make(
        model, torch.tensor([44, 44]), side=256, cameras=2, chunk=16, embodiments=1, device=CPU, seed=1
    )
    shapes = {key: tuple(value.shape) for key, value in batch.items()}
    assert shapes == {
        "input_ids": (2, 172),
        "attention_mask": (2, 172),
        "mm_token_type_ids": (2, 172),
        "image_grid_thw": (4, 3),
        "embodiment_id": (2,),
        "state": (2, 1, 132),
        "action": (2, 40, 132),
        "action_mask": (2, 40, 132),
        "pixel_values": (4 * 256, 1536),
    }
    assert batch["image_grid_thw"].tolist() == [[1, 16, 16]] * 4


def test_the_hosts_names_come_back(recipe):
    from lerobot.policies.groot import groot_n1_7, modeling_groot

    before = dict(vars(modeling_groot)), dict(vars(groot_n1_7))
    with synthetic_groot_model.without_checkpoint(recipe, CPU):
        assert vars(modeling_groot) != before[0]
        modeling_groot.GrootPolicy(synthetic_groot_model.policy_config(recipe, "cpu"))
    assert (vars(modeling_groot), vars(groot_n1_7)) == before


def test_dropout_is_the_real_models_and_nothing_starts_from_zero(subject):
    assert {m.p for m in subject.policy.modules() if isinstance(m, nn.Dropout)} == {0.2}
    for name, parameter in subject.policy.named_parameters():
        assert parameter.any(), name
    _, gradients = subject.loss_and_gradients(subject.batch(4))
    trained = {name for name, p in subject.policy.named_parameters() if p.requires_grad}
    assert set(gradients) == trained
    assert all(gradient.any() for gradient in gradients.values())


def test_the_optimizer_has_the_hosts_groups_and_rates(subject):
    with subject.optimized():
        groups = subject._optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [1e-5, 0.0]
    assert {group["lr"] for group in groups} == {1e-4}


def test_the_batch_is_what_lerobots_preprocessor_leaves(subject):
    theirs = make_batch(make_policy(), images=2, tasks=["pick it up", "put it there"])
    ours = subject.batch(3)
    assert {k: (v.dtype, v.ndim) for k, v in ours.items()} == {
        key: (theirs[key].dtype, theirs[key].ndim) for key in ours
    }
    model = {"action", "state", "action_mask", "embodiment_id", "input_ids", "attention_mask", "pixel_values"}
    assert set(ours) == model | {"image_grid_thw", "mm_token_type_ids"}
    assert ours["image_grid_thw"].tolist() == [[1, 4, 4]] * 6
    assert ours["embodiment_id"].tolist() == [2, 3, 2]
    assert not ours["state"][..., 8:].any()
    assert ours["state"][..., :8].all()
    mask = ours["action_mask"]
    assert mask[:, :16, :7].all()
    assert mask.sum() == 3 * 16 * 7
    assert torch.equal(ours["action"] != 0, mask == 1)


def test_images_are_where_the_prompt_says(subject):
    config = subject.policy._groot_model.backbone.model.config
    start, image, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    batch = subject.batch(2)
    row = batch["input_ids"][0].tolist()
    assert len(row) == 24 + 2 * 4
    assert row[3:15] == [start, *[image] * 4, end, start, *[image] * 4, end]
    text = torch.tensor(row[:3] + row[15:])
    assert 0 < int(text.min()) <= int(text.max()) < min(start, image, end)
    assert torch.equal(batch["mm_token_type_ids"], (batch["input_ids"] == image).long())
    bytes_ = (batch["pixel_values"] + 1) * 127.5
    assert torch.equal(batch["pixel_values"], bytes_.round() / 127.5 - 1)
    assert (int(bytes_.min()), round(float(bytes_.max()))) == (0, 255)
    frames = batch["pixel_values"].view(4 * 16, 3, 2, 16 * 16)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])


def test_padding_shortens_texts_and_keeps_images(subject):
    full, padded = subject.batch(4), subject.batch(4, padding="left")
    lengths = padded["attention_mask"].sum(1).tolist()
    assert lengths[0] == full["input_ids"].shape[1] == padded["input_ids"].shape[1]
    assert all(lengths[0] - 12 <= length < lengths[0] for length in lengths[1:])
    for row, length in enumerate(lengths):
        assert torch.equal(padded["input_ids"][row, -length:], full["input_ids"][row, :length])
        assert padded["attention_mask"][row, -length:].all()
        assert int(padded["mm_token_type_ids"][row].sum()) == 2 * 4
    assert not padded["input_ids"][padded["attention_mask"] == 0].any()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"lengths": torch.tensor([20, 8])}, "8 tokens cannot hold the 9 around its images"),
        ({"chunk": 41}, "chunk must be at most the model's 40, but is 41"),
        ({"embodiments": 13}, "embodiments must be at most the model's 12, but is 13"),
    ],
)
def test_a_batch_that_the_model_cannot_take_is_refused(subject, changed, text):
    given = {"lengths": torch.tensor([20, 20]), "cameras": 2, "chunk": 16, "embodiments": 1, **changed}
    lengths = given.pop("lengths")
    with pytest.raises(ValueError, match=text):
        synthetic_groot_batch.make(subject.policy._groot_model, lengths, side=64, device=CPU, seed=1, **given)


def test_small_integer_tensors_keep_their_twin_on_another_device(subject):
    for value in subject.batch(2).values():
        moved = facts.to(value, torch.device("meta"))
        assert facts.has_twin(moved) is not value.is_floating_point()
        assert value.is_floating_point() or facts.on_cpu(moved) is value
        assert not hasattr(value, "somaspeed_facts")


def test_arms_of_other_batch_sizes_have_static_graphs_of_their_own():
    graphs = []

    def backend(graph, inputs):
        graphs.append([tuple(value.shape) for value in inputs])  # a dynamic one has a size among its inputs
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with synthetic.graphs_of_one_run():
        for size in range(2, 14):
            assert double(torch.ones(size)).sum() == 2 * size
    assert graphs == [[(size,)] for size in range(2, 14)]


def test_the_command_gates_and_measures_every_arm(recipe_file, capsys):
    out = recipe_file.parent / "out"
    assert cli.main(["ab", str(recipe_file), "--synthetic", "--repeats", "1", "--out", str(out)]) == 0
    found = json.loads((out / "results.json").read_text())
    assert "patched_padded: the parity gate is green" in capsys.readouterr().out
    assert {name: verdict["green"] for name, verdict in found["gate"].items()} == {
        "patched": True,
        "patched_bf16": True,
        "patched_padded": True,
    }
    assert found["gate"]["patched"]["loss"]["native"] != found["gate"]["patched_bf16"]["loss"]["native"]
    sites = {(cell["arm"], cell["batch"]): cell["sites"] for cell in found["cells"]}
    assert set(sites) == {
        ("native", 2), ("native", 3), ("native_documented", 2), ("native_bf16", 2), ("patched", 2),
        ("patched_bf16", 2), ("patched_padded", 2),
    }  # fmt: skip
    for (arm, _), ran in sites.items():
        ours = {site["site"] for site in ran if site["calls"]}
        wanted = {"groot/frozen_prefix", "groot/category_linear", "groot/deferred_metrics"}
        assert ours >= wanted if arm.startswith("patched") else not ours
    assert found["model"]["embodiments"] == 2


def test_native_passes_against_native(recipe, subject):
    batch = subject.batch(2, padding="left")
    exact, native = synthetic_gate.truth(subject, batch), subject.loss_and_gradients(batch)
    verdict = synthetic_gate.judge(exact, native, subject.loss_and_gradients(batch))
    assert verdict["green"]
    assert verdict["against_native"]["relative_difference"] == 0


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("all_fp32: true", "all_f32: true", r"policy.all_f32: unknown key; did you mean all_fp32\?"),
        ("all_fp32: true", "all_fp32: 32", r"policy.all_fp32: expected true or false, but is 32"),
        ('dropout: "off"', "dropout: 0", r"policy.dropout: expected one of host, off, but is 0"),
        ("padding: left", "padding: right", r"patched_padded.padding: expected left, but is 'right'"),
        ("embodiments: 2", "slots: 2", r"synthetic.slots: unknown key"),
        ("size: micro", "size: mikro", r"synthetic.size: expected one of full, micro, small, but is 'mikro'"),
    ],
)
def test_a_wrong_section_is_named_with_file_line_and_key(recipe_file, old, new, text):
    other = recipe_file.with_name("changed.yaml")
    other.write_text(recipe_file.read_text().replace(old, new))
    with pytest.raises(RecipeError, match=text):
        synthetic_recipe.load(str(other))


def test_the_shipped_recipe_has_every_arm():
    shipped = synthetic_recipe.load("groot_libero")
    assert (shipped.model, shipped.size, shipped.dtype) == ("groot", "full", "bfloat16")
    assert (shipped.cameras, shipped.tokens, shipped.chunk, shipped.embodiments) == (2, 44, 16, 1)
    assert {arm.name: arm.batches for arm in shipped.arms if not arm.patched} == {
        "native": (80, 320),
        "tuned": (80, 320),
        "tuned_bf16": (80, 320),
        "tuned_compiled": (80, 320),
    }
    assert {arm.name: arm.batches for arm in shipped.arms if arm.patched and not arm.ablates} == {
        "patched": (80, 320),
        "patched_compiled": (80, 320, 640),
        "patched_compiled_recompute": (320, 640),
        "patched_compiled_documented": (320,),
        "patched_compiled_padded": (320,),
    }
