"""Two names that stand for the tiny MolmoAct2's files, as if they were repositories on the hub.

A training command, and the configuration that it saves, then read the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from somaspeed_patch.tiny.replaced import Replaced
from somaspeed_patch.tiny_molmoact2 import assets

CHECKPOINT = "somaspeed/tiny-molmoact2"
FAST_TOKENIZER = "somaspeed/tiny-molmoact2-fast"

_replaced = Replaced()


def install(size: str) -> None:
    """Let the two names stand for the files of `size`, which are built when first asked for.

    A second call only changes the size.
    """
    from lerobot.policies.molmoact2 import modeling_molmoact2, processor_molmoact2
    from lerobot.policies.molmoact2.molmoact2_hf_model import action_tokenizer
    from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as hf_modeling

    uninstall()
    for module in (modeling_molmoact2, processor_molmoact2):
        _replaced.put(module, "_resolve_checkpoint_location", partial(_redirected, size))
    _replaced.put(action_tokenizer, "_resolve_tokenizer_location", partial(_redirected, size))
    if size == "full":
        _replaced.put(hf_modeling.MolmoAct2PreTrainedModel, "_init_weights", _no_draws)


def uninstall() -> None:
    """Put LeRobot's own functions back; nothing happens when none were replaced."""
    _replaced.restore()


def _redirected(size: str, function: Callable[..., str]) -> Callable[..., str]:
    """`function`, except that the two names give the local folders."""

    def resolve(location: str, **options: Any) -> str:
        if location == CHECKPOINT:
            return str(assets.ensure(size).checkpoint)
        if location == FAST_TOKENIZER:
            return str(assets.ensure(size).fast_tokenizer)
        return function(location, **options)

    return resolve


def _no_draws(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, except that weights which a checkpoint is about to bring are not drawn first.

    Transformers spares what a model initialises through its functions, and this one uses none: 5.4e9 normal
    values in bf16 took 2 minutes of CPU before every run.
    """

    def initialise(model: Any, module: Any) -> None:
        loaded = all(
            getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters(recurse=False)
        )
        if not loaded:
            function(model, module)

    return initialise
