"""Inductor with a smaller backlog: what the backward can compute again for little is not kept for it.

Of a transformer block's activations, in bytes a token and channel, autocast to bf16 keeps 41 (GR00T's, with
dropout): 18 of them are the norms' outputs, GELU's behind dropout, and dropout's masks. Norms and GELU are
computed again, which reads what is kept anyhow; of a mask one bit an element is kept, not a byte, and so
the outputs of dropout need not be either. With `products` the matrix product before a GELU, 8 more, is
computed again, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

Compiled = Callable[..., Any]


def inductor(*, products: bool = False) -> Callable[[fx.GraphModule, Sequence[Tensor]], Compiled]:
    """A `backend` for torch.compile. Dropout draws what eager dropout draws.

    Args:
        products: compute the product before a GELU again: a third of a block's forward, where the inner
            width is four times the outer.
    """
    return partial(_compile, products)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """F.dropout from the same draw, of whose mask the backward keeps one bit an element.

    Args:
        x: of any shape; where its last dimension is no multiple of eight, or `inplace`, F.dropout itself.
    """
    if not training or not 0 < p < 1 or inplace or x.shape[-1] % 8:
        return F.dropout(x, p, training, inplace)
    # The draw depends on shape and dtype alone. Given x, GELU's output would be written out just for it.
    mask = torch.native_dropout(torch.empty_like(x), p, True)[1]
    kept = unpacked(packed(mask))
    wide = torch.promote_types(x.dtype, torch.float32)  # torch's kernel scales there, and rounds once
    return (x.to(wide) * kept.to(wide) * (1 / (1 - p))).to(x.dtype)


def packed(mask: Tensor) -> Tensor:
    """[..., 8 * n] bool as [..., n] uint8; bit k of byte i is element k * n + i."""
    bits = mask.view(*mask.shape[:-1], 8, mask.shape[-1] // 8).to(torch.uint8) << _places(mask.device)
    return bits.sum(-2, dtype=torch.uint8)


def unpacked(bits: Tensor) -> Tensor:
    """[..., n] uint8 as [..., 8 * n] uint8 of 0 and 1."""
    return ((bits.unsqueeze(-2) >> _places(bits.device)) & 1).flatten(-2)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)[:, None]


def _compile(products: bool, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    import torch._functorch.config as options
    import torch._inductor as inductor_

    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is F.dropout:
            node.target = dropout
        if products and node.op == "call_function" and node.target is F.gelu:
            _computed_again(node.args[0])
    graph.recompile()
    # By default torch's partitioner keeps whatever a matrix product of the backward reads, and a mask that is
    # read again much later.
    known = {
        name: False
        for name in ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart")
        if hasattr(options, name)
    }
    with options.patch(known):
        compiled: Compiled = inductor_.compile(graph, list(inputs), options={"fallback_random": True})
    return compiled


def _computed_again(node: Any) -> None:
    """Mark a linear layer's node as activation checkpointing marks those of its region."""
    if isinstance(node, fx.Node) and node.target is F.linear:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 0
