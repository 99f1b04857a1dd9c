"""Where everything is that a step needs: parameters, moments, step counts, and the kernels' tables of them.

A slot is a parameter of the optimizer; those summed over the same process groups lie side by side. It is
active while its parameter has a gradient. Nothing is assumed to have stayed where it was: `holds` compares
objects and addresses at each clip and step, and a plan that no longer holds is made anew.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import moments, nonfinite, shards
from somaspeed_patch.optim.gradients import Gradients, same_objects, same_order
from somaspeed_patch.optim.options import Options
from somaspeed_patch.optim.upload import CapturedRows, Row

_address = Tensor.data_ptr
_grad = operator.attrgetter("grad")


class Plan:
    """The tables for the parameters of `groups`, all on `device`, and their `state`."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], state: moments.State, options: Options, device: torch.device
    ) -> None:
        self._options, self._state, self.device = options, state, device
        self.listed = [param for group in groups for param in group["params"]]
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        sums = [shards.reduction(param) for param in self.listed]
        first = {key: place for place, key in reversed(list(enumerate(sums)))}
        self.index = sorted(range(len(sums)), key=lambda place: first[sums[place]])
        """Of each slot: its parameter's place in the optimizer."""
        self.params = [self.listed[place] for place in self.index]
        self._numbers = [numbers[place] for place in self.index]
        self._sums = shards.neighbours([sums[place] for place in self.index])
        self.distributed = any(shards.local(param) is not param for param in self.params)
        self.steps = torch.zeros(len(sums), dtype=torch.float32, device=device)
        self._views = moments.adopt_steps(state, self.params, self.steps)
        self.gradients = Gradients()
        self._row = Row((len(sums),), torch.int64, device)
        self._captured = CapturedRows(self._row.tensor)
        self._last_row: Tensor | None = None
        self.hyper = Row((len(groups), 8), torch.float64, device)
        self._pattern: list[bool] = []
        self._bound: moments.Bound | None = None

    def holds(self, params: Sequence[Tensor], state: moments.State, with_state: bool) -> bool:
        """Whether the tables are of these parameters, in this order, at these addresses.

        Args:
            with_state: look at the state, too: `step` needs it, the norm does not.
        """
        same = state is self._state and same_objects(params, self.listed)
        if not same or params[0].device != self.device:
            return False
        if self._bound is None or not with_state:
            return True
        return self._find() == self._addresses and self._bound.holds()

    def refresh(self) -> bool:
        """Look at the parameters' gradients as they are now; False if there are none."""
        grads = list(map(_grad, self.params))
        pattern = list(map(operator.is_not, grads, repeat(None)))
        if pattern != self._pattern:
            self._activate(pattern)
        present = grads if all(pattern) else [grad for grad in grads if grad is not None]
        self.gradients.take(present, self.active, self.distributed)
        if self.gradients.dtypes != self._dtypes:
            self._tile()
        return bool(present)

    def gradient_row(self, unchanged: bool = False) -> Tensor:
        """[N] int64: where the kernels read each gradient; 0 for a slot without one.

        Args:
            unchanged: these are the very gradients of the last call.
        """
        if unchanged and self._last_row is not None:
            return self._last_row
        values = self._spread(self.gradients.addresses(self._layouts, self._all_contiguous))
        if self.capturing():
            row = self._captured.write(values)
        else:
            self._row.write(values)
            row = self._row.tensor
        self._last_row = row
        return row

    def release(self) -> None:
        """The step is done: hold no gradient's memory."""
        self.gradients.drop()
        self._last_row = None

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def prepare_capture(self) -> None:
        """What has to exist before the next CUDA graph can be captured."""
        if not self.capturing():
            self._captured.prepare()

    def sum_squares(self) -> None:
        """Add up the squared norms over the ranks that hold other parts of a parameter."""
        shards.all_reduce(self.tables.squares, self._sums)

    def gather_copies(self) -> None:
        """Read the parameters that are not dense into the copies that are updated in their place."""
        for slot, copy in self._copies.items():
            copy.copy_(shards.local(self.params[slot]))

    def scatter_copies(self) -> None:
        """Write those copies back."""
        for slot, copy in self._copies.items():
            shards.local(self.params[slot]).copy_(copy)

    def name_nonfinite(self, squares: Tensor, groups: Sequence[dict[str, Any]]) -> str | None:
        """The first parameter, in the optimizer's order, whose entry of `squares` [N] is not finite."""
        slot = nonfinite.first(squares, self.index)
        return None if slot is None else self.name(slot, groups)

    def name(self, slot: int, groups: Sequence[dict[str, Any]]) -> str:
        """A parameter's name, or where it stands and its shape."""
        group = groups[self._numbers[slot]]
        place = self.index[slot] - sum(len(one["params"]) for one in groups[: self._numbers[slot]])
        if "param_names" in group:
            return str(group["param_names"][place])
        return f"parameter {place} of group {self._numbers[slot]}, shape {list(self.params[slot].shape)}"

    def _activate(self, pattern: list[bool]) -> None:
        self._slots = [slot for slot, active in enumerate(pattern) if active]
        self.active = [self.params[slot] for slot in self._slots]
        parts = {slot: shards.local(self.params[slot].detach()) for slot in self._slots}
        # without memory: who moves the parameters to the host wants theirs freed
        self._layouts = [torch.empty_like(part, device="meta") for part in parts.values()]
        self._all_contiguous = all(layout.is_contiguous() for layout in self._layouts)
        self._copies = {
            slot: torch.empty_like(part)
            for (slot, part), layout in zip(parts.items(), self._layouts, strict=True)
            if not same_order(part, layout)
        }
        self._pattern = pattern
        self._dtypes: list[torch.dtype] | None = None
        self._bound = None

    def bind(self) -> None:
        """Complete the state of the active parameters; only a step may, as in torch."""
        if self._bound is not None:
            return
        for slot, layout in zip(self._slots, self._layouts, strict=True):
            param = self.params[slot]
            moments.prepare(self._state[param], param, layout, self._views[slot], self._options)
        self._bound = moments.Bound(self._state, self.active, self._options, self.distributed)
        self._addresses = self._find()
        self.pointers = self._point(self._bound.addresses)

    def _find(self) -> list[int]:
        return list(map(_address, map(shards.local, self.active) if self.distributed else self.active))

    def _point(self, of_state: list[list[int]]) -> Tensor:
        """[4, N] int64: what is updated of each slot: parameter (or its copy), moments, master weight."""
        params = [
            _address(self._copies.get(slot, shards.local(param)))
            for slot, param in zip(self._slots, self.active, strict=True)
        ]
        rows = [params, *of_state]
        rows += [[0] * len(params)] * (4 - len(rows))
        return torch.tensor([self._spread(row) for row in rows]).to(self.device)

    def _spread(self, values: list[int]) -> list[int]:
        """Values of the active slots -> of all slots, 0 where there is none."""
        if len(values) == len(self.params):
            return values
        row = [0] * len(self.params)
        for slot, value in zip(self._slots, values, strict=True):
            row[slot] = value
        return row

    def _tile(self) -> None:
        grads = dict(zip(self._slots, self.gradients.dtypes, strict=True))
        slots = [self._slot(slot, grads.get(slot)) for slot in range(len(self.params))]
        self.tables = adamw.make_tables(slots, self.device)
        self._dtypes = self.gradients.dtypes

    def _slot(self, slot: int, grad: torch.dtype | None) -> adamw.Slot:
        param, kind = self.params[slot], adamw.UNUSED
        if grad is not None and grad not in adamw.CODES:
            raise RuntimeError(
                f"FusedAdamW: gradients must be one of {list(adamw.CODES)}, but one of shape "
                f"{list(param.shape)} is {grad}"
            )
        if grad is not None:
            options = self._options
            kind = adamw.kind(
                param.dtype, grad, options.moments(param.dtype), options.has_master(param.dtype)
            )
        return adamw.Slot(
            numel=shards.local(param).numel(),
            kind=kind,
            group=self._numbers[slot],
            start=shards.start(param),
            identity=self.index[slot],
        )
