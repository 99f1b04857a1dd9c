"""`somaspeed ab --synthetic` on MolmoAct2: the full size counted, a tiny one run, its batch, its switches."""

import math
from dataclasses import replace

import pytest
import torch

from somaspeed_patch import facts
from somaspeed_patch.ab import (
    synthetic,
    synthetic_gate,
    synthetic_molmoact2,
    synthetic_molmoact2_batch,
    synthetic_molmoact2_model,
    synthetic_recipe,
)
from somaspeed_patch.ab.yaml_reader import RecipeError
from somaspeed_patch.adapter import adapters
from somaspeed_patch.testing_molmoact2 import make_batch, make_config

RECIPE = """
description: tiny
host: lerobot-train
steps: 1
arms:
  native: { targets: none }
synthetic:
  model: molmoact2
  size: micro
  tokens: 20
  chunk: 4
  warmup: 1
  steps: 1
  repeats: 2
  arms:
    native: { batches: [2, 3] }
    native_documented: { policy: { attention: eager, gradient_checkpointing: true }, batches: [2] }
    native_autocast: { policy: { autocast: true }, batches: [2] }
    patched: { patched: true, batches: [2] }
    patched_left: { patched: true, padding: left, batches: [2] }
"""
CPU = torch.device("cpu")
NATIVE = "native,native_documented,native_autocast"


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
    return synthetic_molmoact2.Subject(recipe, CPU)


def run(recipe, names, repeats=1):
    return synthetic.run(recipe.chosen(names, repeats), device=CPU, say=lambda line: None)


def test_the_full_size_has_the_published_parameters(recipe):
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    full = replace(recipe, size="full", chunk=10)
    with synthetic_molmoact2_model.without_checkpoint("full", torch.device("meta")):
        policy = MolmoAct2Policy(synthetic_molmoact2_model.policy_config(full, "cpu"))
    parameters = list(policy.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert sum(p.numel() for p in parameters) == 5_442_196_208
    assert sum(p.numel() for p in parameters if p.requires_grad) == 577_564_448
    assert policy.model.config.max_action_horizon == 10
    positions = policy.model.model.vision_backbone.image_vit.positional_embedding
    grid, pooling = synthetic_molmoact2_batch._image(378)
    assert (grid.tolist(), pooling.shape, len(positions)) == ([[14, 14, 0, 0]], (196, 4), 729)
    assert int((pooling < 0).sum()) == 4 * 196 - 729


def test_the_hosts_names_come_back():
    from lerobot.policies.molmoact2 import modeling_molmoact2 as host

    before = dict(vars(host))
    with synthetic_molmoact2_model.without_checkpoint("micro", CPU):
        assert vars(host) != before
    assert vars(host) == before


def test_nothing_that_a_gradient_passes_starts_from_zero(subject):
    for name, parameter in subject.policy.named_parameters():
        assert parameter.ndim == 1 or parameter.any(), name
    _, gradients = subject.loss_and_gradients(subject.batch(2))
    trained = {name for name, p in subject.policy.named_parameters() if p.requires_grad}
    assert set(gradients) == trained
    assert all(gradient.any() for gradient in gradients.values())


def test_the_optimizer_has_the_hosts_groups_and_rates(subject):
    with subject.optimized():
        groups = subject._optimizer.param_groups
    assert [group["lr"] for group in groups] == [subject.policy.config.optimizer_action_expert_lr]
    assert groups[0]["betas"] == (0.9, 0.95)


def test_the_batch_is_what_lerobots_preprocessor_leaves(subject):
    config = make_config(cameras=2, action_mode="continuous", train_action_expert_only=True, chunk_size=4)
    theirs = make_batch(config, tasks=["pick it up", "put it there"])
    ours = subject.batch(2)
    assert set(ours) <= set(theirs)
    assert {k: (v.dtype, v.ndim) for k, v in ours.items()} == {
        key: (theirs[key].dtype, theirs[key].ndim) for key in ours
    }
    text = ours["input_ids"][~ours["token_type_ids"]]
    assert int(text.min()) >= synthetic_molmoact2_model.FIRST_TEXT
    assert ours["action_dim_is_pad"].sum(1).tolist() == [25, 25]
    assert not ours["action"][..., 7:].any()


def test_pixels_are_bytes_and_pooling_pads_the_odd_side(subject):
    batch = subject.batch(3)
    bytes_ = (batch["pixel_values"] + 1) * 127.5
    assert torch.equal(batch["pixel_values"], bytes_.round() / 127.5 - 1)
    assert (int(bytes_.min()), round(float(bytes_.max()))) == (0, 255)
    assert batch["pixel_values"].shape == (6, 25, 588)
    assert batch["image_grids"].tolist() == [[3, 3, 0, 0]] * 6
    pooling = batch["image_token_pooling"].view(6, 9, 4)
    assert pooling[5, 2].tolist() == [4, -1, 9, -1]
    assert sorted(pooling[0][pooling[0] >= 0].tolist()) == list(range(25))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_shortens_texts_and_keeps_images(subject, padding):
    full, padded = subject.batch(4), subject.batch(4, padding=padding)
    lengths = padded["attention_mask"].sum(1).tolist()
    assert lengths[0] == full["input_ids"].shape[1] == padded["input_ids"].shape[1]
    assert all(lengths[0] - 10 <= length < lengths[0] for length in lengths[1:])
    for row, length in enumerate(lengths):
        real = slice(-length, None) if padding == "left" else slice(length)
        assert torch.equal(padded["input_ids"][row, real], full["input_ids"][row, :length])
        assert torch.equal(padded["token_type_ids"][row, real], full["token_type_ids"][row, :length])
        assert padded["attention_mask"][row, real].all()
    assert not padded["input_ids"][padded["attention_mask"] == 0].any()
    assert not padded["token_type_ids"][padded["attention_mask"] == 0].any()
    assert torch.isfinite(subject.loss_and_gradients(padded)[0])


def test_a_prompt_too_short_for_its_images_is_refused(recipe, subject):
    lengths = torch.tensor([8, 4])
    config = subject.policy.model.config
    with pytest.raises(ValueError, match="4 tokens cannot hold the 7 before its last image"):
        synthetic_molmoact2_batch.make(
            config, lengths, cameras=2, chunk=4, padding="left", device=CPU, seed=1
        )


def test_small_integer_tensors_keep_their_twin_on_another_device(subject):
    config, lengths = subject.policy.model.config, torch.tensor([20, 20])
    meta = torch.device("meta")
    moved = facts.to(lengths, meta)
    assert moved.device == meta and facts.on_cpu(moved) is lengths
    batch = synthetic_molmoact2_batch.make(
        config, lengths, cameras=2, chunk=4, padding=None, device=CPU, seed=1
    )
    assert not any(hasattr(value, "somaspeed_facts") for value in batch.values())


def state(policy):
    """What the switches touch: every module's own attributes, hooks included, and the configurations'."""
    modules = {name: dict(vars(module)) for name, module in policy.named_modules()}
    for module in modules.values():
        module["_forward_hooks"] = dict(module["_forward_hooks"])
        for left in ("_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"):
            module.pop(left, None)
        if "gradient_checkpointing" in module:
            module["gradient_checkpointing"] = bool(module["gradient_checkpointing"])
    holders = synthetic_molmoact2._attention_holders(policy)
    chosen = [getattr(holder, attribute) for holder, attribute in holders]
    return modules, chosen, dict(vars(policy.config))


@pytest.mark.parametrize(
    ("options", "same", "close"),
    [
        ({"attention": "eager"}, False, 0.05),
        ({"autocast": True}, False, 0.1),
        ({"gradient_checkpointing": True}, True, 0.0),
    ],
)
def test_a_switch_changes_how_not_what_and_is_undone(subject, options, same, close):
    batch = subject.batch(2)
    loss, gradients = subject.loss_and_gradients(batch)
    before = state(subject.policy)
    with subject.switched(options):
        other_loss, others = subject.loss_and_gradients(batch)
    names = list(gradients)
    assert all(torch.equal(gradients[name], others[name]) for name in names) is same
    worst = max(float((gradients[n] - others[n]).norm() / gradients[n].norm()) for n in names)
    assert worst <= close
    assert float(other_loss) == pytest.approx(float(loss), rel=close or 1e-9)
    after = state(subject.policy)
    for name, attributes in before[0].items():
        added = {key for key in after[0][name].keys() - attributes.keys() if after[0][name][key]}
        assert not added, (name, added)
        assert {key: after[0][name][key] for key in attributes} == attributes, name
    assert after[1:] == before[1:]
    assert torch.equal(subject.loss_and_gradients(batch)[0], loss)


def test_checkpointing_runs_the_layers_again_in_the_backward(subject):
    blocks = subject.policy._backbone().transformer.blocks
    calls = []
    handle = blocks[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    try:
        subject.loss_and_gradients(subject.batch(2))
        once = len(calls)
        with subject.switched({"gradient_checkpointing": True}):
            subject.loss_and_gradients(subject.batch(2))
    finally:
        handle.remove()
    assert (once, len(calls)) == (1, 3)


def test_eager_reaches_the_language_model_and_every_vision_module(subject):
    backbone = subject.policy._backbone()
    vision = [m for m in backbone.vision_backbone.modules() if hasattr(m, "attn_implementation")]
    with subject.switched({"attention": "eager"}):
        assert {block.self_attn.config._attn_implementation for block in backbone.transformer.blocks} == {
            "eager"
        }
        assert {module.attn_implementation for module in vision} == {"eager"}
    assert {module.attn_implementation for module in vision} == {"sdpa"}
    assert backbone.transformer.config._attn_implementation == "sdpa"


def test_blocks_are_compiled_once_and_left_as_they_were(subject):
    blocks = synthetic_molmoact2._blocks(subject.policy)
    assert len(blocks) == 2 + 2 + 3
    with subject.switched({"compile_blocks": True}):
        first = [block._compiled_call_impl for block in blocks]
        assert None not in first
    assert not any("_compiled_call_impl" in vars(block) for block in blocks)
    with subject.switched({"compile_blocks": True}):
        assert [block._compiled_call_impl for block in blocks] == first


def test_the_truth_is_the_same_draws_in_fp32(recipe, subject):
    batch = subject.batch(2)
    native = subject.loss_and_gradients(batch)
    exact = synthetic_gate.truth(subject, batch)
    assert {gradient.dtype for gradient in exact[1].values()} == {torch.float32}
    assert subject.policy.config.model_dtype == "bfloat16"
    for name, gradient in exact[1].items():
        assert float((native[1][name].float() - gradient).norm() / gradient.norm()) < 0.05, name
    high = synthetic_molmoact2.Subject(replace(recipe, dtype="float32"), CPU)
    assert torch.equal(synthetic_gate.truth(high, batch)[0], high.loss_and_gradients(batch)[0])


def test_a_gradient_that_is_not_a_number_is_red(subject):
    native = subject.loss_and_gradients(subject.batch(2))
    exact = native[0].float(), {name: gradient.float() for name, gradient in native[1].items()}
    assert synthetic_gate.judge(exact, native, native)["green"]
    name = list(native[1])[-1]
    broken = native[0], {**native[1], name: native[1][name] * math.nan}
    verdict = synthetic_gate.judge(exact, native, broken)
    assert not verdict["green"]
    assert verdict["worst_parameter"]["name"] == name


def test_native_arms_have_figures(recipe):
    found = run(recipe, NATIVE, repeats=2)
    cells = {(cell["arm"], cell["batch"]): cell for cell in found["cells"]}
    assert set(cells) == {("native", 2), ("native", 3), ("native_documented", 2), ("native_autocast", 2)}
    assert all(len(cell["samples_per_second"]["repeats"]) == 2 for cell in cells.values())
    assert all(cell["sites"] == [] for cell in cells.values())
    assert found["model"]["language_tokens"] == 20


def test_an_arm_that_fails_is_a_line_and_the_others_run(recipe, monkeypatch):
    update = synthetic_molmoact2.Subject.update

    def refuse(self, batch):
        if len(batch["action"]) == 2:
            raise RuntimeError("mha_graph.execute(...).is_good() INTERNAL ASSERT FAILED")
        return update(self, batch)

    monkeypatch.setattr(synthetic_molmoact2.Subject, "update", refuse)
    found = run(recipe, "native")
    failures = [cell["failure"] for cell in found["cells"]]
    assert failures == ["RuntimeError: mha_graph.execute(...).is_good() INTERNAL ASSERT FAILED", ""]


@pytest.mark.skipif("molmoact2" not in adapters(), reason="there is no adapter of that name yet")
def test_patched_arms_pass_the_gate_and_run(recipe):
    found = run(recipe, "native,patched,patched_left")
    assert [verdict["green"] for verdict in found["gate"].values()] == [True, True], found["gate"]
    ran = {cell["arm"]: cell["sites"] for cell in found["cells"]}
    for arm in ("patched", "patched_left"):
        assert any(site["site"].startswith("molmoact2/") and site["calls"] for site in ran[arm]), ran[arm]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("attention: eager", "atention: eager", r"policy.atention: unknown key; did you mean attention\?"),
        ("attention: eager", "attention: flash", r"attention: expected one of sdpa, eager, but is 'flash'"),
        ("autocast: true", "autocast: bf16", r"policy.autocast: expected true or false, but is 'bf16'"),
        (
            "autocast: true",
            "compile_model: true",
            r"compile_model: unknown key; did you mean compile_blocks\?",
        ),
        ("padding: left", "padding: true", r"patched_left.padding: expected left or right, but is True"),
        ("chunk: 4", "slots: 4", r"synthetic.slots: unknown key"),
        ("size: micro", "size: mikro", r"synthetic.size: expected one of full, micro, small, but is 'mikro'"),
    ],
)
def test_a_wrong_section_is_named_with_file_line_and_key(recipe_file, old, new, text):
    other = recipe_file.with_name("changed.yaml")
    other.write_text(recipe_file.read_text().replace(old, new))
    with pytest.raises(RecipeError, match=text):
        synthetic_recipe.load(str(other))
