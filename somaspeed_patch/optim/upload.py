"""Small rows of numbers that the host writes and the kernels read, uploaded only when they changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Row:
    """A tensor on the device and what was last written to it.

    The copy is asynchronous, from pinned memory that torch's host allocator keeps until it was read.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._written: list[Any] | None = None

    def write(self, values: list[Any]) -> bool:
        """Upload these values; False if they were the last ones written."""
        if values == self._written:
            return False
        host = torch.tensor(values, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda)
        self.tensor.copy_(host.view(self.tensor.shape), non_blocking=True)
        self._written = values
        return True


class CapturedRows:
    """Rows whose upload is part of a CUDA graph, which repeats it at every replay.

    Each has a tensor of its own, which no eager step overwrites, and pinned memory that stays with this
    object. Memory cannot be pinned while a stream is captured: one buffer is always held ready.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._used: list[Tensor] = []
        self._spare: Tensor | None = None

    def prepare(self) -> None:
        """Pin the next buffer, unless there is one."""
        if self._spare is None and self._like.is_cuda:
            self._spare = torch.empty_like(self._like, device="cpu", pin_memory=True)

    def write(self, values: list[Any]) -> Tensor:
        """A new row on the device with these values.

        Raises: RuntimeError: no step was run since the last capture.
        """
        if self._spare is None:
            raise RuntimeError(
                "FusedAdamW: run one step before each capture of a CUDA graph, as torch.cuda.graph asks for"
            )
        host, self._spare = self._spare, None
        self._used.append(host)
        host.copy_(torch.tensor(values, dtype=host.dtype))
        return torch.empty_like(self._like).copy_(host, non_blocking=True)
