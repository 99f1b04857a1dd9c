"""The names of LeRobot that the adapters rely on.

A red line here after an upgrade means: look at what the host does now; do not simply update the assertion.
"""

import inspect

import pytest
import torch

from somaspeed_patch.testing_pi05 import make_policy


@pytest.fixture(scope="module")
def model():
    return make_policy(train_expert_only=True, cameras=2).model


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_training_forward_takes_what_the_split_forward_takes(model):
    tensors = ["images", "img_masks", "tokens", "masks"]
    assert parameters(model.forward) == [*tensors, "actions", "noise", "time"]
    assert parameters(model.embed_prefix) == tensors
    assert parameters(model.embed_suffix) == ["noisy_actions", "timestep"]
    assert parameters(model._apply_checkpoint)[0] == "func"


def test_the_modules_lie_where_the_split_forward_looks(model):
    joint = model.paligemma_with_expert
    trunk, expert = joint.paligemma.model, joint.gemma_expert.model
    assert len(trunk.language_model.layers) == len(expert.layers)
    for layer in (trunk.language_model.layers[0], expert.layers[0]):
        assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(dict(layer.self_attn.named_children()))
        assert layer.self_attn.scaling == layer.self_attn.head_dim**-0.5
        assert isinstance(layer.mlp.up_proj, torch.nn.Linear)
    assert trunk.vision_tower.vision_model.embeddings.num_patches == 4  # 28 x 28 in patches of 14
    assert len(trunk.vision_tower.vision_model.encoder.layers) == 2
    assert joint.paligemma.config.text_config.num_key_value_heads == 1
    assert not model.gradient_checkpointing_enabled


def test_norms_return_the_gate_and_the_mlp_has_no_cache(model):
    layer = model.paligemma_with_expert.gemma_expert.model.layers[0]
    hidden, cond = torch.randn(1, 3, 32), torch.randn(1, 32)
    normed, gate = layer.input_layernorm(hidden, cond=cond)
    assert normed.shape == hidden.shape
    assert gate.shape == (1, 1, 32)
    assert layer.mlp(normed).shape == hidden.shape


def test_the_trainer_forwards_clips_and_ends_by_the_names_that_are_patched():
    from lerobot.scripts import lerobot_train

    update, train = (inspect.getsource(f) for f in (lerobot_train.update_policy, lerobot_train.train))
    assert "policy.forward(batch" in update
    assert "accelerator.clip_grad_norm_(" in update
    assert "cfg.validate()" in train
    assert "accelerator.end_training()" in train


def test_the_tokenizer_step_tokenises_on_the_cpu_and_moves_afterwards():
    from lerobot.processor.tokenizer_processor import TokenizerProcessorStep

    source = inspect.getsource(TokenizerProcessorStep.observation)
    assert source.index("_tokenize_text") < source.index(".to(target_device)")
