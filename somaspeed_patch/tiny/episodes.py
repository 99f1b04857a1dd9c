"""Let an epoch of LeRobot's sampler hold every episode several times.

A benchmark on the small data set then has no epoch's end in it, where the workers begin anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from somaspeed_patch.tiny.replaced import Replaced

VARIABLE = "SOMASPEED_TINY_EPISODES"  # how many times an epoch has each episode
_replaced = Replaced()


def repeat(times: int) -> None:
    """Let an epoch hold every episode `times` times, in one shuffled order; a second call changes `times`."""
    from lerobot.datasets import sampler

    restore()
    _replaced.put(sampler.EpisodeAwareSampler, "__init__", partial(_repeating, times))


def repeat_from_environment() -> None:
    """As `repeat`, where SOMASPEED_TINY_EPISODES is set."""
    if VARIABLE in os.environ:
        repeat(int(os.environ[VARIABLE]))


def restore() -> None:
    """Let an epoch hold every episode once again."""
    _replaced.restore()


def _repeating(times: int, function: Callable[..., None]) -> Callable[..., None]:
    """EpisodeAwareSampler.__init__ with all episodes `times` times; a choice by index stays once."""

    def initialise(self: Any, starts: Any, ends: Any, *args: Any, **kwargs: Any) -> None:
        function(self, [*starts] * times, [*ends] * times, *args, **kwargs)

    return initialise
