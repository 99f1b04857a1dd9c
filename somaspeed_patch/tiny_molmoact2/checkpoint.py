"""Write a MolmoAct2 checkpoint with random weights, for `--policy.checkpoint_path` of LeRobot's policy.

Model and configuration are the classes in lerobot.policies.molmoact2, so the files are those of a released
checkpoint: config.json, model.safetensors, the tokenizer's, processor_config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from somaspeed_patch.tiny_molmoact2 import tokenizer
from somaspeed_patch.tiny_molmoact2.sizes import Size

PATCH = 14  # pixels of a patch's side
HORIZON = 30  # actions the checkpoint claims to predict; LeRobot sets its chunk_size instead
_TABLES = ("wte.embedding", "wte.new_embedding")  # whose rows are inputs themselves
CROP_MODES = ("resize", "overlap-and-resize-c2")  # one crop an image; or that one and overlapping tiles


def write(
    folder: Path,
    size: Size,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn_implementation: str | None = None,
    layers: int | None = None,
    crop_mode: str = "resize",
) -> Path:
    """Write a checkpoint to `folder`, which is made if need be.

    Args:
        folder: where to.
        size: widths and depths.
        dtype: of the stored weights; LeRobot's model_dtype decides what they are loaded as.
        seed: for every weight; the caller's RNG state is left as it was.
        attn_implementation: eager or sdpa, for the language model, vision transformer and pooling; None
            leaves the choice to LeRobot, which takes eager.
        layers: decoder layers and blocks of the expert, instead of the size's.
        crop_mode: one of CROP_MODES; with the second one larger images have more crops.
    Returns: the folder.
    Raises: ValueError: no such crop_mode.
    """
    from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as host

    if crop_mode not in CROP_MODES:
        raise ValueError(f"write: crop_mode must be one of {CROP_MODES}, but is {crop_mode!r}")
    config = _config(size, size.depth if layers is None else layers, attn_implementation)
    with torch.random.fork_rng(), _device_for(size):
        torch.manual_seed(seed)
        model = host.MolmoAct2ForConditionalGeneration(config)
        _draw_weights(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    tokenizer.write(folder)
    (folder / "processor_config.json").write_text(json.dumps(_processor(size, crop_mode), indent=2) + "\n")
    return folder


def _device_for(size: Size) -> torch.device:
    """Where the weights are drawn: a large model on a GPU, if there is one, for a CPU takes minutes."""
    large = size.llm_width * size.depth > 10_000
    return torch.device("cuda" if large and torch.cuda.is_available() else "cpu")


def _draw_weights(model: nn.Module) -> None:
    """New weights under which activations stay near 1, and none that hides something.

    The host's standard deviation of 0.02 leaves a narrow model mute: at width 32 the image features would be
    3e-7 beside embeddings of 2e-2. Its zeros (the expert's modulation and last layer) would keep gradients
    from the rest, and a norm whose weight is 1 would not show that it was left out.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.02)
            else:
                scale = 1.0 if name.endswith(_TABLES) else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale)


def sections(size: Size, layers: int) -> dict[str, dict[str, Any]]:
    """Arguments of the host's four sub-configurations, by the name that MolmoAct2Config gives them."""
    expert = {
        "hidden_size": size.expert_width,
        "num_layers": layers,
        "num_heads": size.expert_heads,
        "mlp_ratio": size.expert_mlp_ratio,
        "ffn_multiple_of": 16,
        "timestep_embed_dim": size.time_width or size.expert_width,
    }
    return {
        "vit_config": _vision(size),
        "adapter_config": _pooling(size),
        "text_config": _language(size, layers),
        "action_expert_config": expert,
    }


def _config(size: Size, layers: int, attn_implementation: str | None) -> Any:
    """The checkpoint's configuration."""
    from lerobot.policies.molmoact2.molmoact2_hf_model import configuration_molmoact2 as host

    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    found = sections(size, layers)
    return host.MolmoAct2Config(
        vit_config=host.MolmoAct2VitConfig(**found["vit_config"], **attention),
        adapter_config=host.MolmoAct2AdapterConfig(**found["adapter_config"], **attention),
        text_config=host.MolmoAct2TextConfig(**found["text_config"], **attention),
        action_expert_config=host.MolmoAct2ActionExpertConfig(**found["action_expert_config"]),
        max_action_dim=32,  # LeRobot refuses any other
        max_action_horizon=HORIZON,
        action_mode="both",
        **_token_ids(),
    )


def _vision(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.vision_width,
        "intermediate_size": size.vision_mlp,
        "num_hidden_layers": size.vision_depth,
        "num_attention_heads": size.vision_heads,
        "num_key_value_heads": size.vision_heads,
        "head_dim": size.vision_width // size.vision_heads,
        "image_default_input_size": (size.image_side, size.image_side),
        "image_patch_size": PATCH,
        "image_num_pos": (size.image_side // PATCH) ** 2,
    }


def _pooling(size: Size) -> dict[str, Any]:
    return {
        "vit_layers": size.pooled_layers,
        "hidden_size": size.vision_width,
        "num_attention_heads": size.vision_heads,
        "num_key_value_heads": size.vision_heads,
        "head_dim": size.vision_width // size.vision_heads,
        "intermediate_size": size.projector_mlp or size.vision_mlp,
        "text_hidden_size": size.llm_width,
    }


def _language(size: Size, layers: int) -> dict[str, Any]:
    """As the released checkpoints: Qwen3's norms of queries and keys, no biases, head and embedding apart."""
    return {
        "hidden_size": size.llm_width,
        "intermediate_size": size.llm_mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": size.llm_heads,
        "num_key_value_heads": size.llm_kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocabulary or len(tokenizer.ids()) - len(tokenizer.IMAGE),
        "additional_vocab_size": size.added_vocabulary or len(tokenizer.IMAGE),
        "max_position_embeddings": 1024,
        "use_qk_norm": True,
        "qk_norm_type": "qwen3",
        "qkv_bias": False,
        "tie_word_embeddings": False,
    }


def _token_ids() -> dict[str, int]:
    known = tokenizer.ids()
    named = {
        "image_start_token_id": "<im_start>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "image_end_token_id": "<im_end>",
        "image_low_res_id": "<im_low>",
        "image_patch_id": "<im_patch>",
        "image_col_id": "<im_col>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
        "action_output_token_id": "<action_output>",
        "action_start_token_id": "<action_start>",
        "action_end_token_id": "<action_end>",
        "action_token_start_id": "<action_0>",
        "state_start_token_id": "<state_start>",
        "state_end_token_id": "<state_end>",
        "state_token_start_id": "<state_0>",
        "eos_token_id": tokenizer.END,
    }
    numbers = {"num_action_tokens": tokenizer.ACTIONS, "num_state_tokens": tokenizer.STATES}
    return {**{key: known[token] for key, token in named.items()}, **numbers}


def _processor(size: Size, crop_mode: str) -> dict[str, Any]:
    """What the image processor is built with."""
    side = size.image_side
    images = {
        "size": {"height": side, "width": side},
        "crop_mode": crop_mode,
        "overlap_margins": [1, 1],
        "patch_size": PATCH,
        "pooling_size": [2, 2],
    }
    return {
        "image_processor": images,
        "video_processor": {},
        "image_use_col_tokens": True,
        "use_single_crop_col_tokens": False,
        "use_single_crop_start_token": True,
    }
