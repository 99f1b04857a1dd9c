"""What runs in a data-loader worker, and what is left to do for its batches in the trainer.

`Collate` takes the place of the loader's collate function. What it returns is "staged": LeRobot's transition
after the steps that moved, under the transition's own keys, with a `Stage` under STAGE. accelerate moves its
tensors to the device as it would a batch's; `finish` runs the other steps and makes the batch of it. The
transition, not a batch, because the way back from a batch loses the keys that steps have added.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from somaspeed_patch import facts
from somaspeed_patch.workers import inline, shared_memory
from somaspeed_patch.workers.steps import Split

STAGE = "somaspeed_stage"  # in a staged batch
DECLINED = "somaspeed_declined"  # in a raw batch that a worker would not stage: why; LeRobot ignores the key
_OBSERVATION, _EXTRAS = "observation", "complementary_data"


@dataclass(frozen=True)
class Stage:
    """What has been done to a batch. An object of its own type: pinning and moving leave it alone."""

    steps: tuple[str, ...]
    """Class names of the steps that ran, the first ones of the preprocessor."""
    images: tuple[str, ...]
    """Observations whose uint8 the trainer still has to make floats of."""


class Collate:
    """The loader's own collate function, then the trainer's image conversion and the steps that moved.

    Args:
        own: the loader's collate function.
        to_transition: LeRobot's `batch_to_transition`.
        split: which steps run here.
        cameras: the dataset's camera keys, which the trainer would convert.
        device: type of the trainer's device, "cpu" or "cuda".
        training: False where the trainer preprocesses under no_grad, which GR00T's steps take for evaluation.
        pending: how many batches may wait in the queue, for `shared_memory.why_not`.
    """

    def __init__(
        self,
        own: Callable[[Any], Any],
        to_transition: Callable[[Any], Any],
        split: Split,
        *,
        cameras: Sequence[str],
        device: str,
        training: bool,
        pending: int,
    ) -> None:
        self.own, self._to_transition, self._steps = own, to_transition, split.moved
        # A GPU converts images in microseconds, and uint8 is a quarter of the bytes to send there.
        here = split.reads_images or device == "cpu"
        behind = tuple(split.renamed(key) for key in cameras)
        self._floats = tuple(cameras) if here else ()
        self._dropped = behind if split.leaves_images else ()
        self._stage = Stage(tuple(type(step).__name__ for step in split.moved), () if here else behind)
        self._device, self._training, self._pending = device, training, pending
        self._declined: str | None = None
        self._measured = False

    def __call__(self, samples: Any) -> Any:
        """Collate and stage one batch; what the loader's own function would have given if that cannot be."""
        batch = self.own(samples)
        if not isinstance(batch, dict) or self._declined:
            return batch
        staged = self._stages(batch)
        if not self._measured:
            self._measured = True
            self._declined = shared_memory.why_not(staged, batch, self._pending)
            if self._declined:
                return {**batch, DECLINED: self._declined}
        return staged

    def _stages(self, batch: dict[str, Any]) -> dict[str, Any]:
        if get_worker_info() is not None:
            # a tokenizer's own threads, one a core in each worker, would only displace one another
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        floats = {key: batch[key] for key in self._floats if _is_uint8(batch.get(key))}
        with torch.set_grad_enabled(self._training):
            converted = {key: unit_floats(image, self._device) for key, image in floats.items()}
            transition = self._to_transition({**batch, **converted})
            for step in self._steps:
                transition = step(transition)
        for key in self._dropped:
            (transition.get(_OBSERVATION) or {}).pop(key, None)
        for part in _parts(transition):
            known = {key: value for key, value in part.items() if key not in self._stage.images}
            facts.pack(known)  # a twin of uint8 images would double the batch
            part[facts.BATCH_KEY] = inline.light(known[facts.BATCH_KEY])
        return {**transition, STAGE: self._stage}  # last: accelerate reads the batch size off the first entry


def finish(pipeline: Any, staged: dict[str, Any]) -> Any:
    """Run the steps that did not move: the batch as `pipeline` would have made it in the trainer.

    Raises: RuntimeError: the batch was staged for another pipeline.
    """
    stage: Stage = staged.pop(STAGE)
    done = len(stage.steps)
    names = tuple(type(step).__name__ for step in pipeline.steps[:done])
    if names != stage.steps:
        raise RuntimeError(
            f"worker_preprocess: expected the preprocessor whose first steps ran in the workers "
            f"({', '.join(stage.steps)}), but this one begins with {', '.join(names) or 'nothing'}; "
            "switch worker_preprocess off to use several"
        )
    for part in _parts(staged):
        facts.unpack(part)
    _convert(staged.get(_OBSERVATION), stage.images)
    transition: Any = staged
    for step in pipeline.steps[done:]:
        transition = step(transition)
    return pipeline.to_output(transition)


def unit_floats(image: Tensor, device: str) -> Tensor:
    """uint8 of any shape to fp32 in [0, 1], on the CPU with the bits that `image / 255.0` has on `device`.

    torch's CUDA kernel multiplies by the reciprocal of a Python number where its CPU kernel divides: 126 of
    the 256 values differ in their last bit.
    """
    floats = image.to(dtype=torch.float32)
    return floats * (1.0 / 255.0) if device == "cuda" else floats / 255.0


def _convert(observation: Any, keys: Sequence[str]) -> None:
    """The trainer's own conversion, on the device where it would have done it."""
    for key in keys:
        if _is_uint8((observation or {}).get(key)):
            observation[key] = observation[key].to(dtype=torch.float32) / 255.0


def _is_uint8(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _parts(transition: MutableMapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    """The mappings of a transition that hold tensors."""
    yield transition
    for name in (_OBSERVATION, _EXTRAS):
        if isinstance(transition.get(name), MutableMapping):
            yield transition[name]
