"""Frozen modules: are they really frozen, and a working copy whose weights are cast once.

Autocast casts the fp32 weight of a Linear or Conv to bf16 at every call; it caches the result only for
weights that require grad. For pi0.5's fp32 vision tower that is 2.5 GB of traffic a camera and step. The
copy shares every tensor with the host's module except those weights, so the state dict, the module tree and
the optimizer never see it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from somaspeed_patch import features, sites

_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv2d)


class FrozenCopy:
    """A copy of a frozen module for one autocast dtype, rebuilt when a weight of the original changes."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.versions = versions(module)
        self.module = _clone(module, {} if dtype is None else _cast(module, dtype), {})

    def fits(self, module: nn.Module, dtype: torch.dtype | None) -> bool:
        """Whether the copy still stands for `module` under autocast to `dtype`."""
        return self.dtype == dtype and self.versions == versions(module)


_copies: WeakKeyDictionary[nn.Module, FrozenCopy] = WeakKeyDictionary()


def working_copy(module: nn.Module, dtype: torch.dtype | None) -> Any:
    """The cached copy of `module` whose autocast weights are in `dtype` (None: share all of them)."""
    found = _copies.get(module)
    if found is None or not found.fits(module, dtype):
        found = _copies[module] = FrozenCopy(module, dtype)
    if found.module.training != module.training:
        found.module.train(module.training)
    return found.module


def under_autocast(module: Any, device: torch.device, site: str) -> Any:
    """A frozen module as it is, or where autocast is on its working copy; `cast_once` off: as it is.

    Args:
        site: the report's name for the place, where the copy counts as a call.
    """
    dtype = autocast_dtype(device) if features.value("cast_once") else None
    if dtype is None or module is None:
        return module
    sites.site(site).ran()
    return working_copy(module, dtype)


def release() -> None:
    """Drop every copy."""
    _copies.clear()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast is casting to on `device` right now, or None."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def why_not_frozen(module: nn.Module, cut_off: bool = False, sharded: bool = False) -> str | None:
    """Why `module` cannot be run once without gradient, or None.

    Args:
        cut_off: nothing of the loss reaches it, so its parameters may require a gradient that never comes.
        sharded: the caller runs layers through `layouts.units`, so their weights may be FSDP2's shards.
    """
    kinds = (nn.Parameter, DTensor) if sharded else (nn.Parameter,)
    if not any(_is_in_the_way(child, cut_off, kinds) for child in walk(module)):
        return None
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not cut_off:
            return f"{name} trains"
        if type(parameter) not in kinds:
            return f"{name} is a {type(parameter).__name__}, not a plain parameter"
    return next((why for why in map(_why_stateful, module.modules()) if why), None)


def walk(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, without names: `named_parameters()` took 9 ms of a pi0.5 step, this takes 1 ms."""
    stack = [module]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(child for child in current._modules.values() if child is not None)


def _is_in_the_way(module: nn.Module, cut_off: bool, kinds: tuple[type, ...]) -> bool:
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if (parameter.requires_grad and not cut_off) or type(parameter) not in kinds:
            return True
    return _why_stateful(module) is not None


def _why_stateful(module: nn.Module) -> str | None:
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout is active in the frozen side"
    if "_is_fsdp_managed_module" in vars(module):
        return "the frozen side is managed by FSDP1"
    return None


def versions(module: nn.Module) -> list[tuple[int, int, Any]]:
    """What changes when a parameter is replaced, moved, cast or written to in place."""
    return [
        (parameter.data_ptr(), parameter._version, parameter.dtype)
        for child in walk(module)
        for parameter in child._parameters.values()
        if parameter is not None
    ]


def _cast(module: nn.Module, dtype: torch.dtype) -> dict[int, nn.Parameter]:
    """The parameters that autocast would cast at every call, by id, each with its cast copy."""
    return {
        id(parameter): nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        for child in walk(module)
        if isinstance(child, _CAST_BY_AUTOCAST)
        for parameter in child._parameters.values()
        if parameter is not None and parameter.dtype == torch.float32
    }


def drop_recorders(hooks: MutableMapping[int, Any]) -> None:
    """Take transformers' hooks out of a module's forward hooks that hand its output to a call that asks.

    A native forward, such as an evaluation's, leaves them on the layers for good. Ours never asks, and each
    would break a compiled layer's graph.
    """
    for key, hook in list(hooks.items()):
        if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
            del hooks[key]


def _clone(module: Any, cast: dict[int, nn.Parameter], done: dict[int, Any]) -> Any:
    """`module` with modules of its own and the original's tensors, except those in `cast`.

    Not deepcopy: that would follow a hook that is a bound method into whatever object it is bound to.
    """
    if id(module) in done:
        return done[id(module)]
    clone = done[id(module)] = object.__new__(type(module))
    state = {
        name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()
    }
    state.pop("_compiled_call_impl", None)  # bound to the original
    drop_recorders(state["_forward_hooks"])
    state["_parameters"] = {name: cast.get(id(p), p) for name, p in module._parameters.items()}
    state["_modules"] = {
        name: None if child is None else _clone(child, cast, done) for name, child in module._modules.items()
    }
    vars(clone).update(state)
    return clone
