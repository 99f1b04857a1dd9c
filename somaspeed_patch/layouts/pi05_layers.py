"""LeRobot's pi0.5 computes a layer of both stacks in one function, from the layers' submodules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from somaspeed_patch.layouts import stages, tensor_parallel, units


def joint_layers(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """LeRobot's pi05 compute_layer_complete: through the layers' hooks, where they are sharded."""
    return _through_layers(wrapped, *args, **kwargs)


def _through_layers(
    wrapped: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    position_ids: Any,
    adarms_cond: Any,
    layers: Any,
    rotary_emb: Any,
) -> Any:
    """One layer of both stacks; the function reads their submodules and calls neither of them.

    Args:
        inputs_embeds: [B, N, W] of PaliGemma and [B, S, W] of the expert.
        adarms_cond: None and [B, W].
        layers: the two layers.

    Raises: ValueError: a layer has a part of its heads, of which the function counts 8.
    """
    if any(map(tensor_parallel.is_split, layers)):
        raise ValueError(
            "layout: with tp LeRobot's own pi0.5 layer would count heads that are on other ranks, and the"
            " patched forward did not run (pi05/frozen_prefix in the report says why); use dp_shard"
        )

    def run(*tensors: Tensor | None) -> Any:
        streams, conditions = list(tensors[:2]), list(tensors[2:])
        return wrapped(
            streams, attention_mask, position_ids, conditions, layers=layers, rotary_emb=rotary_emb
        )

    if any(units.is_recomputed(layer) for layer in layers):
        run = units.checkpointed(run)
    for layer in layers:
        if isinstance(layer, FSDPModule):
            run = _inside(layer, run)
    streams = stages.enter(layers[0], *inputs_embeds)
    found = streams if stages.elsewhere(layers[0]) else run(*streams, *adarms_cond)
    # Of the last layers only the expert's is read in training.
    return [found[0], stages.leave(layers[1:], found[1])]


def _inside(layer: Any, run: Any) -> Any:
    return lambda *tensors: units.in_place_of_forward(layer, run, *tensors)
