"""Which steps of a LeRobot preprocessor give the same result in a data-loader worker.

A step moves only if it is known: a class of LeRobot's own in `KINDS`, read and found to depend on its input
and its settings alone. The steps of users and other packages cannot be known and stay. Only a leading run
moves, since what follows a step that stays needs its result.

Where the trainer's device is a GPU, stock LeRobot runs these steps on tensors that accelerate has moved
there. Their arithmetic is one IEEE operation at a time (subtract, multiply, divide, compare, copy), which CPU
and GPU round alike; the exceptions are named below and stay.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_DEVICE_STEP = "lerobot.processor.device_processor.DeviceProcessorStep"
_LAST_SEEN = ("_current_transition", "_last_state", "_last_raw_state")  # what steps keep of the last batch


def _moves(step: Any, device: str) -> str | None:
    return None


def _normalizer(step: Any, device: str) -> str | None:
    """On a GPU an image is normalized in microseconds; from a worker it would be four times the bytes."""
    if device != "cpu" and normalized_images(step):
        return "normalizes images, which is cheap on the device and would come from the workers as floats"
    return None


def _groot_pack(step: Any, device: str) -> str | None:
    if step.training and step.state_dropout_prob > 0:
        return "draws random numbers (state dropout)"
    return None


def _groot_encode(step: Any, device: str) -> str | None:
    if step.use_albumentations:
        return "draws random numbers (crop)" if step.training else None
    if str(step.device or "cpu") != "cpu":
        # torchvision resizes uint8 in fixed point on a CPU and in floats on a GPU: from 256 to 224 pixels,
        # bicubic, every fifth value of a random image differs, by up to 21 of 255
        return "resizes images on the device, where a CPU would round differently"
    return None


@dataclass(frozen=True)
class Kind:
    """What is known of one class of steps."""

    stays: Callable[[Any, str], str | None] = _moves
    """Called with the step and the trainer's device type; why this one stays in the trainer, or None."""
    reads_images: bool = False
    """Whether it needs the pixels, not only the key; a normalizer is asked by `normalized_images`."""
    leaves_images: bool = False
    """Whether raw images stay in the batch behind it that the policy's forward does not read."""


_PROCESSOR, _POLICIES = "lerobot.processor.", "lerobot.policies."
_MOLMOACT2 = _POLICIES + "molmoact2.processor_molmoact2.MolmoAct2"
KINDS = {
    _PROCESSOR + "rename_processor.RenameObservationsProcessorStep": Kind(),
    _PROCESSOR + "batch_processor.AddBatchDimensionProcessorStep": Kind(),
    _PROCESSOR + "batch_processor.AddBatchDimensionActionStep": Kind(),
    _PROCESSOR + "batch_processor.AddBatchDimensionObservationStep": Kind(),
    _PROCESSOR + "batch_processor.AddBatchDimensionComplementaryDataStep": Kind(),
    _PROCESSOR + "normalize_processor.NormalizerProcessorStep": Kind(_normalizer),
    _PROCESSOR + "relative_action_processor.RelativeActionsProcessorStep": Kind(),
    _PROCESSOR + "newline_task_processor.NewLineTaskProcessorStep": Kind(),
    _PROCESSOR + "tokenizer_processor.TokenizerProcessorStep": Kind(),
    _PROCESSOR + "tokenizer_processor.ActionTokenizerProcessorStep": Kind(),
    _POLICIES + "pi0.processor_pi0.Pi0NewLineProcessor": Kind(),
    _POLICIES + "pi0_fast.processor_pi0_fast.Pi0FastPrepareStateAndLanguageTokenizerProcessorStep": Kind(),
    _POLICIES + "pi05.processor_pi05.Pi05PrepareStateTokenizerProcessorStep": Kind(),
    _MOLMOACT2 + "StateFrameTransformStep": Kind(),
    _MOLMOACT2 + "MaskedNormalizerProcessorStep": Kind(_normalizer),
    _MOLMOACT2 + "ClampNormalizedProcessorStep": Kind(),
    _MOLMOACT2 + "PackInputsProcessorStep": Kind(reads_images=True, leaves_images=True),
    _POLICIES + "groot.processor_groot.GrootN17PackInputsStep": Kind(_groot_pack, reads_images=True),
    _POLICIES + "groot.processor_groot.GrootN17VLMEncodeStep": Kind(_groot_encode, reads_images=True),
}


@dataclass(frozen=True)
class Split:
    """A preprocessor's steps, cut where the first one has to stay."""

    moved: tuple[Any, ...]
    """Copies of the leading steps for the workers: on the CPU, without the last batch."""
    stay: tuple[str, ...]
    """Class names of the others, in order."""
    why: str | None
    """Why the first of the others stays; None if there are no others."""

    @property
    def reads_images(self) -> bool:
        """Whether a worker needs the images as floats."""
        return any(_kind(step).reads_images or normalized_images(step) for step in self.moved)

    @property
    def leaves_images(self) -> bool:
        """Whether the images are still in the batch though the policy has no more use for them."""
        return any(_kind(step).leaves_images for step in self.moved)

    def renamed(self, key: str) -> str:
        """What an observation is called behind the moved steps."""
        for step in self.moved:
            key = getattr(step, "rename_map", {}).get(key, key)
        return key

    def __str__(self) -> str:
        if not self.moved:
            return f"nothing moves: {self._first_that_stays}"
        last, every = type(self.moved[-1]).__name__, len(self.moved) + len(self.stay)
        text = f"in the workers: {len(self.moved)} of {every} steps, to {last}"
        if self.leaves_images:
            text += ", without the raw images, which the policy does not read"
        return f"{text}; in the trainer: {self._first_that_stays}" if self.stay else text

    @property
    def _first_that_stays(self) -> str:
        after = f", and after it {', '.join(self.stay[1:])}" if self.stay[1:] else ""
        return f"{self.stay[0]} ({self.why}){after}" if self.stay else "there are no steps"


def split(steps: Sequence[Any], device: str) -> Split:
    """Cut a preprocessor's steps in two for a trainer on `device` ("cpu" or "cuda")."""
    moved: list[Any] = []
    why = None
    for step in steps:
        why = _why_it_stays(step, device)
        if why is None:
            try:
                moved.append(_for_a_worker(step))
                continue
            except Exception as error:  # whatever a foreign __reduce__ raises
                why = f"cannot be pickled: {type(error).__name__}: {error}"
        break
    stay = tuple(type(step).__name__ for step in steps[len(moved) :])
    return Split(tuple(moved), stay, why)


def normalized_images(step: Any) -> bool:
    """Whether the step is a normalizer with statistics and a mode for at least one image."""
    from lerobot.configs import FeatureType, NormalizationMode

    mode = getattr(step, "norm_map", {}).get(FeatureType.VISUAL, NormalizationMode.IDENTITY)
    if mode == NormalizationMode.IDENTITY:
        return False
    only = step.normalize_observation_keys
    images = [key for key, feature in step.features.items() if feature.type == FeatureType.VISUAL]
    return any(key in step._tensor_stats and (only is None or key in only) for key in images)


def _kind(step: Any) -> Kind:
    return KINDS[_name(step)]


def _name(step: Any) -> str:
    return f"{type(step).__module__}.{type(step).__qualname__}"


def _why_it_stays(step: Any, device: str) -> str | None:
    if _name(step) == _DEVICE_STEP:
        return "moves to the device"
    if _name(step) not in KINDS:
        return "not known to give the same in a worker"
    return _kind(step).stays(step, device)


def _for_a_worker(step: Any) -> Any:
    """A copy that shares nothing with the trainer's step. Pickled also for fork, where it need not be."""
    own = copy.copy(step)
    for name in _LAST_SEEN:
        if name in vars(own):
            setattr(own, name, None)
    if str(getattr(own, "device", None) or "cpu") != "cpu":
        if hasattr(own, "to"):
            own.to(device="cpu")  # a normalizer's statistics; the trainer's stay where they are
        else:
            own.device = "cpu"
    return pickle.loads(pickle.dumps(own))
