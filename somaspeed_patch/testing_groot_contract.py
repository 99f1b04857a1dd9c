"""The names of GR00T's hosts that the adapter relies on, as data, and what is checked of them.

    broken(LEROBOT + QWEN3_VL + TRAINER)      functions and their parameters
    missing(model, PARTS)                     modules and attributes inside a built model

Each check returns one line for each difference, which names the symbol and its source file: an empty list is
a pass. What the functions do is checked by `testing_groot_behaviour`. `tests/test_canary_groot.py` asks
LeRobot's port, `tests/real_gr00t/check.py` NVIDIA's package.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A function of a host, by where it is found."""

    module: str
    name: str
    """dotted, in the module"""
    takes: tuple[str, ...] = ()
    """its parameters without `self`"""
    exact: bool = True
    """True: hooked, so the parameters are these in this order. False: called with these by keyword."""
    later: tuple[str, ...] = ()
    """parameters behind them that a newer version adds"""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module inside a GR00T model, and what is read of it."""

    path: str
    kind: str
    """name of its class"""
    has: tuple[str, ...]


def _symbols(module: str, names: Mapping[str, tuple[str, ...]]) -> tuple[Symbol, ...]:
    return tuple(Symbol(module=module, name=name, takes=takes) for name, takes in names.items())


_DIT = {
    "AlternateVLDiT.forward": (
        "hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask",
        "return_all_hidden_states", "image_mask", "backbone_attention_mask",
    ),
    "SelfAttentionTransformer.forward": ("hidden_states", "return_all_hidden_states"),
    "BasicTransformerBlock.forward": (
        "hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "temb",
    ),
    "AdaLayerNorm.forward": ("x", "temb"),
    "TimestepEncoder.forward": ("timesteps",),
}  # fmt: skip
_BACKBONE = {"Qwen3Backbone.forward": ("vl_input",), "Qwen3Backbone.set_frozen_modules_to_eval_mode": ()}
_HEAD = {
    "forward": ("backbone_output", "action_input"),
    "process_backbone_output": ("backbone_output",),
    "sample_time": ("batch_size", "device", "dtype"),
}
_LINEAR = {"CategorySpecificLinear.forward": ("x", "cat_ids")}

_PORT = "lerobot.policies.groot.groot_n1_7"
LEROBOT = (
    *_symbols(_PORT, {**_BACKBONE, **_LINEAR}),
    *_symbols(_PORT, {f"GR00TN17ActionHead.{name}": takes for name, takes in _HEAD.items()}),
    *_symbols(
        _PORT,
        {
            "Qwen3Backbone._ensure_mm_token_type_ids": ("model_input",),
            "Qwen3Backbone._ensure_legacy_qwen3_position_ids": ("model_input",),
            "Qwen3Backbone._last_decoder_layer_output": ("model_input",),
            "GR00TN17.forward": ("inputs",),
        },
    ),
    *_symbols("lerobot.policies.groot.action_head.cross_attention_dit", _DIT),
    *_symbols(
        "lerobot.policies.groot.modeling_groot",
        {"GrootPolicy.forward": ("batch",), "GrootPolicy.train": ("mode",)},
    ),
    *_symbols("lerobot.processor.device_processor", {"DeviceProcessorStep._process_tensor": ("tensor",)}),
)

_NVIDIA = "gr00t.model.gr00t_n1d7.gr00t_n1d7"
NVIDIA = (
    *_symbols("gr00t.model.modules.qwen3_backbone", _BACKBONE),
    *_symbols("gr00t.model.modules.embodiment_conditioned_mlp", _LINEAR),
    *_symbols("gr00t.model.modules.dit", _DIT),
    *_symbols(_NVIDIA, {f"Gr00tN1d7ActionHead.{name}": takes for name, takes in _HEAD.items()}),
    *_symbols(
        _NVIDIA,
        {
            "Gr00tN1d7.forward": ("inputs",),
            "Gr00tN1d7.prepare_input": ("inputs",),
            "Gr00tN1d7.train": ("mode",),
        },
    ),
    *_symbols(
        "gr00t.model.gr00t_n1d7.processing_gr00t_n1d7", {"Gr00tN1d7DataCollator.__call__": ("features",)}
    ),
    *_symbols(
        "gr00t.experiment.trainer",
        {
            "Gr00tTrainer.get_train_dataloader": (),
            "Gr00tTrainer.compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
        },
    ),
    *_symbols("gr00t.experiment.experiment", {"run": ("config",)}),
)

_QWEN = "transformers.models.qwen3_vl.modeling_qwen3_vl"
QWEN3_VL = (
    *_symbols(
        _QWEN,
        {
            "Qwen3VLVisionModel.fast_pos_embed_interpolate": ("grid_thw",),
            "Qwen3VLVisionModel.rot_pos_emb": ("grid_thw",),
            "Qwen3VLVisionPatchEmbed.forward": ("hidden_states",),
            "Qwen3VLVisionPatchMerger.forward": ("x",),
            "Qwen3VLTextRotaryEmbedding.forward": ("x", "position_ids"),
            "Qwen3VLTextModel._deepstack_process": ("hidden_states", "visual_pos_masks", "visual_embeds"),
            "apply_rotary_pos_emb_vision": ("q", "k", "cos", "sin"),
        },
    ),
    Symbol(
        module=_QWEN, name="Qwen3VLModel.get_rope_index", exact=False,
        takes=("input_ids", "image_grid_thw", "attention_mask"), later=("mm_token_type_ids",),
    ),
    Symbol(
        module=_QWEN, name="Qwen3VLTextDecoderLayer.forward", exact=False,
        takes=(
            "hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values",
            "use_cache",
        ),
    ),
    Symbol(
        module=_QWEN, name="Qwen3VLForConditionalGeneration.forward", exact=False,
        takes=("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "labels", "logits_to_keep"),
    ),
    Symbol(
        module=_QWEN, name="Qwen3VLTextModel.forward", exact=False,
        takes=(
            "inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "deepstack_visual_embeds",
        ),
    ),
    Symbol(
        module=_QWEN, name="Qwen3VLVisionAttention.forward", exact=False,
        takes=("hidden_states", "cu_seqlens", "position_embeddings"),
    ),
)  # fmt: skip

_TRAINER = "transformers.trainer"
TRAINER = (
    *_symbols(
        _TRAINER,
        {
            "Trainer._prepare_input": ("data",),
            "Trainer._prepare_inputs": ("inputs",),
            "Trainer.training_step": ("model", "inputs", "num_items_in_batch"),
            "Trainer.get_optimizer_cls_and_kwargs": ("args", "model"),
        },
    ),
    Symbol(module=_TRAINER, name="Trainer.create_optimizer", later=("model",)),
    *_symbols("accelerate.utils.operations", {"convert_to_fp32": ("tensor",)}),
)

_VISUAL, _TEXT, _ACTION = "backbone.model.model.visual", "backbone.model.model.language_model", "action_head"
PARTS = (
    Part(path="backbone", kind="Qwen3Backbone", has=("model", "tune_llm", "tune_visual", "select_layer")),
    Part(path="backbone.model", kind="Qwen3VLForConditionalGeneration", has=("config.image_token_id",)),
    Part(path="backbone.model.model", kind="Qwen3VLModel", has=("config.text_config._attn_implementation",)),
    Part(
        path=_VISUAL, kind="Qwen3VLVisionModel",
        has=(
            "blocks", "patch_embed", "pos_embed.weight", "merger", "deepstack_merger_list",
            "deepstack_visual_indexes", "spatial_merge_size", "dtype",
        ),
    ),
    Part(path=f"{_VISUAL}.blocks.0", kind="Qwen3VLVisionBlock", has=("norm1", "norm2", "attn", "mlp")),
    Part(
        path=f"{_VISUAL}.blocks.0.attn", kind="Qwen3VLVisionAttention",
        has=("qkv", "proj", "num_heads", "scaling"),
    ),
    Part(
        path=_TEXT, kind="Qwen3VLTextModel",
        has=("layers", "rotary_emb", "embed_tokens", "norm", "config._attn_implementation"),
    ),
    Part(
        path=_TEXT + ".layers.0", kind="Qwen3VLTextDecoderLayer",
        has=("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    ),
    Part(
        path=f"{_ACTION}.model", kind="AlternateVLDiT",
        has=(
            "transformer_blocks", "timestep_encoder", "norm_out", "proj_out_1", "proj_out_2",
            "attend_text_every_n_blocks", "config.interleave_self_attention",
        ),
    ),
    Part(
        path=f"{_ACTION}.model.transformer_blocks.0", kind="BasicTransformerBlock",
        has=("norm1", "attn1", "norm3", "ff", "final_dropout", "pos_embed", "norm_type"),
    ),
    Part(
        path=f"{_ACTION}.model.transformer_blocks.0.attn1", kind="Attention",
        has=("to_q", "to_k", "to_v", "to_out", "heads"),
    ),
    Part(path=f"{_ACTION}.vl_self_attention", kind="SelfAttentionTransformer", has=("transformer_blocks",)),
    Part(path=f"{_ACTION}.vlln", kind="LayerNorm", has=("weight",)),
    Part(path=f"{_ACTION}.state_encoder", kind="CategorySpecificMLP", has=("layer1", "layer2")),
    Part(path=f"{_ACTION}.action_encoder", kind="MultiEmbodimentActionEncoder", has=("W1", "W2", "W3")),
    Part(path=f"{_ACTION}.state_encoder.layer1", kind="CategorySpecificLinear", has=("W", "b")),
)  # fmt: skip


def broken(symbols: Iterable[Symbol]) -> list[str]:
    """Of functions that are not where they were, or take other parameters."""
    return [line for symbol in symbols if (line := _difference(symbol))]


def _difference(symbol: Symbol) -> str | None:
    try:
        module = importlib.import_module(symbol.module)
    except ImportError as error:
        return f"{symbol}: {symbol.module} cannot be imported ({error}); look where it moved to"
    found: Any = module
    for name in symbol.name.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        return f"{symbol}: not in {module.__file__}; look where it moved to"
    parameters = inspect.signature(found).parameters
    names = [name for name in parameters if name != "self"]
    if _as_expected(symbol, parameters, names):
        return None
    file = inspect.getsourcefile(inspect.unwrap(found))
    return f"{symbol}: expected {_signature(symbol)}, found ({', '.join(names)}) in {file}"


def _as_expected(symbol: Symbol, parameters: Mapping[str, inspect.Parameter], names: list[str]) -> bool:
    if symbol.exact:
        count = len(symbol.takes)
        return tuple(names[:count]) == symbol.takes and set(names[count:]) <= set(symbol.later)
    given = {*symbol.takes, *symbol.later}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    left_out = [parameters[name] for name in names if name not in given]
    needed = [one.name for one in left_out if one.default is one.empty and one.kind not in variable]
    return set(symbol.takes) <= set(names) and not needed


def _signature(symbol: Symbol) -> str:
    takes = ", ".join(symbol.takes)
    later = f" and maybe {', '.join(symbol.later)}" if symbol.later else ""
    return f"({takes}){later}" if symbol.exact else f"that it can be called with {takes}{later}"


def missing(model: nn.Module, parts: Iterable[Part]) -> list[str]:
    """Of modules inside a model that are not there, of another class, or without an attribute."""
    return [line for part in parts for line in _lacks(model, part)]


def _lacks(model: nn.Module, part: Part) -> list[str]:
    where = f"{type(model).__name__} ({inspect.getsourcefile(type(model))})"
    try:
        module = model.get_submodule(part.path)
    except AttributeError as error:
        return [f"{part.path}: not in {where}: {error}; look where it moved to"]
    kind, file = type(module).__name__, inspect.getsourcefile(type(module))
    lines = [] if kind == part.kind else [f"{part.path}: expected a {part.kind}, found a {kind} of {file}"]
    absent = [name for name in part.has if not _reachable(module, name)]
    return [*lines, *(f"{part.path}: {kind} has no {name} in {file}" for name in absent)]


def _reachable(found: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
