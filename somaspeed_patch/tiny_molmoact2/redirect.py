"""Two names that stand for the tiny MolmoAct2's files, as if they were repositories on the hub.

A training command, and the configuration that it saves, then read the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from somaspeed_patch.tiny_molmoact2 import assets

CHECKPOINT = "somaspeed/tiny-molmoact2"
FAST_TOKENIZER = "somaspeed/tiny-molmoact2-fast"

_before: list[
    tuple[Any, str, Any]
] = []  # module, name and LeRobot's own function while the names are redirected


def install(size: str) -> None:
    """Let the two names stand for the files of `size`, which are built when first asked for.

    A second call only changes the size.
    """
    from lerobot.policies.molmoact2 import modeling_molmoact2, processor_molmoact2
    from lerobot.policies.molmoact2.molmoact2_hf_model import action_tokenizer

    uninstall()
    for module in (modeling_molmoact2, processor_molmoact2):
        _replace(module, "_resolve_checkpoint_location", size)
    _replace(action_tokenizer, "_resolve_tokenizer_location", size)


def uninstall() -> None:
    """Put LeRobot's own functions back; nothing happens when none were replaced."""
    while _before:
        module, name, function = _before.pop()
        setattr(module, name, function)


def _replace(module: Any, name: str, size: str) -> None:
    function = getattr(module, name)
    _before.append((module, name, function))
    setattr(module, name, _redirected(function, size))


def _redirected(function: Callable[..., str], size: str) -> Callable[..., str]:
    """`function`, except that the two names give the local folders."""

    def resolve(location: str, **options: Any) -> str:
        if location == CHECKPOINT:
            return str(assets.ensure(size).checkpoint)
        if location == FAST_TOKENIZER:
            return str(assets.ensure(size).fast_tokenizer)
        return function(location, **options)

    return resolve
