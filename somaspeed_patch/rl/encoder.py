"""Encoding what environments see; few observations at once by replaying CUDA graphs.

pi0.5's 27 vision and 18 language layers are some thousand kernels, which Python takes 48 ms to launch; of one
observation the GPU is done in 9 ms, of four in 25 (H200). Environments that do not wait for each other ask
for one to four.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from somaspeed_patch.rl.features import Features, repeated
from somaspeed_patch.rl.flow_policy import FlowPolicy, Recordable
from somaspeed_patch.rl.graphs import Computation, Graphed

MOST = 8
"""observations: with more the GPU takes longer than Python, 48 and 57 ms at 8"""
_SIZES = (1, 2, 4, 6, MOST)  # rows computed: torch.compile takes 8 shapes, with those of the learner


class Encoder:
    """Of one policy, whose frozen weights may be exchanged."""

    def __init__(self, policy: FlowPolicy, *, graphs: bool) -> None:
        self._policy = policy
        self.graphed = graphs and policy.graphed_encoding and policy.device.type == "cuda"
        """whether batches of up to `MOST` are replayed"""
        self._module: nn.Module | None = None
        self._graphs: dict[Hashable, Graphed] = {}

    def __call__(self, batch: Mapping[str, Any], count: int) -> Features:
        """What `FlowPolicy.encode` gives of a batch of `count`."""
        found = self._policy.recordable(batch) if self.graphed and count <= MOST else None
        return self._policy.encode(batch) if found is None else self._replayed(found, count)

    @property
    def replays(self) -> int:
        """Batches that were replays, of the weights as they are."""
        return sum(each.replays for each in self._graphs.values())

    def _replayed(self, found: Recordable, count: int) -> Features:
        if found.module is not self._module:  # recordings read the memory of the one before
            self._module, self._graphs = found.module, {}
        if found.key not in self._graphs:
            self._graphs[found.key] = Graphed(_named(found.encode), found.module.parameters(), "encoder")
        rows = next(size for size in _SIZES if size >= count)
        tensors = {name: repeated(each, rows) for name, each in found.tensors.items()}
        return Features.of(self._graphs[found.key](tensors)).first(count)


def _named(encode: Callable[[Mapping[str, Tensor]], Features]) -> Computation:
    """As a graph's computation; nothing of the batch it was first asked for is kept."""

    def compute(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return encode(tensors).tensors()

    return compute
