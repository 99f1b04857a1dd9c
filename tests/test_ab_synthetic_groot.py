"""`somaspeed ab --synthetic` on GR00T N1.7: the full size counted, a tiny one run, batch and switches."""

import functools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from somaspeed_patch import cli, facts
from somaspeed_patch.ab import (
    synthetic_gate,
    synthetic_groot,
    synthetic_groot_batch,
    synthetic_groot_model,
    synthetic_recipe,
)
from somaspeed_patch.ab.yaml_reader import RecipeError
from somaspeed_patch.adapter import adapters
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
NOISE = ("to_k.bias",)  # softmax does not see a shift of all keys: what is there is rounding alone


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
        moved = synthetic_groot_batch._moved(value, torch.device("meta"))
        assert facts.has_twin(moved) is not value.is_floating_point()
        assert value.is_floating_point() or facts.on_cpu(moved) is value
        assert not hasattr(value, "somaspeed_facts")


def state(policy):
    """What the switches touch: every module's own attributes, the parameters and the configurations."""
    modules = {
        name: {key: value for key, value in vars(module).items() if not key.endswith("hooks")}
        for name, module in policy.named_modules()
    }
    head = policy._groot_model.action_head
    assert "_beta_dist" in modules["_groot_model.action_head"]  # drawn once, at the first loss
    attention = [getattr(*holder) for holder in synthetic_groot._attention(policy)]
    cache = policy._groot_model.backbone.language_model.config.use_cache
    weights = {name: (p.dtype, p.detach().clone()) for name, p in policy.named_parameters()}
    return modules, attention, cache, head.state_dropout_prob, weights


def same(before, after):
    modules, *rest, weights = before
    modules_after, *rest_after, weights_after = after
    assert rest == rest_after
    for name, attributes in modules.items():
        assert modules_after[name].keys() == attributes.keys(), name
        for key in attributes.keys() - {"rope_deltas"}:  # of the last batch
            assert modules_after[name][key] is attributes[key] or modules_after[name][key] == attributes[key]
    for name, (dtype, values) in weights.items():
        assert weights_after[name][0] == dtype
        assert torch.equal(weights_after[name][1], values), name


def distance(gradients, others):
    """The largest relative one of any parameter whose gradient is not rounding alone."""
    return max(
        float((gradients[name].float() - others[name].float()).norm() / gradients[name].float().norm())
        for name in gradients
        if not name.endswith(NOISE)
    )


@pytest.mark.parametrize(
    ("options", "bits", "close"),
    [
        ({"attention": "eager"}, False, 0.2),
        ({"dropout": "off", "attention": "sdpa"}, False, None),
        ({"dropout": "host"}, True, 0.0),
        ({"all_fp32": True}, False, None),
        ({"all_bf16": True}, False, 0.2),
    ],
)
def test_a_switch_changes_how_and_is_undone(subject, options, bits, close):
    batch = subject.batch(2)
    loss, gradients = subject.loss_and_gradients(batch)
    before = state(subject.policy)
    with subject.switched(options):
        other_loss, others = subject.loss_and_gradients(batch)
    assert (torch.equal(loss, other_loss) and distance(gradients, others) == 0) is bits
    if close is not None:
        assert distance(gradients, others) <= close
        assert float(other_loss) == pytest.approx(float(loss), rel=0.01)
    same(before, state(subject.policy))
    assert torch.equal(subject.loss_and_gradients(batch)[0], loss)


def test_weights_have_the_dtype_that_is_asked_for(subject):
    with subject.switched({"all_bf16": True}):
        assert {dtype for _, dtype, _ in counted(subject.policy)} == {torch.bfloat16}
    with subject.switched({"all_fp32": True}):
        assert {dtype for _, dtype, _ in counted(subject.policy)} == {torch.float32}
    assert {(part, dtype) for part, dtype, _ in counted(subject.policy)} == {
        ("backbone", torch.bfloat16),
        ("head", torch.float32),
    }
    with (
        pytest.raises(ValueError, match="all_bf16 and all_fp32 exclude each other"),
        subject.switched({"all_bf16": True, "all_fp32": True}),
    ):
        pass


def test_without_dropout_no_random_number_but_noise_and_times_is_drawn(subject):
    batch = subject.batch(2)
    with subject.switched({"dropout": "off"}):
        assert subject.policy._groot_model.action_head.state_dropout_prob == 0
        torch.manual_seed(3)
        subject.policy.forward(batch)
        after = torch.get_rng_state()
    torch.manual_seed(3)
    torch.randn(batch["action"].shape, dtype=torch.bfloat16)
    subject.policy._groot_model.action_head.sample_time(2, CPU, torch.bfloat16)
    assert torch.equal(after, torch.get_rng_state())


def test_eager_reaches_vision_tower_and_language_model(subject):
    backbone = subject.policy._groot_model.backbone
    attention = [backbone.visual.blocks[0].attn, backbone.language_model.layers[0].self_attn]
    with subject.switched({"attention": "eager"}):
        assert [part.config._attn_implementation for part in attention] == ["eager"] * 2
    assert [part.config._attn_implementation for part in attention] == ["sdpa"] * 2


def test_compiled_blocks_compute_the_same_and_are_left_as_they_were(subject, monkeypatch):
    # dynamo's part alone, which sees hooks and caches; what inductor rounds is not what is asked here
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    blocks = list(subject.policy._groot_model.backbone.language_model.layers)
    assert len(synthetic_groot._blocks(subject.policy)) == 3 + len(blocks) + 1 + 4
    monkeypatch.setattr(synthetic_groot, "_blocks", lambda policy: blocks)
    batch = subject.batch(2)
    loss, gradients = subject.loss_and_gradients(batch)
    before = state(subject.policy)
    with subject.switched({"compile_blocks": True}):
        first = [block.forward for block in blocks]
        for _ in range(2):  # the second call has another hook on the last decoder layer
            other_loss, others = subject.loss_and_gradients(batch)
            assert torch.equal(other_loss, loss)
            assert distance(gradients, others) == 0
    same(before, state(subject.policy))
    with subject.switched({"compile_blocks": True}):
        assert all(block.forward is compiled for block, compiled in zip(blocks, first, strict=True))
    subject._compiled.clear()


def seen(policy, batch):
    """What the backbone's images, the head's noisy actions and times, and dropout's masks were in a step."""
    found, head = {"masks": []}, policy._groot_model.action_head
    handles = [
        policy._groot_model.backbone.visual.register_forward_pre_hook(
            lambda _, args: found.update(pixels=args[0].float())
        ),
        head.action_encoder.register_forward_pre_hook(
            lambda _, args: found.update(noisy=args[0].float(), times=args[1])
        ),
        head.model.register_forward_pre_hook(
            lambda _, args, kwargs: found.update(timestep=kwargs["timestep"]), with_kwargs=True
        ),
        *(
            module.register_forward_hook(lambda _, args, result: found["masks"].append(result == 0))
            for module in head.modules()
            if isinstance(module, nn.Dropout)
        ),
    ]
    torch.manual_seed(3)
    policy.forward(batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("options", [{}, {"all_fp32": True}, {"all_bf16": True, "dropout": "off"}])
def test_the_truth_has_the_draws_and_inputs_of_its_original(subject, options):
    batch = subject.batch(8)
    with subject.switched(options):
        native, exact = seen(subject.policy, batch), seen(subject.in_float32(subject.policy), batch)
    for name in ("pixels", "times", "timestep"):
        assert torch.equal(native[name], exact[name]), name
    # (1 - t) noise + t action: three roundings in bf16, none in fp32
    assert torch.allclose(native["noisy"], exact["noisy"], rtol=0, atol=2**-6)
    assert len(native["masks"]) == len(exact["masks"]) == 4 + 4 * 4
    for mask, other in zip(native["masks"], exact["masks"], strict=True):
        assert torch.equal(mask, other)
        assert bool(mask.any()) is (options.get("dropout") != "off")


@pytest.mark.parametrize("options", [{}, {"all_fp32": True}, {"all_bf16": True, "dropout": "off"}])
def test_the_truth_is_near_native(subject, options):
    batch = subject.batch(2)
    with subject.switched(options):
        native = subject.loss_and_gradients(batch)
        exact = synthetic_gate.truth(subject, batch)
    assert {gradient.dtype for gradient in exact[1].values()} == {torch.float32}
    assert subject.policy.config.use_bf16
    assert float(native[0]) == pytest.approx(float(exact[0]), rel=2e-3)
    # a unit of the decoder's ReLU that bf16's rounding switches is worth some per cent at this size
    assert distance(exact[1], native[1]) < 0.3
    assert synthetic_gate.judge(exact, native, native)["green"]


def test_a_policy_that_computes_in_fp32_is_its_own_truth(recipe):
    high = synthetic_groot.Subject(replace(recipe, dtype="float32"), CPU)
    high.policy.config.use_bf16 = False
    batch = high.batch(2)
    native, exact = high.loss_and_gradients(batch), synthetic_gate.truth(high, batch)
    assert torch.equal(native[0], exact[0])
    assert distance(exact[1], native[1]) < 1e-5


def test_other_masks_or_noise_than_natives_are_red(subject):
    batch = subject.batch(2)
    native, exact = subject.loss_and_gradients(batch), synthetic_gate.truth(subject, batch)
    assert not synthetic_gate.judge(exact, native, subject.loss_and_gradients(batch, seed=4))["green"]
    with subject.switched({"dropout": "off"}):
        off = subject.loss_and_gradients(batch)
    assert not synthetic_gate.judge(exact, native, off)["green"]


@pytest.mark.skipif("groot" not in adapters(), reason="there is no adapter of that name")
def test_the_command_gates_and_measures_every_arm(recipe_file, capsys):
    out = recipe_file.parent / "out"
    assert cli.main(["ab", str(recipe_file), "--synthetic", "--repeats", "1", "--out", str(out)]) == 0
    found = json.loads((out / "results.json").read_text())
    assert "gate patched_padded: green" in capsys.readouterr().out
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
        "native_documented": (80, 320),
        "native_bf16": (80, 320),
        "native_compiled": (80, 320),
    }
    assert {arm.name: arm.batches for arm in shipped.arms if arm.patched} == {
        "patched": (80, 320),
        "patched_compiled": (80, 320, 640),
        "patched_compiled_documented": (320,),
        "patched_compiled_padded": (320,),
    }
