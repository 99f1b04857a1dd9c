"""Necessary FLOPs of a training step, from which `--synthetic` can print TFLOP/s and MFU.

Only work that the gradients need is counted: the frozen backbone once, forward, over real tokens, without
what nobody reads of it; the trained part forward, dX and dW. So a run that computes more than that, padding,
logits, gradients of frozen parts, activations again, has a low MFU, and not a high count.
Units: FLOPs, 2 a multiply-add; see flops_parts for what counts. Cost: microseconds, no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from somaspeed_patch.ab import flops_groot, flops_molmoact2, flops_pi05
from somaspeed_patch.ab.synthetic_recipe import Synthetic

COUNTS: Mapping[str, Callable[[Synthetic], float]] = {
    "groot": flops_groot.necessary,
    "molmoact2": flops_molmoact2.necessary,
    "pi05": flops_pi05.necessary,
}


def necessary(recipe: Synthetic) -> float:
    """FLOPs of one sample's forward and backward.

    Args:
        recipe: its model, size, cameras, tokens and chunk; all prompts have `tokens` tokens, so an arm that
            pads shorter ones needs less than this.
    Returns: FLOPs, without the optimizer's, which no sample adds to.
    Raises: ValueError: no count is known for the model, or it has no such size.
    """
    if recipe.model not in COUNTS:
        raise ValueError(f"necessary: model must be one of {', '.join(COUNTS)}, but is {recipe.model!r}")
    return COUNTS[recipe.model](recipe)
