"""What the learner publishes and the rollout takes over: the weights of policy and critic that train."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from somaspeed_patch.rl import spread
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.value_head import ValueHead


def of(policy: FlowPolicy, value_head: ValueHead) -> dict[str, Tensor]:
    """By name; the weights themselves, not copies."""
    critic = {f"value_head.{name}": each for name, each in value_head.state_dict().items()}
    return {**policy.trainable(), **critic}


def snapshot(
    policy: FlowPolicy, value_head: ValueHead, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A copy on a device, which later updates do not touch; whole. All ranks of a sharded policy call it."""
    return {name: spread.whole(each).to(device, copy=True) for name, each in of(policy, value_head).items()}


def whole(policy: FlowPolicy, value_head: ValueHead) -> dict[str, Tensor]:
    """The weights themselves, or gathered where they are sharded; then all ranks have to call it."""
    return {name: spread.whole(each) for name, each in of(policy, value_head).items()}


def load(policy: FlowPolicy, value_head: ValueHead, heads: Mapping[str, Tensor]) -> None:
    """Take over published weights, all of them or none; a sharded policy takes its part of them.

    Raises: ValueError: a weight is missing, unknown, or of another shape or dtype.
    """
    own = of(policy, value_head)
    odd = sorted(own.keys() ^ heads.keys())
    if odd:
        raise ValueError(f"heads: {odd[0]} is in only one of the published weights and this policy")
    for name, mine in own.items():
        given = heads[name]
        if mine.shape != given.shape or mine.dtype != given.dtype:
            raise ValueError(f"heads: {name} must be {_shown(mine)}, but is {_shown(given)}")
    with torch.no_grad():
        for name, mine in own.items():
            mine.copy_(spread.like(heads[name], mine))


def _shown(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
