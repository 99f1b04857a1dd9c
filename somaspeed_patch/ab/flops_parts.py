"""FLOPs of matrix products and attention in a training step: 2 a multiply-add, plain integers.

What is left out: norms, activations, softmax, rotary embeddings, masks, the optimizer. Attention is counted
over all pairs of a query and a key, also where a causal mask hides half of them: so do PyTorch's counter and
most published figures.
"""

from __future__ import annotations

from dataclasses import dataclass

# How often a product of the forward is computed in one step. Its backward has two more: dX and dW.
FORWARD = 1  # frozen, and nothing trained before it
FROZEN_INPUT = 2  # of a linear layer: it learns, what it reads does not. Of attention: K and V are frozen
TRAINED = 3  # it learns, and so does something before it


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer of a transformer, its attention among its own tokens."""

    width: int
    """hidden size"""
    queries: int
    """query heads times the size of a head"""
    keys: int
    """key heads times the size of a head; values are as wide"""
    mlp: int
    """feed-forward size"""
    gated: bool
    """whether the feed-forward has a gate beside its two matrices"""


def linear(rows: int, inputs: int, outputs: int, passes: int = FORWARD) -> int:
    """A linear layer over `rows` vectors.

    Args:
        passes: FORWARD, FROZEN_INPUT (forward and dW) or TRAINED (and dX).
    """
    return 2 * rows * inputs * outputs * passes


def attention(queries: int, keys: int, width: int, passes: int = FORWARD) -> int:
    """Scores and their product with V. The backward's scores again, as a fused kernel has them, are left out.

    Args:
        queries, keys: tokens.
        width: query heads times the size of a head.
        passes: FORWARD (2 products), FROZEN_INPUT (and dP and dQ) or TRAINED (and dK and dV).
    """
    return 4 * queries * keys * width * passes


def keys_values(block: Block, rows: int) -> int:
    """The K and V projections of a frozen layer."""
    return 2 * linear(rows, block.width, block.keys)


def products(block: Block, rows: int, passes: int = FORWARD) -> int:
    """All linear layers of a block."""
    per_row = block.width * (2 * block.queries + 2 * block.keys + (3 if block.gated else 2) * block.mlp)
    return linear(rows, per_row, 1, passes)


def layer(block: Block, rows: int, passes: int = FORWARD) -> int:
    """A whole block over `rows` tokens that attend to each other."""
    return products(block, rows, passes) + attention(rows, rows, block.queries, passes)
