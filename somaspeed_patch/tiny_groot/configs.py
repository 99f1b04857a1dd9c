"""LeRobot's configurations of GR00T N1.7 and its backbone, in another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from somaspeed_patch.tiny.replaced import Replaced
from somaspeed_patch.tiny_groot import tokenizer
from somaspeed_patch.tiny_groot.sizes import Size

BACKBONE = "_cosmos_reason2_qwen3_vl_config"  # of groot_n1_7: where LeRobot has the backbone's configuration


def model(size: Size, **changed: Any) -> Any:
    """A GR00TN17Config.

    Args:
        size: widths and depths.
        changed: fields of GR00TN17Config, over the size's.
    """
    from lerobot.policies.groot.groot_n1_7 import GR00TN17Config

    dims = {"max_state_dim": size.dims, "max_action_dim": size.dims, "max_num_embodiments": size.embodiments}
    fields = {
        **dims,
        "select_layer": size.selected,
        "backbone_embedding_dim": size.llm_width,
        "hidden_size": size.head_width,
        "input_embedding_dim": size.dit_heads * size.dit_head_dim,
        "state_dropout_prob": size.dropout,
        "diffusion_model_cfg": _dit(size),
        "vl_self_attention_cfg": _vl_self_attention(size),
    }
    return GR00TN17Config(**{**fields, **changed})


def _dit(size: Size) -> dict[str, Any]:
    return {
        "positional_embeddings": None,
        "num_layers": size.dit_depth,
        "num_attention_heads": size.dit_heads,
        "attention_head_dim": size.dit_head_dim,
        "norm_type": "ada_norm",
        "dropout": size.dropout,
        "final_dropout": True,
        "output_dim": size.head_width,
        "interleave_self_attention": True,
    }


def _vl_self_attention(size: Size) -> dict[str, Any]:
    return {
        "positional_embeddings": None,
        "num_layers": size.vl_depth,
        "num_attention_heads": size.vl_heads,
        "attention_head_dim": size.llm_width // size.vl_heads,
        "dropout": size.dropout,
        "final_dropout": True,
    }


@contextmanager
def backbone_of(size: Size) -> Iterator[None]:
    """Let GR00T be built with a backbone of that size, inside the block."""
    from lerobot.policies.groot import groot_n1_7

    replaced = Replaced()
    replaced.put(groot_n1_7, BACKBONE, partial(backbone, size))
    try:
        yield
    finally:
        replaced.restore()


def backbone(size: Size, function: Callable[[], Any]) -> Callable[[], Any]:
    """LeRobot's `function` that gives the backbone's Qwen3VLConfig, for another size and our tokens.

    It may be such a function already: every size gives the same fields.
    """

    def config() -> Any:
        found = function()
        values = found.to_dict()
        values["text_config"].update(_language(size))
        values["text_config"]["rope_parameters"]["mrope_section"] = list(size.rope_sections)
        values["vision_config"].update(_vision(size))
        return type(found).from_dict({**values, **_token_ids()})

    return config


def _language(size: Size) -> dict[str, Any]:
    known = tokenizer.ids()
    return {
        "hidden_size": size.llm_width,
        "intermediate_size": size.llm_mlp,
        "num_hidden_layers": size.llm_depth,
        "num_attention_heads": size.llm_heads,
        "num_key_value_heads": size.llm_kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocabulary or len(known),
        "bos_token_id": known[tokenizer.PADDING],  # as in Qwen's, which begins no text with it
        "eos_token_id": known[tokenizer.END],
    }


def _vision(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.vision_width,
        "intermediate_size": size.vision_mlp,
        "depth": size.vision_depth,
        "num_heads": size.vision_heads,
        "out_hidden_size": size.llm_width,
        "num_position_embeddings": size.positions,
        "deepstack_visual_indexes": list(size.deepstack),
    }


def _token_ids() -> dict[str, int]:
    known = tokenizer.ids()
    return {
        "image_token_id": known[tokenizer.IMAGE],
        "video_token_id": known[tokenizer.VIDEO],
        "vision_start_token_id": known[tokenizer.VISION_START],
        "vision_end_token_id": known[tokenizer.VISION_END],
    }
