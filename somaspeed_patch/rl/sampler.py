"""Action chunks and values of encoded observations; on a GPU by replaying CUDA graphs.

A graph is of one shape, so a batch is padded: samples to the next power of two, tokens to the next 64. K
evaluations of a chunk wait for Python, not for the GPU: the samples that are computed for nothing are free.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from somaspeed_patch.rl.features import Features, below, repeated
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.flow_sde import Draws, Flow, Sample
from somaspeed_patch.rl.graphs import Graphed
from somaspeed_patch.rl.value_head import ValueHead

_TOKENS = 64


class Sampler:
    """Of one policy and critic, whose weights may be updated in place."""

    def __init__(self, policy: FlowPolicy, value_head: ValueHead, flow: Flow, *, graphs: bool) -> None:
        self._policy, self._value_head, self._flow = policy, value_head, flow
        self._graphed = graphs and policy.device.type == "cuda"
        read = [*policy.trainable().values(), *value_head.parameters()]
        self.graph = Graphed(self._computed, read, "sampler")

    def __call__(self, encoded: Features, draws: Draws) -> tuple[Sample, Tensor]:
        """Chunks and values [B] on the policy's device, each sample with its own draws."""
        count = len(encoded.length)
        draws = draws.to(self._policy.device)
        if self._graphed:
            rows, tokens = _ceiling(count), -(-encoded.tokens_per_sample // _TOKENS) * _TOKENS
            encoded = encoded.padded(rows, tokens)
            draws = draws.mapped(lambda each: repeated(each, rows))
        compute = self.graph if self._graphed else self._computed
        found = compute({**encoded.tensors(), **_named(draws)})
        cut = {name: each[:count] for name, each in found.items()}
        values = cut.pop("value")
        return Sample(**cut), values

    @torch.no_grad()
    def _computed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        encoded, draws = Features.of(tensors), Draws(**below("draws/", tensors))
        sample = self._policy.sample(encoded, self._flow, draws)
        values = self._value_head(self._policy.pooled(encoded))
        return {**vars(sample), "value": values}


def _named(draws: Draws) -> dict[str, Tensor]:
    return {f"draws/{name}": each for name, each in vars(draws).items()}


def _ceiling(count: int) -> int:
    """The next power of two."""
    return int(1 << (count - 1).bit_length())
