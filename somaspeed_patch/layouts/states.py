"""The host's checkpoint out of sharded state, and back into it: LeRobot's files, whatever the layout.

LeRobot asks torch's FSDP1 for both, under the name it imports inside its functions; for an FSDP2 module that
fails. These are the same three functions for it. The optimizer's state is keyed by the parameter's place in
`param_groups`, as one process and DDP write it, so that a checkpoint goes on under any layout and under none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from somaspeed_patch.layouts import collect, stages


def state_dict_type(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """FullyShardedDataParallel.state_dict_type(module, ...): inside, `module.state_dict()` is whole."""
    module = args[0] if args else kwargs.get("module")
    return _whole(module) if is_sharded(module) else wrapped(*args, **kwargs)


def optim_state_dict(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """FullyShardedDataParallel.optim_state_dict(model, optim): whole on rank 0, empty on the others."""
    return _of_optimizer(wrapped, *args, **kwargs)


def optim_state_dict_to_load(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """FullyShardedDataParallel.optim_state_dict_to_load: what `optim.load_state_dict` takes."""
    return _for_optimizer(wrapped, *args, **kwargs)


def is_sharded(module: Any) -> bool:
    """By FSDP2."""
    return isinstance(module, FSDPModule)


@contextmanager
def _whole(module: Any) -> Iterator[None]:
    attributes = vars(module)

    def state_dict(*_: Any, **__: Any) -> dict[str, Any]:
        del attributes["state_dict"]  # torch asks the module for the sharded one
        try:
            return model_state(module)
        finally:
            attributes["state_dict"] = state_dict

    attributes["state_dict"] = state_dict
    try:
        yield
    finally:
        del attributes["state_dict"]


def model_state(module: nn.Module) -> dict[str, Any]:
    """The whole state dict on rank 0's CPU, a tensor at a time; empty on the other ranks. Collective."""
    pipeline = stages.of_model(module)
    if pipeline is None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(module, options=options)
    else:
        whole = collect.model_state(module, pipeline, _whole_tensor)
    first = {name: _alone(value) for name, value in whole.items()}
    return {name: first[same] for name, same in _first_names(module, list(first)).items()}


def _first_names(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Each name with the first one of the same parameter: a shared one is saved once, as the host does."""
    seen: dict[int, str] = {}
    held = dict(module.named_parameters(remove_duplicate=False))
    return {name: seen.setdefault(id(held.get(name, name)), name) for name in names}


def _alone(value: Any) -> Any:
    """A tensor without the padding behind it that uneven shards leave: safetensors refuses to save that."""
    if not isinstance(value, Tensor) or value.untyped_storage().nbytes() == value.nbytes:
        return value
    return value.clone()


def _of_optimizer(wrapped: Any, model: Any, optim: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_sharded(model):
        return wrapped(model, optim, *args, **kwargs)
    saved = getattr(optim, "optimizer", optim).state_dict()
    first, pipeline = dist.get_rank() == 0, stages.of_model(model)
    if pipeline is not None:
        owners = _owners(model, parameters_of(optim), pipeline)
        state = collect.optimizer_state(saved["state"], pipeline, owners, _whole_tensor)
        return {"state": state, "param_groups": saved["param_groups"]} if first else {}
    state = {}
    for index, entry in saved["state"].items():
        whole = {name: _gathered(value, keep=first) for name, value in entry.items()}
        if first:
            state[index] = whole
    return {"state": state, "param_groups": saved["param_groups"]} if first else {}


def _gathered(value: Any, *, keep: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    whole = _whole_tensor(value)
    return whole.detach().cpu() if keep else None


def _whole_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _owners(model: nn.Module, parameters: list[Tensor], pipeline: stages.Pipeline) -> dict[int, int]:
    """The stage of each place in the optimizer that is a block's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {place: pipeline.owned.get(names.get(id(p), "")) for place, p in enumerate(parameters)}
    return {place: owned.stage for place, owned in found.items() if owned is not None}


def _for_optimizer(
    wrapped: Any, model: Any, optim: Any, optim_state_dict: Mapping[str, Any], **kwargs: Any
) -> Any:
    if not is_sharded(model):
        return wrapped(model=model, optim=optim, optim_state_dict=optim_state_dict, **kwargs)
    parameters = parameters_of(optim)
    places = _places(model, parameters, optim_state_dict["state"])
    state = {
        places[key]: {name: like(value, parameters[places[key]]) for name, value in entry.items()}
        for key, entry in optim_state_dict["state"].items()
        if parameters[places[key]].numel()  # else another stage's
    }
    groups = [
        _group(*pair) for pair in zip(optim.param_groups, optim_state_dict["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": _numbered(groups)}


def parameters_of(optim: Any) -> list[Tensor]:
    """An optimizer's, in the order of their places."""
    return [parameter for group in optim.param_groups for parameter in group["params"]]


def _places(model: nn.Module, parameters: list[Tensor], state: Mapping[Any, Any]) -> dict[Any, int]:
    """Where each key of a saved state belongs: a number is the place itself, a name is looked up.

    Raises: ValueError: a key that this model and optimizer do not have.
    """
    named = dict(model.named_parameters())
    order = {id(parameter): place for place, parameter in enumerate(parameters)}
    places = {}
    for key in state:
        number = int(key) if str(key).isdigit() else order.get(id(named.get(str(key))), -1)
        if not 0 <= number < len(parameters):
            raise ValueError(
                f"layout: the checkpoint's optimizer has state for {key!r}, which is none of the "
                f"{len(parameters)} parameters of this one; it is of another model or another training mode"
            )
        places[key] = number
    return places


def like(value: Any, parameter: Tensor) -> Any:
    """A whole value as this rank holds it: its shard, on its device."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.ndim == 0:
        return value
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _group(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has made lists of tuples."""
    options = {
        name: tuple(value) if isinstance(live.get(name), tuple) else value
        for name, value in saved.items()
        if name != "params"
    }
    return {**options, "params": live["params"]}


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters as places, counted through all groups."""
    start, numbered = 0, []
    for group in groups:
        stop = start + len(group["params"])
        numbered.append({**group, "params": list(range(start, stop))})
        start = stop
    return numbered
