"""transformers.Trainer's checkpoint out of sharded state, and back into it: the files of one process.

Every rank takes part in gathering; the first writes. model.safetensors is read by the Trainer before the
model is sharded; optimizer.pt is read from memory-mapped files by every rank, which keeps its shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch import features, sites
from somaspeed_patch.layouts import states, zero_checkpoint

log = logging.getLogger(__name__)

SAVE, LOAD = "layouts_trainer/save", "layouts_trainer/load"
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


def save_model(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer.save_model(output_dir): the first rank's `model.state_dict()` is whole. Collective."""
    if not states.is_sharded(instance.model):
        return wrapped(*args, **kwargs)
    with _whole(instance.model):
        return wrapped(*args, **kwargs)


def on_evaluate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """BestMetricCheckpointCallback.on_evaluate of NVIDIA's package, whose first rank may save the model."""
    model = kwargs.get("model")
    if not states.is_sharded(model):
        return wrapped(*args, **kwargs)
    with _whole(model):
        return wrapped(*args, **kwargs)


def save_optimizer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer._save_optimizer_and_scheduler(output_dir): the optimizer's state is whole. Collective."""
    if not states.is_sharded(instance.model):
        return wrapped(*args, **kwargs)
    whole = states.optim_state_dict(None, None, (instance.model, instance.optimizer), {})
    with _lent(instance.optimizer, "state_dict", lambda: whole):
        result = wrapped(*args, **kwargs)
    sites.site(SAVE).ran()
    return result


def load_optimizer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer._load_optimizer_and_scheduler(checkpoint): this rank's shards of it, also of a ZeRO-2 one."""
    if features.value("layout") is None:
        return wrapped(*args, **kwargs)
    return _load(wrapped, instance, *args, **kwargs)


def load_best(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trainer._load_best_model(): whole weights into the sharded model."""
    model = instance.model
    if not states.is_sharded(model):
        return wrapped(*args, **kwargs)

    def load_state_dict(state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        held = type(model).state_dict(model)
        mine = {name: states.like(value, held.get(name)) for name, value in state.items()}
        return type(model).load_state_dict(model, mine, strict)

    with _lent(model, "load_state_dict", load_state_dict):
        return wrapped(*args, **kwargs)


@contextmanager
def _whole(model: Any) -> Iterator[None]:
    """Inside, `model.state_dict()` is gathered, and empty but for the first rank. Collective."""
    whole = states.model_state(model)
    with _lent(model, "state_dict", lambda *_, **__: whole):
        yield
    sites.site(SAVE).ran()


@contextmanager
def _lent(owner: Any, name: str, method: Any) -> Iterator[None]:
    """An object with another method for a while."""
    attributes = vars(owner)
    if name in attributes:
        raise RuntimeError(f"layout: {type(owner).__name__}.{name} was replaced by someone else")
    attributes[name] = method
    try:
        yield
    finally:
        del attributes[name]


def _load(wrapped: Any, trainer: Any, checkpoint: str | None) -> Any:
    if checkpoint is None:
        return wrapped(checkpoint)
    folder, site = Path(checkpoint), sites.site(LOAD)
    zero = zero_checkpoint.tag(folder)
    if zero is None and not states.is_sharded(trainer.model):
        return wrapped(checkpoint)
    if zero is not None:
        _import_zero(trainer, zero)
        site.reason = f"master weights and moments of DeepSpeed's {zero.name}"
    elif (folder / _OPTIMIZER).is_file() and (folder / _SCHEDULER).is_file():
        _load_state(trainer, folder / _OPTIMIZER)
    else:
        site.declined(f"{folder.name} has no {_OPTIMIZER} and {_SCHEDULER}: moments start from zero")
        log.warning("layout: %s", site.reason)
        return wrapped(checkpoint)
    trainer.lr_scheduler.load_state_dict(_scheduler(folder))
    site.ran()
    return None


def _scheduler(folder: Path) -> dict[str, Any]:
    file = folder / _SCHEDULER
    if not file.is_file():
        raise ValueError(
            f"layout: {folder} has no {_SCHEDULER}: DeepSpeed kept the schedule; make whole weights of it "
            "with zero_to_fp32.py, which lies in it, and train from those: moments and schedule are lost"
        )
    return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def _load_state(trainer: Any, file: Path) -> None:
    saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    given = {"model": trainer.model, "optim": trainer.optimizer, "optim_state_dict": saved}
    trainer.optimizer.load_state_dict(states.optim_state_dict_to_load(None, None, (), given))


@torch.no_grad()
def _import_zero(trainer: Any, folder: Path) -> None:
    """Master weights into the parameters, moments and steps into the optimizer, by name."""
    rates = _scheduler(folder.parent)["_last_lr"]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    named: dict[str, nn.Parameter] = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    places = {id(p): place for place, p in enumerate(states.parameters_of(optimizer))}
    found = zero_checkpoint.Reader(folder)
    _same_names(found.names, [name for name, p in named.items() if id(p) in places])
    state = {}
    for name in found.names:
        parameter, entry = named[name], found.entry(name, named[name].shape)
        parameter.copy_(states.like(entry.pop("master"), parameter))
        state[places[id(parameter)]] = {key: states.like(value, parameter) for key, value in entry.items()}
    groups = optimizer.state_dict()["param_groups"]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _same_names(saved: list[str], held: list[str]) -> None:
    other = sorted(set(saved) ^ set(held))
    if other:
        raise ValueError(
            f"layout: {len(other)} parameters train here or in the ZeRO checkpoint, but not in both, for "
            f"example {other[0]}; train the same ones, or start from its weights without resuming"
        )
