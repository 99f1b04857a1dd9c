"""Records every update of a LeRobot or transformers.Trainer run: loss, norm, seconds, one JSON line each.

The seams are class attributes, so they hold for the console script, `-m` and torchrun alike:

    DataLoaderShard.__iter__      the update begins when the trainer asks for a batch
    Accelerator.autocast          the batch is ready, the policy's forward begins
    Accelerator.backward          forward ends; its argument is the loss
    Accelerator.clip_grad_norm_   the gradients are complete; its return value is their norm
    AcceleratedOptimizer.step     the learning rate used; without clipping, the gradients are complete
    MetricsTracker.step           the update ends

of transformers.Trainer, whose loader need not be accelerate's:

    Trainer.get_batch_samples               asks for the micro-batches of an update
    Trainer.compute_loss_context_manager    they are ready, a forward begins
    CallbackHandler.on_step_end             the update ends

Numerics and RNG are untouched. On CUDA an update ends with one synchronize, in every arm alike. The report of
patched sites is saved beside the file at exit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from somaspeed_patch import features
from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch, function

REQUIRES = ["accelerate>=1.0,<2"]
DEFAULT = False

FEATURES = [
    Feature(
        name="record_steps",
        changes="writes loss, grad norm and phase seconds of every update to this file",
        exact=True,
        default=None,
    ),
    Feature(
        name="record_gradients",
        changes="with record_steps: writes every gradient of update N, before clipping, beside that file",
        exact=True,
        default=None,
    ),
    Feature(
        name="record_profile",
        changes="with record_steps: GPU busy and communication seconds of update N, by torch.profiler",
        exact=True,
        default=None,
    ),
]

_RECORDER = "somaspeed_patch.ab.recorder"
_TRAINER, _SITE = "transformers.trainer", "trainer"


def _hook(name: str) -> Callable[[Any], Any]:
    """A patch that hands the call to `recorder.<name>` while a file is named.

    A plain function: torch's schedulers put `optimizer.step.__func__` in the step's place.
    """

    def hook(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if features.value("record_steps") is None:
            return wrapped(*args, **kwargs)
        from somaspeed_patch.ab import recorder

        return recorder.HOOKS[name](wrapped, instance, args, kwargs)

    return lambda original: function(original, hook)


PATCHES = [
    Patch(module="accelerate.data_loader", name="DataLoaderShard.__iter__", make=_hook("batches")),
    Patch(module="accelerate.data_loader", name="DataLoaderDispatcher.__iter__", make=_hook("batches")),
    Patch(module="accelerate.accelerator", name="Accelerator.autocast", make=_hook("forward")),
    Patch(module="accelerate.accelerator", name="Accelerator.backward", make=_hook("backward")),
    Patch(module="accelerate.accelerator", name="Accelerator.clip_grad_norm_", make=_hook("clip")),
    Patch(module="accelerate.optimizer", name="AcceleratedOptimizer.step", make=_hook("optimizer_step")),
    Patch(module="lerobot.utils.logging_utils", name="MetricsTracker.step", make=_hook("update_done")),
    Patch(module=_TRAINER, name="Trainer.get_batch_samples", make=_hook("micro_batches"), site=_SITE),
    Patch(module=_TRAINER, name="Trainer.compute_loss_context_manager", make=_hook("forward"), site=_SITE),
    Patch(
        module="transformers.trainer_callback",
        name="CallbackHandler.on_step_end",
        make=_hook("trainers_update_done"),
        site=_SITE,
    ),
]


def release() -> None:
    """Close the steps file."""
    if _RECORDER in sys.modules:
        sys.modules[_RECORDER].close()
