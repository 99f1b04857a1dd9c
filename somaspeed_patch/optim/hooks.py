"""What the adapters put in front of accelerate, LeRobot and transformers: building and using FusedAdamW."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from somaspeed_patch import features, sites
from somaspeed_patch.layouts import stages
from somaspeed_patch.optim.fused_adamw import FusedAdamW
from somaspeed_patch.optim.gradients import same_objects

CLIP, LEROBOT, TRAINER = "accelerate_clip/clip", "lerobot_optimizer/build", "hf_trainer/optimizer_class"
_DEEPSPEED = "DeepSpeed owns the optimizer"


def clip_grad_norm_(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Accelerator.clip_grad_norm_(parameters, max_norm, norm_type=2): the norm only; `step` clips."""
    parameters, max_norm, norm_type = _clip_arguments(*args, **kwargs)
    site = sites.site(CLIP)
    if isinstance(parameters, Tensor):
        found: FusedAdamW | str = "a tensor in place of parameters"
    else:
        parameters = list(parameters)  # a generator can be read once
        found = _optimizer_of(instance, parameters, norm_type)
    if isinstance(found, str):
        site.declined(found)
        _settle(instance)
        return wrapped(parameters, max_norm, norm_type)
    instance.unscale_gradients()
    norm = found.clip_grad_norm_(max_norm)
    site.ran()
    return norm


def before_writing_gradients(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Accelerator.backward and clip_grad_value_: a factor that still waits goes into the gradients first."""
    _settle(instance)
    return wrapped(*args, **kwargs)


def _settle(accelerator: Any) -> None:
    for prepared in accelerator._optimizers:
        optimizer = getattr(prepared, "optimizer", prepared)
        if isinstance(optimizer, FusedAdamW):
            optimizer.settle_clip()


def _clip_arguments(parameters: Any, max_norm: float, norm_type: float = 2) -> tuple[Any, float, float]:
    return parameters, max_norm, norm_type


def _optimizer_of(accelerator: Any, parameters: Sequence[Tensor], norm_type: float) -> FusedAdamW | str:
    """The optimizer that can take over this call, or why there is none."""
    if float(norm_type) != 2:
        return f"norm type {norm_type}"
    if not _averaged_by_the_time_of_clipping(accelerator):
        return f"clipping belongs to {accelerator.distributed_type.value}"
    if not accelerator.sync_gradients:
        return "gradients are still being accumulated"
    if any(stages.of_model(model) is not None for model in accelerator._models):
        return "the norm is one over the stages of a pipeline"
    why = "no optimizer was prepared"
    for prepared in accelerator._optimizers:
        optimizer = getattr(prepared, "optimizer", prepared)
        refused = _refusal(optimizer, parameters)
        if refused is None:
            return optimizer  # type: ignore[no-any-return]
        why = refused
    return why


def _averaged_by_the_time_of_clipping(accelerator: Any) -> bool:
    """True for one process, DDP and FSDP2; FSDP1, DeepSpeed, Megatron and XLA clip in their own way."""
    kind = accelerator.distributed_type.value
    return kind in ("NO", "MULTI_GPU", "MULTI_CPU") or (kind == "FSDP" and bool(accelerator.is_fsdp2))


def _refusal(optimizer: Any, parameters: Sequence[Tensor]) -> str | None:
    if not isinstance(optimizer, FusedAdamW):
        return f"the optimizer is {type(optimizer).__name__}, not FusedAdamW"
    reason = optimizer.native_reason()
    if reason is not None:
        return reason
    held = optimizer.parameters()
    seen = _compared.get(optimizer)
    if seen is None or not seen.of(held, parameters):
        seen = _compared[optimizer] = _Difference(held, parameters)
    return seen.refusal()


class _Difference:
    """Parameters that are clipped and not updated, or the reverse: none of them may have a gradient."""

    def __init__(self, held: list[Tensor], clipped: Sequence[Tensor]) -> None:
        self._held, self._clipped = held, list(clipped)
        ids = set(map(id, held)), set(map(id, clipped))
        self._not_updated = [param for param in clipped if id(param) not in ids[0]]
        self._not_clipped = [param for param in held if id(param) not in ids[1]]

    def of(self, held: Sequence[Tensor], clipped: Sequence[Tensor]) -> bool:
        """Whether it was made for these lists."""
        return same_objects(self._held, held) and same_objects(self._clipped, clipped)

    def refusal(self) -> str | None:
        """Why the two lists are not the same in effect, or None."""
        stray = sum(param.grad is not None for param in self._not_updated)
        missed = sum(param.grad is not None for param in self._not_clipped)
        if not stray and not missed:
            return None
        return (
            f"{stray} of the clipped parameters with a gradient are not the optimizer's, "
            f"{missed} of the optimizer's are not clipped"
        )


_compared: WeakKeyDictionary[FusedAdamW, _Difference] = WeakKeyDictionary()


def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """LeRobot's `OptimizerConfig.build(params)`: the same optimizer as FusedAdamW, if it is plain AdamW."""
    optimizer = wrapped(*args, **kwargs)
    site = sites.site(LEROBOT)
    if type(optimizer) is not torch.optim.AdamW:
        site.declined(f"{type(optimizer).__name__} is not plain torch.optim.AdamW")
    elif not features.value("optimizer"):
        site.declined("optimizer=False")
    elif _deepspeed_by_launcher():
        site.declined(_DEEPSPEED)
    else:
        site.ran()
        return as_fused(optimizer)
    return optimizer


def _deepspeed_by_launcher() -> bool:
    """`accelerate launch --use_deepspeed` says so to the processes it starts."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1", "yes")


def as_fused(optimizer: torch.optim.AdamW) -> FusedAdamW:
    """A FusedAdamW with the param_groups of an AdamW that has not stepped yet."""
    defaults = dict(optimizer.defaults)
    defaults.pop("decoupled_weight_decay", None)  # Adam's own; AdamW sets it
    return FusedAdamW(optimizer.param_groups, **defaults)


def optimizer_class(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer.get_optimizer_cls_and_kwargs(args, model): FusedAdamW where it says torch.optim.AdamW."""
    found, settings = wrapped(*args, **kwargs)
    site = sites.site(TRAINER)
    training = args[0] if args else kwargs["args"]
    if found is not torch.optim.AdamW:
        name = getattr(training.optim, "value", training.optim)
        site.declined(f"optim={name} is not plain torch.optim.AdamW")
    elif not features.value("optimizer"):
        site.declined("optimizer=False")
    elif getattr(training, "deepspeed", None) or _deepspeed_by_launcher():
        site.declined(_DEEPSPEED)
    else:
        site.ran()
        return FusedAdamW, settings
    return found, settings


def deepspeed_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """transformers' deepspeed_init(trainer, ...): an optimizer of DeepSpeed's config is reported too."""
    from accelerate.utils.deepspeed import DummyOptim

    optimizer, scheduler = wrapped(*args, **kwargs)
    if isinstance(optimizer, DummyOptim):  # in the place of the one that DeepSpeed will build
        sites.site(TRAINER).declined(_DEEPSPEED)
    return optimizer, scheduler
