"""MolmoAct2 with a frozen backbone against LeRobot's own: same weights, batches and seeds."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

import somaspeed_patch
from somaspeed_patch import sites, testing_molmoact2
from somaspeed_patch.molmoact2 import expert
from somaspeed_patch.testing_molmoact2 import make_policy
from somaspeed_patch.testing_parity import assert_same_step, lively, remembering, step

FROZEN = dict(action_mode="continuous", train_action_expert_only=True)
TASKS = dict(tasks=["pick up the cube", "put the very large red bowl on the plate", "go", "open the drawer"])
CROPS = dict(crop_mode="overlap-and-resize-c2")
SMALL, LARGE = (56, 56), (120, 90)  # one crop; that and tiles of it

CASES = {
    "two cameras": (dict(cameras=2), {}),
    "prompts padded on the left": (dict(cameras=2), TASKS),
    "prompts padded on the right": ({}, dict(TASKS, padding_side="right")),
    "actions after the end of the episode": ({}, dict(TASKS, valid_actions=[4, 2, 1, 3])),
    "one timestep": (dict(num_flow_timesteps=1), TASKS),
    "eight timesteps": (dict(num_flow_timesteps=8), dict(TASKS, valid_actions=[4, 2, 1, 3])),
    "sdpa": (dict(attn_implementation="sdpa", cameras=2), TASKS),
    "checkpointing": (dict(gradient_checkpointing=True, num_flow_timesteps=8), TASKS),
    "crops": (dict(CROPS, cameras=2), dict(TASKS, image_sizes=[SMALL, LARGE])),
    "batch 1": (dict(cameras=2), dict(batch_size=1)),
    "chunk 1": (dict(chunk_size=1, n_action_steps=1), {}),
    "padded action dimensions learnt too": (dict(mask_action_dim_padding=False), {}),
}
make_batch = remembering(testing_molmoact2.make_batch)


@cache
def policy_of(**config):
    """One policy for all tests that leave it as it was."""
    return lively(make_policy(**FROZEN, **config))


@pytest.fixture(autouse=True)
def fresh_counts():
    sites.clear()


def site(name):
    return sites.site(f"molmoact2/{name}")


def assert_served(policy, batch, **arguments):
    """The frozen way serves the step, all of it, and nothing differs from native's."""
    native = step(policy, batch, **arguments)
    with somaspeed_patch.patched("molmoact2"):
        ours = step(policy, batch, **arguments)
        assert (site("frozen_prefix").calls, site("frozen_prefix").native_calls) == (1, 0)
        assert not any(one.fallbacks for one in sites.every())
    assert_same_step(native, ours)
    return ours


@pytest.mark.parametrize("case", CASES)
def test_one_step_equals_natives(case):
    config, shape = CASES[case]
    policy = policy_of(**config)
    assert_served(policy, make_batch(policy, **shape))


def test_per_sample_losses():
    policy = policy_of(cameras=2)
    batch = make_batch(policy, **TASKS, valid_actions=[4, 2, 1, 3])
    assert assert_served(policy, batch, reduction="none").loss.shape == (4,)


@pytest.mark.parametrize("key", ["pixel_values", "image_token_pooling", "attention_mask", "token_type_ids"])
def test_every_input_reaches_the_gradients(key):
    """Otherwise the tests above would say nothing of it."""
    policy = policy_of(cameras=2)
    batch = make_batch(policy, **TASKS)
    with somaspeed_patch.patched("molmoact2"):
        whole = step(policy, batch)
        other = step(policy, {**batch, key: batch[key].flip(0)})
    name = "model.model.action_expert.context_v_proj.weight"
    # 500 times what the tests above let pass
    assert (whole.gradients[name] - other.gradients[name]).norm() > 1e-3 * whole.gradients[name].norm()


def joined(policy, batches):
    """One batch of several, padded on the left as the host's tokenizer does."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    whole = dict(batches[0])
    for key in ("input_ids", "attention_mask", "token_type_ids"):
        rows = [nn.functional.pad(b[key], (longest - b[key].shape[1], 0)) for b in batches]
        whole[key] = torch.cat(rows)
    images = ["pixel_values", "image_token_pooling", "image_grids", "image_num_crops"]
    for key in [*images, "action", "action_dim_is_pad", "action_horizon_is_pad"]:
        whole[key] = torch.cat([batch[key] for batch in batches])
    return whole


def test_samples_with_different_numbers_of_crops():
    policy = policy_of(**CROPS, cameras=2)
    sizes = [[SMALL, SMALL], [LARGE, SMALL], [SMALL, LARGE], [LARGE, LARGE]]
    made = [make_batch(policy, batch_size=1, image_sizes=s, seed=i) for i, s in enumerate(sizes)]
    batch = joined(policy, made)
    assert len(set(batch["image_num_crops"].tolist())) > 1
    assert_served(policy, batch)


def without_images(policy, batch):
    for key in ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops"):
        del batch[key]


def without_masks(policy, batch):
    del batch["attention_mask"], batch["token_type_ids"]


def without_mask_of_actions(policy, batch):
    del batch["action_horizon_is_pad"]


def with_positions(policy, batch):
    length = batch["input_ids"].shape[1]
    batch["position_ids"] = torch.arange(length) + torch.tensor([[3], [0], [5], [1]])


def with_an_empty_id(policy, batch):
    batch["input_ids"][0, -3] = -1


def with_a_token_that_pools_nothing(policy, batch):
    """The host drops it, and so the prompt has one image token fewer."""
    batch["image_token_pooling"][1] = -1
    is_image = batch["input_ids"][0] == policy._backbone().config.image_patch_id
    batch["input_ids"][0, is_image.nonzero()[1]] = int(batch["input_ids"][0, -1])


def with_tokens_that_pool_fewer_patches(policy, batch):
    batch["image_token_pooling"][::3, 1:3] = -1


def with_pixels_between_bytes(policy, batch):
    batch["pixel_values"] = batch["pixel_values"] * 0.97


def with_a_sample_of_padding(policy, batch):
    batch["attention_mask"][2] = 0


INPUTS = [
    without_images,
    without_masks,
    without_mask_of_actions,
    with_positions,
    with_an_empty_id,
    with_a_token_that_pools_nothing,
    with_tokens_that_pool_fewer_patches,
    with_pixels_between_bytes,
    with_a_sample_of_padding,
]


@pytest.mark.parametrize("change", INPUTS, ids=lambda change: change.__name__)
def test_unusual_batches(change):
    policy = policy_of(cameras=2)
    batch = make_batch(policy, **TASKS)
    change(policy, batch)
    assert_served(policy, batch)


def test_tokens_that_pool_fewer_patches_under_sdpa():
    """Only there the host's pooling heeds its mask."""
    policy = policy_of(attn_implementation="sdpa", cameras=2)
    batch = make_batch(policy, **TASKS)
    with_tokens_that_pool_fewer_patches(policy, batch)
    assert_served(policy, batch)


def attentions(policy):
    return [block.self_attn for block in policy._backbone().transformer.blocks]


def two_rotary_embeddings(policy):
    transformer = policy._backbone().transformer
    other = copy.deepcopy(transformer.config)
    other.rope_theta = 100.0
    scaling = type(transformer.rotary_emb)(other, rope_type="default")
    transformer.config.rope_scaling_layers = [1]
    transformer.rotary_embs = nn.ModuleDict({"default": transformer.rotary_emb, "scaling": scaling})


def norms_over_all_heads(policy):
    for attention in attentions(policy):
        attention.qk_norm_type = "olmo"
        for name, width in (("q_norm", attention.fused_dims[0]), ("k_norm", attention.fused_dims[1])):
            setattr(attention, name, type(attention.q_norm)(width))
            getattr(attention, name).requires_grad_(False)


def no_norms(policy):
    for attention in attentions(policy):
        attention.q_norm = attention.k_norm = None


def biases_of_q_k_and_v(policy):
    for attention in attentions(policy):
        attention.att_proj.bias = nn.Parameter(torch.randn(sum(attention.fused_dims)), requires_grad=False)


def a_wrapped_projection(policy):
    class Squashed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).tanh()

    for attention in attentions(policy):
        attention.att_proj = Squashed(attention.att_proj)


def pooling_with_fewer_heads_of_k_and_v(policy):
    pooling = policy._backbone().vision_backbone.image_pooling_2d
    pooling.num_key_value_heads, pooling.num_key_value_groups = 1, pooling.num_heads
    for name in ("wk", "wv"):
        smaller = nn.Linear(pooling.wk.in_features, pooling.head_dim).requires_grad_(False)
        setattr(pooling, name, smaller)


def pooling_without_its_mask(policy):
    adapter = policy._backbone().vision_backbone.adapter_config
    adapter.pooling_attention_mask = not adapter.pooling_attention_mask


def causal_actions(policy):
    policy._action_expert().config.causal_attn = True


def an_expert_without_norms_and_rotation(policy):
    expert = policy._action_expert()
    expert.context_norm = nn.Identity()
    for block in expert.blocks:
        block.self_attn.rope = None
        for attention in (block.self_attn, block.cross_attn):
            attention.q_norm = attention.k_norm = None


ARCHITECTURES = [
    two_rotary_embeddings,
    norms_over_all_heads,
    no_norms,
    biases_of_q_k_and_v,
    a_wrapped_projection,
    pooling_with_fewer_heads_of_k_and_v,
    pooling_without_its_mask,
    causal_actions,
    an_expert_without_norms_and_rotation,
]


@pytest.mark.parametrize("change", ARCHITECTURES, ids=lambda change: change.__name__)
def test_other_architectures_of_the_host(change):
    policy = copy.deepcopy(policy_of(cameras=2))
    change(policy)
    batch = make_batch(policy, **TASKS, valid_actions=[4, 2, 1, 3])
    assert_served(policy, batch)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_recomputed_only_where_the_host_says_so(monkeypatch, checkpointing):
    policy = policy_of(gradient_checkpointing=checkpointing)
    original, seen = expert.expert_layer, []

    def counting(*args):
        seen.append(1)
        return original(*args)

    monkeypatch.setattr(expert, "expert_layer", counting)
    with somaspeed_patch.patched("molmoact2"):
        step(policy, make_batch(policy))
    assert len(seen) == len(policy._action_expert().blocks) * (2 if checkpointing else 1)


def evaluated(policy, batch, reduction):
    torch.manual_seed(0)
    with torch.no_grad():
        return policy.forward(batch, reduction=reduction)[0]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_evaluation_without_gradient(reduction):
    policy = copy.deepcopy(policy_of(cameras=2)).eval()
    batch = make_batch(policy, **TASKS)
    native = evaluated(policy, batch, reduction)
    with somaspeed_patch.patched("molmoact2"):
        ours = evaluated(policy, batch, reduction)
    assert site("frozen_prefix").calls == 1
    assert torch.allclose(native, ours, rtol=1e-6, atol=0)
    assert not ours.requires_grad


def test_the_hidden_states_come_back_where_somebody_reads_them():
    """Frozen by hand, with the loss on tokens beside the flow loss."""
    policy = lively(make_policy(action_mode="both"))
    backbone = policy._backbone()
    for module in (backbone.transformer, backbone.vision_backbone):
        module.requires_grad_(False)
    ours = assert_served(policy, make_batch(policy, **TASKS, still=[1]))
    assert ours.gradients["model.lm_head.weight"] is not None
