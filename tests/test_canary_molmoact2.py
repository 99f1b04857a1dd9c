"""The names of LeRobot's MolmoAct2 that the adapter relies on.

A red line here after an upgrade means: look at what the host does now; do not simply update the assertion.
"""

import inspect

import pytest
import torch
from lerobot.policies.molmoact2 import modeling_molmoact2 as lerobot_side
from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as hf_side
from torch import nn

from somaspeed_patch.testing_molmoact2 import make_batch, make_policy


@pytest.fixture(scope="module")
def policy():
    return make_policy(action_mode="continuous", train_action_expert_only=True, cameras=2)


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_patched_functions_take_what_their_hooks_take():
    policy, model = lerobot_side.MolmoAct2Policy, hf_side.MolmoAct2Model
    images = ["input_ids", "pixel_values", "image_token_pooling", "image_grids", "image_num_crops"]
    expected = {
        policy.forward: ["batch", "reduction"],
        policy._compute_flow_matching_loss_joint_per_layer: [
            "batch", "model_inputs", "timesteps", "noise", "reduction",
        ],
        hf_side.MolmoAct2Embedding.forward: ["x"],
        model.build_batched_images: images,
        hf_side.ViTMultiHeadDotProductAttention.forward: ["inputs_q", "inputs_kv", "attn_mask"],
    }  # fmt: skip
    for function, names in expected.items():
        assert parameters(function) == ["self", *names], function.__qualname__
    for name in ("batch", "model_inputs", "timesteps", "noise", "reduction"):
        found = inspect.signature(policy._compute_flow_matching_loss_joint_per_layer).parameters[name]
        assert found.kind is inspect.Parameter.KEYWORD_ONLY


def test_what_is_called_of_the_policy_has_these_parameters(policy):
    backbone, expert = policy._backbone(), policy._action_expert()
    flow = ["actions", "action_dim_is_pad", "timesteps", "noise"]
    bias = ["inputs_embeds", "attention_mask", "token_type_ids", "past_key_values"]
    expected = {
        policy._prepare_flow_matching_tensors: flow,
        policy._prepare_joint_training_backbone_inputs: ["model_inputs"],
        policy._encoder_attention_mask_for_action_expert: ["input_ids", "attention_mask"],
        policy._action_time_conditioning: ["action_expert", "timesteps"],
        backbone._build_native_attention_bias: bias,
        backbone._cache_to_sequence: ["cache"],
        expert._build_cross_attention_mask: ["encoder_attention_mask", "batch_size", "dtype"],
        expert._build_self_attention_mask: ["action_attention_mask", "seq_len", "device", "dtype"],
        expert.final_layer.forward: ["x", "conditioning", "modulation"],
        lerobot_side._expand_mask: ["mask", "num_flow_timesteps"],
        lerobot_side._apply_action_chunk_padding_mask: ["loss", "action_horizon_is_pad"],
        lerobot_side._apply_action_dim_padding_mask: ["loss", "action_dim_is_pad"],
        expert.blocks[0].self_attn.rope.build_cache: ["seq_len", "device", "dtype"],
        expert.blocks[0].self_attn.forward: ["x", "attn_mask", "is_causal", "rope_cache"],
    }
    for function, names in expected.items():
        assert parameters(function) == names, function.__qualname__


def children(module):
    return set(dict(module.named_children()))


def test_the_language_models_layers_have_the_parts_that_are_called_one_by_one(policy):
    transformer = policy._backbone().transformer
    assert len(transformer.blocks) == transformer.config.num_hidden_layers
    assert {"wte", "emb_drop", "blocks", "ln_f", "rotary_emb"} == children(transformer)
    for block in transformer.blocks:
        assert children(block) == {"self_attn", "attn_norm", "dropout", "mlp", "ff_norm"}
        attention = block.self_attn
        assert children(attention) == {"att_proj", "k_norm", "q_norm", "attn_out"}
        assert type(attention.att_proj) is nn.Linear
        assert attention.scaling == attention.head_dim**-0.5
        assert sum(attention.fused_dims) == attention.att_proj.out_features
        assert (attention.qk_norm_type, attention.attention_dropout) == ("qwen3", 0.0)
    assert (transformer.config.norm_after, transformer.config.rope_scaling_layers) == (False, None)


def test_the_vision_side_has_the_parts_that_are_called_one_by_one(policy):
    vision = policy._backbone().vision_backbone
    assert children(vision) == {"image_vit", "image_pooling_2d", "image_projector", "image_feature_dropout"}
    assert children(vision.image_vit) == {"patch_embedding", "transformer"}
    assert parameters(vision.image_vit.add_pos_emb) == ["x", "patch_num"]
    assert vision.num_prefix_tokens == 0  # no class token is cut off
    for block in vision.image_vit.transformer.resblocks:
        assert children(block) == {"attention", "feed_forward", "attention_norm", "ffn_norm"}
        assert type(block.attention_norm) is nn.LayerNorm
        assert {"w1", "w2", "act"} == children(block.feed_forward)
    for attention in (vision.image_pooling_2d, vision.image_vit.transformer.resblocks[0].attention):
        assert children(attention) == {"wq", "wk", "wv", "wo", "residual_dropout"}
        assert (attention.attn_implementation, attention.float32_attention) == ("eager", True)
        assert attention.attention_dropout == 0.0


def test_the_experts_blocks_have_the_parts_that_are_called_one_by_one(policy):
    expert = policy._action_expert()
    top = {"time_embed", "action_embed", "context_k_proj", "context_v_proj", "context_norm", "blocks"}
    assert children(expert) == {*top, "final_layer"}
    block = expert.blocks[0]
    norms = {"self_norm", "cross_norm", "ff_norm"}
    assert children(block) == {*norms, "self_attn", "cross_attn", "mlp", "modulation"}
    assert children(block.cross_attn) == {"q_norm", "k_norm", "q_proj", "out_proj", "out_drop"}
    assert block.modulation(torch.zeros(2, 32)).shape == (2, 9 * 32)
    assert block.cross_attn.num_heads == expert.config.num_heads
    assert expert.config.attn_dropout == 0.0


def test_a_batch_brings_the_tensors_that_are_planned_with(policy):
    batch = make_batch(policy)
    images = {"pixel_values", "image_token_pooling", "image_grids", "image_num_crops"}
    assert {"input_ids", "attention_mask", "token_type_ids", *images} <= lerobot_side._MODEL_INPUT_KEYS
    assert {"action", "action_dim_is_pad", "action_horizon_is_pad", *images} <= set(batch)
    whole = [batch[key].dtype for key in ("input_ids", "image_token_pooling", "image_grids")]
    assert set(whole) == {torch.int64}


def test_frozen_training_leaves_the_backbone_in_evaluation_mode(policy):
    policy.train()
    backbone = policy._backbone()
    assert not backbone.transformer.training and not backbone.vision_backbone.training
    assert policy._action_expert().training
    assert not any(p.requires_grad for p in backbone.transformer.parameters())


def test_the_hook_that_checkpointing_puts_on_the_embedding_is_transformers_own():
    policy = make_policy(action_mode="continuous", train_action_expert_only=True, gradient_checkpointing=True)
    hooks = policy._backbone().transformer.wte._forward_hooks.values()
    assert ["enable_input_require_grads" in hook.__qualname__ for hook in hooks] == [True]
