"""Where MolmoAct2's step stays the host's: what is said of it, and that it is exactly the host's then."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import somaspeed_patch
from somaspeed_patch import sites, testing_molmoact2
from somaspeed_patch.molmoact2 import expert, hooks, inputs, policy_forward, refusals
from somaspeed_patch.testing_molmoact2 import make_policy
from somaspeed_patch.testing_parity import assert_same_step, lively, remembering, step

FROZEN = dict(action_mode="continuous", train_action_expert_only=True)
INSULATED = dict(action_mode="continuous", enable_knowledge_insulation=True)
BOTH = dict(action_mode="both")
WAYS = ("frozen_prefix", "shared_context")
TASKS = dict(tasks=["pick up the cube", "put the very large red bowl on the plate", "go", "open the drawer"])
make_batch = remembering(testing_molmoact2.make_batch)


@cache
def original(**config):
    return lively(make_policy(**config))


def policy_of(**config):
    """A policy to be changed."""
    return copy.deepcopy(original(**config))


@pytest.fixture(autouse=True)
def fresh_counts():
    sites.clear()


def site(name):
    return sites.site(f"molmoact2/{name}")


def compare(policy, batch, tolerance=2e-6):
    """One step each, native and patched; returns why a site left the second one to the host."""
    native = step(policy, batch)
    with somaspeed_patch.patched("molmoact2"):
        ours = step(policy, batch)
        reasons = {name: site(name).reason for name in (*WAYS, "fused_attention")}
    assert_same_step(native, ours, tolerance)
    return reasons


def attention_dropout(policy):
    policy._action_expert().config.attn_dropout = 0.3
    for block in policy._action_expert().blocks:
        block.self_attn.attn_dropout = block.cross_attn.attn_dropout = 0.3


class Sharded(nn.Parameter):
    """As FSDP2's are: not a plain parameter."""


def sharded_expert(policy):
    layer = policy._action_expert().action_embed
    layer.weight = Sharded(layer.weight.data)


def watched_expert(policy):
    policy._action_expert().blocks[0].register_forward_hook(lambda *call: None)


def watched_cross_attention(policy):
    policy._action_expert().blocks[1].cross_attn.register_full_backward_hook(lambda *call: None)


NEITHER = {
    attention_dropout: "attention dropout is active in the expert",
    sharded_expert: "the expert's parameters are Shardeds, not plain ones",
    watched_expert: "hooks on blocks of the action expert",
    watched_cross_attention: "hooks on blocks of the action expert",
}


@pytest.mark.parametrize("change", NEITHER, ids=lambda change: change.__name__)
@pytest.mark.parametrize("config", [FROZEN, BOTH], ids=["frozen", "both"])
def test_what_neither_way_can_serve_is_the_hosts(config, change):
    policy = policy_of(**config)
    change(policy)
    reasons = compare(policy, make_batch(policy, **TASKS), tolerance=1e-5)
    assert site("frozen_prefix").calls == site("shared_context").calls == 0
    assert all(NEITHER[change] in reasons[way] for way in WAYS), reasons


def trained_tower(policy):
    policy._backbone().vision_backbone.image_projector.w1.weight.requires_grad_(True)


def trained_language_model(policy):
    policy._backbone().transformer.blocks[0].attn_norm.weight.requires_grad_(True)


def sharded_language_model(policy):
    layer = policy._backbone().transformer.blocks[0].mlp.ff_out
    layer.weight = Sharded(layer.weight.data, requires_grad=False)


def norms_after(policy):
    """Here only the flag: the host's blocks are what runs."""
    policy._backbone().transformer.config.norm_after = True


def dropout_in_the_language_model(policy):
    policy._backbone().transformer.blocks[0].dropout.train().p = 0.3


def dropout_of_image_features(policy):
    policy._backbone().vision_backbone.image_feature_dropout.train().p = 0.3


def attention_dropout_in_the_language_model(policy):
    policy._backbone().transformer.blocks[0].self_attn.train().attention_dropout = 0.3


def attention_dropout_in_the_tower(policy):
    blocks = policy._backbone().vision_backbone.image_vit.transformer.resblocks
    blocks[0].attention.train().attention_dropout = 0.3


NOT_FROZEN = {
    trained_tower: "the vision side is not frozen: image_projector.w1.weight trains",
    trained_language_model: "the language model is not frozen: blocks.0.attn_norm.weight trains",
    sharded_language_model: "blocks.0.mlp.ff_out.weight is a Sharded, not a plain parameter",
    norms_after: "the language model norms after its layers",
    dropout_in_the_language_model: "dropout is active in the frozen side",
    dropout_of_image_features: "dropout is active in the frozen side",
    attention_dropout_in_the_language_model: "attention dropout is active in the language model",
    attention_dropout_in_the_tower: "attention dropout is active in the vision side",
}


@pytest.mark.parametrize("change", NOT_FROZEN, ids=lambda change: change.__name__)
def test_what_is_not_quite_frozen_goes_the_other_way(change):
    policy = policy_of(**FROZEN)
    change(policy)
    reasons = compare(policy, make_batch(policy, **TASKS), tolerance=1e-5)
    assert NOT_FROZEN[change] in reasons["frozen_prefix"]
    assert (site("frozen_prefix").calls, site("shared_context").calls) == (0, 1)


@pytest.mark.parametrize("change", [attention_dropout_in_the_language_model, attention_dropout_in_the_tower])
def test_attention_dropout_of_an_insulated_backbone_is_drawn(change):
    """Insulation leaves the backbone in training mode though nothing of the loss reaches it."""
    policy = policy_of(**INSULATED)
    batch = make_batch(policy)
    before = step(policy, batch)
    change(policy)
    compare(policy, batch, tolerance=1e-5)
    assert site("frozen_prefix").calls == 0
    assert step(policy, batch).loss != before.loss


def test_attention_dropout_of_the_tower_is_the_hosts_where_it_trains():
    policy = policy_of(**BOTH)
    attention_dropout_in_the_tower(policy)
    reasons = compare(policy, make_batch(policy), tolerance=1e-5)
    assert "its random mask depends on the implementation" in reasons["fused_attention"]
    blocks = len(policy._backbone().vision_backbone.image_vit.transformer.resblocks)
    assert (site("fused_attention").native_calls, site("fused_attention").calls) == (1, blocks)


WATCHED = ["transformer.wte", "transformer.blocks.1.mlp", "vision_backbone.image_pooling_2d"]
WATCHED += ["vision_backbone.image_vit.transformer.resblocks.0.ffn_norm"]


@pytest.mark.parametrize("name", WATCHED)
def test_a_hook_on_the_frozen_side_still_fires(name):
    policy, seen = policy_of(**FROZEN), []
    policy._backbone().get_submodule(name).register_forward_hook(lambda *call: seen.append(1))
    reasons = compare(policy, make_batch(policy), tolerance=1e-5)
    assert len(seen) == 2  # once for each step
    assert "somebody has hooks on modules of the" in reasons["frozen_prefix"]


def test_unfreezing_between_steps_is_noticed():
    policy = policy_of(**FROZEN)
    batch = make_batch(policy)
    with somaspeed_patch.patched("molmoact2"):
        step(policy, batch)
        trained_tower(policy)
        ours = step(policy, batch)
        assert (site("frozen_prefix").calls, site("shared_context").calls) == (1, 1)
    assert_same_step(step(policy, batch), ours, tolerance=1e-5)


def embeddings_only(policy, batch):
    batch["inputs_embeds"] = policy._backbone().transformer.wte(batch["input_ids"]).detach()
    for key in ("input_ids", "pixel_values", "image_token_pooling", "image_grids", "image_num_crops"):
        del batch[key]


def a_video(policy, batch):
    """Every image becomes a video of one frame."""
    config = policy._backbone().config
    end = config.frame_end_token_id if config.use_frame_special_tokens else config.image_end_token_id
    batch["input_ids"][batch["input_ids"] == config.image_end_token_id] = end
    batch["pixel_values_videos"] = batch.pop("pixel_values")
    batch["video_token_pooling"] = batch.pop("image_token_pooling")
    grids = batch.pop("image_grids")[:, :2]
    batch["video_grids"] = torch.cat([torch.ones_like(grids[:, :1]), grids], 1)


def a_mask_of_the_hosts_own_kind(policy, batch):
    """[B, 1, S, S], which the host adds as it is. It does not fit the expert's rows, so nobody can train."""
    length = batch["input_ids"].shape[1]
    batch["attention_mask"] = torch.zeros(len(batch["input_ids"]), 1, length, length)


DECLINED = {embeddings_only: "there are no input_ids", a_video: "the batch has videos"}


@pytest.mark.parametrize("change", DECLINED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("config", [FROZEN, INSULATED], ids=["frozen", "insulated"])
def test_inputs_that_only_the_host_prepares(config, change):
    policy = policy_of(**config)
    batch = make_batch(policy)
    change(policy, batch)
    reasons = compare(policy, batch, tolerance=1e-5)
    assert [reasons[way] for way in WAYS] == [DECLINED[change]] * 2


def without(key, count=1):
    return lambda policy, batch: batch.update({key: batch[key][:-count]})


def an_end_token_less(policy, batch):
    batch["input_ids"][batch["input_ids"] == policy._backbone().config.image_end_token_id] = 5


def an_image_token_less(policy, batch):
    is_image = batch["input_ids"][0] == policy._backbone().config.image_patch_id
    batch["input_ids"][0, is_image.nonzero()[0]] = 5


def an_unknown_token(policy, batch):
    batch["input_ids"][0, -1] = 10**6


def ids_and_embeddings(policy, batch):
    batch["inputs_embeds"] = torch.zeros(*batch["input_ids"].shape, 64)


def fewer_actions(policy, batch):
    for key in ("action", "action_dim_is_pad", "action_horizon_is_pad"):
        batch[key] = batch[key][:-1]


BROKEN = {
    "crops": without("pixel_values"),
    "pooled tokens": without("image_token_pooling"),
    "grids": without("image_grids"),
    "counts of crops": without("image_num_crops"),
    "end tokens": an_end_token_less,
    "image tokens": an_image_token_less,
    "unknown token": an_unknown_token,
    "both ids and embeddings": ids_and_embeddings,
    "actions": fewer_actions,
    "masks": without("attention_mask", 2),
    "grids gone": lambda policy, batch: batch.pop("image_grids"),
    "mask of four dimensions": a_mask_of_the_hosts_own_kind,
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("config", [FROZEN, BOTH], ids=["frozen", "both"])
def test_a_batch_that_contradicts_itself_is_the_hosts_own_error(config, case):
    policy = policy_of(**config)
    batch = make_batch(policy)
    BROKEN[case](policy, batch)
    with pytest.raises(Exception) as native:  # noqa: B017
        step(policy, batch)
    with somaspeed_patch.patched("molmoact2"), pytest.raises(Exception) as ours:  # noqa: B017
        step(policy, batch)
    errors = [(found.type, str(found.value)) for found in (native, ours)]
    assert errors[0] == errors[1]


def test_an_unknown_reduction_is_the_hosts_own_error():
    policy = policy_of(**FROZEN)
    batch = make_batch(policy)
    given = dict(batch=batch, model_inputs=policy._model_inputs(batch), reduction="sum")
    with somaspeed_patch.patched("molmoact2"), pytest.raises(ValueError, match="Unsupported reduction='sum'"):
        policy._compute_flow_matching_loss_joint_per_layer(**given)


def broken(*args, **kwargs):
    raise RuntimeError("no such kernel")


FAILURES = {
    "expert": (FROZEN, expert, "expert_layer", "frozen_prefix"),
    "frozen side": (FROZEN, inputs, "embed", "frozen_prefix"),
    "joint": (BOTH, expert, "expert_layer", "shared_context"),
    "embedding": (BOTH, hooks, "embed", "split_embedding"),
    "images": (BOTH, hooks.layout, "batched", "batched_images"),
    "vision attention": (BOTH, hooks, "vision_attention", "fused_attention"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of_ours_is_redone_by_the_host_with_the_same_random_numbers(monkeypatch, case):
    config, module, name, where = FAILURES[case]
    policy = policy_of(**config)
    batch = make_batch(policy, **TASKS)
    native = step(policy, batch)
    with somaspeed_patch.patched("molmoact2"), monkeypatch.context() as context:
        context.setattr(module, name, broken)
        ours = [step(policy, batch), step(policy, batch)]
        assert (site(where).calls, site(where).fallbacks) == (0, 1 if case != "vision attention" else 4)
        assert site(where).last_fallback == "RuntimeError: no such kernel"
        assert "failed once and stays native: RuntimeError: no such kernel" in site(where).reason
    for again in ours:
        assert_same_step(native, again, tolerance=1e-5)


def test_after_unpatch_a_failed_site_is_tried_again(monkeypatch):
    policy = policy_of(**FROZEN)
    batch = make_batch(policy)
    with somaspeed_patch.patched("molmoact2"), monkeypatch.context() as context:
        context.setattr(expert, "expert_layer", broken)
        step(policy, batch)
    with somaspeed_patch.patched("molmoact2"):
        step(policy, batch)
    assert (site("frozen_prefix").calls, site("frozen_prefix").fallbacks) == (1, 1)


def test_after_a_failure_the_loss_is_natives_bit_for_bit(monkeypatch):
    policy = policy_of(**FROZEN)
    batch = make_batch(policy, **TASKS)
    off = dict(fused_attention=False, split_embedding=False, batched_images=False)
    monkeypatch.setattr(expert, "expert_layer", broken)
    with somaspeed_patch.patched("molmoact2", **off, shared_context=False):
        ours = step(policy, batch)
    assert site("frozen_prefix").fallbacks == 1
    assert_same_step(step(policy, batch), ours, tolerance=0)


def test_running_out_of_memory_is_not_tried_again_by_the_host(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    policy = policy_of(**FROZEN)
    monkeypatch.setattr(expert, "expert_layer", full)
    with somaspeed_patch.patched("molmoact2"), pytest.raises(torch.OutOfMemoryError):
        step(policy, make_batch(policy))
    assert site("frozen_prefix").fallbacks == 0


def test_a_later_hosts_policy_is_left_alone():
    """LeRobot main has the names and signatures, but another computation behind them."""
    later = SimpleNamespace(config=SimpleNamespace(action_mode="continuous", dtype="bfloat16"))
    with somaspeed_patch.patched("molmoact2"):
        said = [refusals.of(way, later, {}) for way in WAYS] + [policy_forward._refusal(later)]
    assert all("no model_dtype" in why for why in said)
    assert refusals.unknown_host(original(**FROZEN)) is None
