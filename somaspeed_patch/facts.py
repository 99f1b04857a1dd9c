"""What the CPU knew about a tensor, riding along on the tensor, so that no step has to ask the device for it.

LeRobot's preprocessing ends on the CPU and then moves its tensors. How long the longest prompt is, how many
images a sample has, whether a mask is all ones: reading those back from the GPU is a synchronization that
the CPU, which had the values a moment ago, can spare. A fact belongs to one tensor object and to its values:
what is written into in place afterwards has lost its facts.

`pack` and `unpack` take the facts of a whole batch through a data-loader worker's queue, where tensors lose
their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

BATCH_KEY = "somaspeed_facts"  # where a packed batch carries its facts
TWIN = "twin"  # the fact that is the tensor's own values, on the CPU
LARGEST_TWIN = 8 << 20  # bytes: 256 samples of MolmoAct2's pooling indices are 3.2 MB

_ATTRIBUTE = "somaspeed_facts"


class Facts:
    """The facts of one batch by key; an object, because collating, pinning and moving leave those alone."""

    def __init__(self, by_key: Mapping[str, Mapping[str, Any]]) -> None:
        self.by_key = by_key


def attach(tensor: Tensor, name: str, value: Any) -> None:
    """Let a tensor carry one more fact."""
    known = _of(tensor) or {}
    setattr(tensor, _ATTRIBUTE, (_version(tensor), {**known, name: value}))


def get(tensor: Tensor, name: str) -> Any:
    """A fact the tensor carries, or None."""
    known = _of(tensor)
    return None if known is None else known.get(name)


def copy(source: Tensor, target: Tensor) -> None:
    """Carry all facts over to a tensor of the same values."""
    known = _of(source)
    if known is not None:
        setattr(target, _ATTRIBUTE, (_version(target), dict(known)))


def on_cpu(tensor: Tensor) -> Tensor:
    """The tensor's values on the CPU: itself, its twin, or else one transfer, which waits for the device.

    What was transferred is the tensor's twin from then on: a step asks for the same indices several times.
    """
    if tensor.device.type == "cpu":
        return tensor
    twin: Tensor | None = get(tensor, TWIN)
    if twin is None:
        twin = tensor.cpu()
        if not tensor.is_inference():  # writes into one are not counted, so its twin could not be told old
            attach(tensor, TWIN, twin)
    return twin


def has_twin(tensor: Tensor) -> bool:
    """Whether `on_cpu` costs nothing."""
    return tensor.device.type == "cpu" or get(tensor, TWIN) is not None


def moved(before: Any, after: Any) -> None:
    """`after` is `before` on another device: it keeps the facts, and small integer tensors keep a twin."""
    if after is before or not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return
    copy(before, after)
    if before.device.type == "cpu" and after.device.type != "cpu" and _may_have_twin(before):
        attach(after, TWIN, before)


def to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, with its facts, and with its twin if it is a small one of integers."""
    after = tensor.to(device)
    moved(tensor, after)
    return after


def pack(batch: MutableMapping[str, Any]) -> None:
    """Put what the batch's CPU tensors know, and the twins of the small ones, under BATCH_KEY."""
    found: dict[str, Mapping[str, Any]] = {}
    for key, value in batch.items():
        if isinstance(value, Tensor):
            twin = {TWIN: value.clone()} if _may_have_twin(value) else {}
            known = {**(_of(value) or {}), **twin}
            if known:
                found[key] = known
    batch[BATCH_KEY] = Facts(found)


def unpack(batch: MutableMapping[str, Any]) -> None:
    """Take BATCH_KEY out of the batch and give its tensors their facts back."""
    if not isinstance(batch.get(BATCH_KEY), Facts):
        return
    for key, known in batch.pop(BATCH_KEY).by_key.items():
        tensor = batch.get(key)
        if isinstance(tensor, Tensor):
            setattr(tensor, _ATTRIBUTE, (_version(tensor), dict(known)))


def _of(tensor: Tensor) -> dict[str, Any] | None:
    version, known = getattr(tensor, _ATTRIBUTE, (None, None))
    return known if version == _version(tensor) else None


def _version(tensor: Tensor) -> int | None:
    """How often the tensor was written into; None of a tensor of inference mode, which does not count it."""
    return None if tensor.is_inference() else tensor._version


def _may_have_twin(tensor: Tensor) -> bool:
    """Indices and masks; bytes are images, which nobody asks back for and which would cross a queue twice."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.uint8)
    return whole and tensor.layout == torch.strided and tensor.nbytes <= LARGEST_TWIN
