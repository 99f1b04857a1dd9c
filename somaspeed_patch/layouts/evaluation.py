"""The main process evaluates alone, as LeRobot does it, while the others hold shards of its weights.

LeRobot rolls out a policy on the main process; the other ranks wait in `Accelerator.wait_for_everyone`. So
that is where they listen: the main process tells them to gather all weights with it, then rolls out without
another word, and tells them to go back to shards. Every rank holds the whole policy meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from somaspeed_patch.layouts import gathering, mesh

GO_ON, GATHER, SHARD = range(3)


def wait_for_everyone(
    wrapped: Any, accelerator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Accelerator.wait_for_everyone: do what the main process asks for until it is here, too."""
    model = _sharded(accelerator)
    if model is not None:
        if accelerator.is_main_process:
            _tell(accelerator.device, GO_ON)
        else:
            _listen(accelerator.device, model)
    return wrapped(*args, **kwargs)


def eval_policy(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """lerobot_eval.eval_policy(env, policy, ...): with whole weights, where the policy is in shards."""
    policy = kwargs["policy"] if "policy" in kwargs else args[1]
    if mesh.of(policy) is None:
        return wrapped(*args, **kwargs)
    with whole_weights(policy):
        return wrapped(*args, **kwargs)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Gather all weights, on the main process alone, while all others are in `wait_for_everyone`.

    Raises: ValueError: the model's layers themselves are spread, so that no rank can run it alone.
    """
    axes, device = mesh.of(model), next(model.parameters()).device
    if axes is not None and axes["tp"].size() * axes["pp"].size() > 1:
        raise ValueError(
            "layout: with tp or pp no rank can evaluate alone; use --env_eval_freq=0 and lerobot-eval on a "
            "checkpoint"
        )
    _tell(device, GATHER)
    kept = gathering.gather(model)
    try:
        yield
    finally:
        _tell(device, SHARD)
        gathering.shard(kept)


def _sharded(accelerator: Any) -> Any:
    if mesh.of(accelerator) is None:
        return None
    return next((model for model in accelerator._models if isinstance(model, FSDPModule)), None)


def _listen(device: torch.device, model: nn.Module) -> None:
    kept: gathering.Kept = []
    while (command := _tell(device, GO_ON)) != GO_ON:
        if command == GATHER:
            kept = gathering.gather(model)
        else:
            gathering.shard(kept)


def _tell(device: torch.device, command: int) -> int:
    """The main process's command, on every rank."""
    message = torch.tensor(command, device=device)
    dist.broadcast(message, src=0)
    return int(message)
