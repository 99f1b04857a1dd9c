"""Layouts under transformers.Trainer, and so Isaac-GR00T's: FSDP2 or HSDP in the place of DDP and ZeRO-2.

    layout=dp_replicate=2,dp_shard=4 on an unchanged recipe, also one that passes a DeepSpeed config

The engine is that of the adapter `layouts`, which must be on too. All hooks do nothing while `layout` is not
set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from somaspeed_patch.features import LAYOUT
from somaspeed_patch.registry import Patch, handed

REQUIRES = ["transformers>=4.51,<5.6", "accelerate>=1.15,<2"]

FEATURES = [LAYOUT]


def _hooked(part: str, hook: str, *names: str) -> Callable[[Any], Any]:
    """Hand the call to a function of `somaspeed_patch.layouts`, if the host's takes these parameters."""
    return handed(f"somaspeed_patch.layouts.{part}", hook, ["self", *names])


def _trainer(name: str, site: str, make: Callable[[Any], Any]) -> Patch:
    return Patch(module="transformers.trainer", name=f"Trainer.{name}", make=make, site=site)


PATCHES = [
    Patch(
        module="transformers.training_args",
        name="TrainingArguments.__post_init__",
        make=_hooked("zero_config", "post_init"),
        site="zero",
    ),
    _trainer("get_decay_parameter_names", "decay", _hooked("zero_config", "decay_parameter_names", "model")),
    _trainer("create_accelerator_and_postprocess", "accelerator", _hooked("hf_trainer", "accelerator")),
    _trainer(
        "_wrap_model", "precision", _hooked("hf_trainer", "wrap_model", "model", "training", "dataloader")
    ),
    _trainer("save_model", "save", _hooked("hf_checkpoints", "save_model", "output_dir", "_internal_call")),
    _trainer(
        "_save_optimizer_and_scheduler", "save", _hooked("hf_checkpoints", "save_optimizer", "output_dir")
    ),
    _trainer(
        "_load_optimizer_and_scheduler", "load", _hooked("hf_checkpoints", "load_optimizer", "checkpoint")
    ),
    _trainer("_load_best_model", "load", _hooked("hf_checkpoints", "load_best")),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator._clip_grad_norm_dtensor_aware",
        make=_hooked("hf_trainer", "clip", "parameters", "max_norm", "norm_type"),
        site="norm",
    ),
    Patch(
        module="gr00t.configs.base_config",
        name="Config.get_deepspeed_config",
        make=_hooked("zero_config", "nvidia_config"),
        site="nvidia_config",
    ),
    Patch(
        module="gr00t.experiment.utils",
        name="BestMetricCheckpointCallback.on_evaluate",
        make=_hooked(
            "hf_checkpoints", "on_evaluate", "args", "state", "control", "metrics", "model", "kwargs"
        ),
        site="nvidia_best",
    ),
]
