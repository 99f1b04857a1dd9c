"""CUDA graphs of a computation over named tensors: recorded once a shape, then replayed in one launch.

At 32 chunks of 10 actions the Gemma expert's forward and backward are some thousand kernels of a few
microseconds, and Python is slower than the GPU. A replay runs the recorded kernels on the memory they were
recorded with: inputs are copied in, weights are read where they lie, so whoever updates them in place is
seen. A weight or gradient that lies elsewhere than before makes a new recording.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch import recorded

log = logging.getLogger(__name__)

Computation = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
_WARM_UP = 2  # calls: the first makes gradients and lets Triton tune, the second is what will be recorded
_recording = threading.Lock()  # one recording at a time: rollout and learner are threads of one process


@dataclass(frozen=True, kw_only=True)
class _Recording:
    graph: Any
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Graphed:
    """A computation that is replayed where it can be, and called where it cannot; not thread-safe.

    A computation may add to gradients. It must not wait for the device, draw random numbers or keep tensors.
    """

    def __init__(
        self, computation: Computation, parameters: Iterable[Tensor], name: str, *, gradients: bool = False
    ) -> None:
        """Nothing is recorded yet.

        Args:
            parameters: what the computation reads.
            name: for the log.
            gradients: it adds to those of the parameters.
        """
        self._computation, self._parameters, self._name = computation, list(parameters), name
        self._gradients = gradients
        self._recordings: dict[Any, _Recording | None] = {}
        self._places: tuple[int, ...] = ()
        self._pool: Any = None
        self.replays = 0
        """calls that were replays"""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the computation gives; copies that later calls leave alone."""
        if self._places != (places := self._where()):
            self._recordings.clear()
            self._pool = None  # torch has given up the memory of recordings that are no more
        shapes = tuple((name, each.shape, each.dtype) for name, each in inputs.items())
        if shapes not in self._recordings:
            self._recordings[shapes] = self._recorded(inputs)
            places = self._where()
        self._places = places
        recording = self._recordings[shapes]
        if recording is None:
            return self._computation(inputs)
        for name, each in recording.inputs.items():
            each.copy_(inputs[name])
        recording.graph.replay()
        self.replays += 1
        return {name: each.clone() for name, each in recording.outputs.items()}

    def _where(self) -> tuple[int, ...]:
        """Addresses of weights, and of gradients where they are written."""
        weights = tuple(each.data_ptr() for each in self._parameters)
        return (*weights, *(0 if each is None else each.data_ptr() for each in self._grads()))

    def _grads(self) -> list[Tensor | None]:
        return [each.grad for each in self._parameters] if self._gradients else []

    def _recorded(self, inputs: Mapping[str, Tensor]) -> _Recording | None:
        """Gradients are afterwards what they were; those that were none and get one are zero."""
        before = [None if each is None else each.clone() for each in self._grads()]
        try:
            with _recording:
                return self._record({name: each.clone() for name, each in inputs.items()})
        except RuntimeError as error:  # a computation that waits for the device; also out of memory
            log.warning("rl: the %s runs without a CUDA graph: %s", self._name, error)
            return None
        finally:
            self._restore(before)

    def _record(self, inputs: dict[str, Tensor]) -> _Recording:
        device = next(iter(inputs.values())).device
        warm = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream(device))
        with recorded.remembering():
            with torch.cuda.stream(warm):
                for _ in range(_WARM_UP):
                    self._computation(inputs)
            torch.cuda.current_stream(device).wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:  # one for all shapes: only one recording at a time is replayed
                self._pool = torch.cuda.graph_pool_handle()
            # thread_local: what the other thread asks of the GPU meanwhile is no error of this recording
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._computation(inputs)
        return _Recording(graph=graph, inputs=inputs, outputs=outputs)

    def _restore(self, before: list[Tensor | None]) -> None:
        for now, old in zip(self._grads(), before, strict=True):
            if now is not None and old is not None:
                now.copy_(old)
            elif now is not None:
                now.zero_()
