"""The optimizer's state, kept as torch keeps it, in the dtype and element order the kernels need."""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.optim import shards
from somaspeed_patch.optim.gradients import same_objects, same_order
from somaspeed_patch.optim.options import Options

MOMENTS = ("exp_avg", "exp_avg_sq")
_address = Tensor.data_ptr
_step = operator.itemgetter("step")
State = MutableMapping[Tensor, dict[str, Any]]


def adopt_steps(state: State, params: Sequence[Tensor], steps: Tensor) -> list[Tensor]:
    """Copy the step counts of `state` into the vector `steps` [N] and put views of it in their place.

    Returns: the view of every parameter, also of those without a state yet.
    """
    views = list(steps)
    with_state = [i for i, param in enumerate(params) if state.get(param)]
    if with_state:
        counts = [torch.as_tensor(state[params[i]]["step"]) for i in with_state]
        found = torch.stack([count.detach().to(steps.device, steps.dtype).reshape(()) for count in counts])
        steps[torch.tensor(with_state, device=steps.device)] = found
    for i in with_state:
        state[params[i]]["step"] = views[i]
    return views


def prepare(entry: dict[str, Any], param: Tensor, layout: Tensor, step: Tensor, options: Options) -> None:
    """Complete one parameter's state: `step`, `exp_avg`, `exp_avg_sq`, and `master` where it has one.

    Args:
        entry: its state; empty before its first step.
        layout: a tensor with the element order that the local part is updated in.
        step: what becomes `step` of an empty entry.
    """
    if not entry:
        entry["step"] = step
        for name in MOMENTS:
            dtype = options.moments(param.dtype)
            entry[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    for name in MOMENTS:
        entry[name] = _as(entry[name], param, layout, options.moments(param.dtype))
    if options.has_master(param.dtype):
        entry["master"] = _as(entry.get("master", param.detach()), param, layout, torch.float32)


def _as(value: Tensor, param: Tensor, layout: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == dtype and value.device == param.device and same_order(shards.local(value), layout):
        return value
    fresh = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return fresh.copy_(value).detach()


class Bound:
    """The state that a set of tables was made for: whether it is still there, and where.

    Its tensors are compared by address and not held: who moves the state to the host wants its memory freed.
    """

    def __init__(self, state: State, params: Sequence[Tensor], options: Options, distributed: bool) -> None:
        self._state, self._entries = state, list(state.values())
        self._active = [state[param] for param in params]
        self._steps = list(map(_step, self._active))
        self._getters: list[Callable[[dict[str, Any]], Any]] = [*map(operator.itemgetter, MOMENTS)]
        if options.master_weights:
            self._getters.append(operator.methodcaller("get", "master"))
        self._plain = not distributed and not options.master_weights
        self.addresses = self._find()
        """A list a moment, and one of the master weights if there are any; 0 where a parameter has none."""

    def holds(self) -> bool:
        """Whether the state consists of the same entries, with the same steps, at the same addresses."""
        try:
            return (
                same_objects(self._state.values(), self._entries)
                and same_objects(list(map(_step, self._active)), self._steps)
                and self._find() == self.addresses
            )
        except KeyError:  # somebody took something away
            return False

    def _find(self) -> list[list[int]]:
        if self._plain:
            return [list(map(_address, map(get, self._active))) for get in self._getters]
        found = [map(get, self._active) for get in self._getters]
        return [[0 if one is None else _address(shards.local(one)) for one in row] for row in found]
