"""What a run on the tiny MolmoAct2 needs of LeRobot in its process: names for files, episodes repeated.

Two names stand for the tiny MolmoAct2's files, as if they were repositories on the hub: a training command,
and the configuration that it saves, then read the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from somaspeed_patch.tiny_molmoact2 import assets

CHECKPOINT = "somaspeed/tiny-molmoact2"
FAST_TOKENIZER = "somaspeed/tiny-molmoact2-fast"

# module or class, name, and LeRobot's own function, while the names are redirected
_before: list[tuple[Any, str, Any]] = []


def install(size: str) -> None:
    """Let the two names stand for the files of `size`, which are built when first asked for.

    A second call only changes the size.
    """
    from lerobot.policies.molmoact2 import modeling_molmoact2, processor_molmoact2
    from lerobot.policies.molmoact2.molmoact2_hf_model import action_tokenizer
    from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as hf_modeling

    uninstall()
    for module in (modeling_molmoact2, processor_molmoact2):
        _replace(module, "_resolve_checkpoint_location", partial(_redirected, size))
    _replace(action_tokenizer, "_resolve_tokenizer_location", partial(_redirected, size))
    if size == "full":
        _replace(hf_modeling.MolmoAct2PreTrainedModel, "_init_weights", _no_draws)


def repeat_episodes(times: int) -> None:
    """Let an epoch of LeRobot's sampler hold every episode `times` times, in one shuffled order.

    A benchmark on the small data set then has no epoch's end in it, where the workers begin anew.
    """
    from lerobot.datasets import sampler

    _replace(sampler.EpisodeAwareSampler, "__init__", partial(_repeating, times))


def uninstall() -> None:
    """Put LeRobot's own functions back; nothing happens when none were replaced."""
    while _before:
        owner, name, function = _before.pop()
        setattr(owner, name, function)


def _replace(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    _before.append((owner, name, getattr(owner, name)))
    setattr(owner, name, change(getattr(owner, name)))


def _redirected(size: str, function: Callable[..., str]) -> Callable[..., str]:
    """`function`, except that the two names give the local folders."""

    def resolve(location: str, **options: Any) -> str:
        if location == CHECKPOINT:
            return str(assets.ensure(size).checkpoint)
        if location == FAST_TOKENIZER:
            return str(assets.ensure(size).fast_tokenizer)
        return function(location, **options)

    return resolve


def _repeating(times: int, function: Callable[..., None]) -> Callable[..., None]:
    """EpisodeAwareSampler.__init__ with all episodes `times` times; a choice by index stays once."""

    def initialise(self: Any, starts: Any, ends: Any, *args: Any, **kwargs: Any) -> None:
        function(self, [*starts] * times, [*ends] * times, *args, **kwargs)

    return initialise


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
