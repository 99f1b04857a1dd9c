"""LeRobot's data path: preprocessing in the data-loader workers, and batches that repeat.

train() hands its loaders to `Accelerator.prepare`, gets its batches through `DataLoader.__iter__` and
preprocesses them with `DataProcessorPipeline.__call__`. All three are class attributes, so it does not matter
under which name train() runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch, with_parameters

REQUIRES = ["lerobot>=0.6.1,<0.7", "accelerate>=1.0,<2"]

FEATURES = [
    Feature(
        name="worker_preprocess",
        changes="run the preprocessor in the data-loader workers, up to the step that moves to the device",
        exact=True,
        default=True,
    ),
    Feature(
        name="cached_batches",
        changes="train on the first N preprocessed batches again and again: an A/B without the loader",
        exact=False,
        default=None,
    ),
]


def _hook(name: str, parameters: list[str] | None = None) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from somaspeed_patch.workers import hooks

        if parameters is not None:
            with_parameters(original, parameters)
        return wrapt.FunctionWrapper(original, getattr(hooks, name))

    return make


def _iterate(original: Any) -> Any:
    from somaspeed_patch.workers import cached

    return wrapt.FunctionWrapper(original, cached.iterate)


PATCHES = [
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.prepare",
        make=_hook("prepare"),
        site="worker_preprocess",
    ),
    Patch(
        module="lerobot.processor.pipeline",
        name="DataProcessorPipeline.__call__",
        make=_hook("preprocess", ["self", "data"]),
        site="worker_preprocess",
    ),
    Patch(
        module="torch.utils.data.dataloader",
        name="DataLoader.__iter__",
        make=_iterate,
        site="cached_batches",
    ),
]


def release() -> None:
    """Give the loaders their own collate functions, and drop the kept batches."""
    import sys

    hooks = sys.modules.get("somaspeed_patch.workers.hooks")
    if hooks is not None:
        hooks.release()
