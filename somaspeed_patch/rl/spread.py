"""What trains, over the ranks of a layout: FSDP2 over its units, and whole again for whoever needs that.

The policy's units are the layouts'; one whose units are not known is one unit. The value head is one of its
own, so that all that trains is a DTensor of one mesh, and one norm is over everything. Acting, publishing and
checkpoints take whole weights; a rank that gathers one gathers it with all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.ranks import Ranks
from somaspeed_patch.rl.value_head import ValueHead

log = logging.getLogger(__name__)


def spread(policy: FlowPolicy, value_head: ValueHead, ranks: Ranks) -> None:
    """Let all ranks begin with rank 0's weights, split where the layout does; in place. Collective.

    A sharded policy computes velocities only; who acts needs a `twin`, made before.
    Raises: ValueError: the ranks' frozen weights differ.
    """
    if ranks.size == 1:
        return
    _check_frozen(policy, ranks)
    if not ranks.sharded:
        ranks.same([*policy.trainable().values(), *value_head.parameters()])
        return
    from somaspeed_patch.layouts import families, mesh
    from somaspeed_patch.layouts.families import Family
    from somaspeed_patch.layouts.shard import shard

    freeze_unused(policy)
    axes = mesh.build(ranks.layout, policy.device.type)
    family = families.of(policy.policy) or Family(name=policy.name, needs=(), units=())
    found = shard(policy.policy, family, ranks.layout, axes)
    mesh.attach(policy.policy, axes)
    shard(value_head, Family(name="value head", needs=(), units=()), ranks.layout, axes)
    _compute_in_units(policy)
    if ranks.leads:
        log.info("rl: %s; and the value head", found)


def freeze_unused(policy: FlowPolicy) -> None:
    """What nobody trains is frozen: whole, and the twin's as well. pi0.5's lm_head is 1 GiB in fp32."""
    trained = policy.trainable()
    for name, parameter in policy.policy.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def _check_frozen(policy: FlowPolicy, ranks: Ranks) -> None:
    told = ranks.each(policy.tag.backbone)
    odd = [number for number, each in enumerate(told) if each != told[0]]
    if odd:
        raise ValueError(
            f"rl: the frozen weights of rank {odd[0]} have digest {told[odd[0]]}, rank 0's {told[0]}; "
            "every rank has to load the same policy"
        )


def _compute_in_units(policy: FlowPolicy) -> None:
    """Few policies call their module, whose hooks gather what is in no unit: their methods run inside."""
    names = ["velocity"]
    if type(policy).pooled is not FlowPolicy.pooled:  # else it reads no weight
        names.append("pooled")
    for name in names:
        setattr(policy, name, _inside(policy.policy, getattr(policy, name)))


def _inside(root: Any, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    name = f"_somaspeed_{method.__name__}"
    setattr(root, name, method)
    register_fsdp_forward_method(root, name)
    gathered = getattr(root, name)

    @wraps(method)
    def run(*args: Any) -> Tensor:
        found: Tensor = gathered(*args)
        if not found.requires_grad:  # no backward will free what was gathered
            root.reshard()
        return found

    return run


def whole(tensor: Tensor) -> Tensor:
    """All of it, detached: itself, or gathered. Collective where it is split."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def like(value: Any, mine: Any) -> Any:
    """A whole tensor as this rank holds `mine`."""
    if not isinstance(mine, DTensor):
        return value
    from somaspeed_patch.layouts import states

    return states.like(value, mine)


def whole_state(state: Mapping[Any, Any], *, keep: bool) -> dict[Any, Any]:
    """A state dict with whole tensors on the CPU, one gathered after the other; without `keep` with none."""
    return {name: _whole_entry(each, keep=keep) for name, each in state.items()}


def _whole_entry(entry: Any, *, keep: bool) -> Any:
    if isinstance(entry, Mapping):
        return whole_state(entry, keep=keep)
    if not isinstance(entry, DTensor):
        return entry
    found = whole(entry)
    return found.cpu() if keep else None


def state_like(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state dict as this rank holds it."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    kept = {
        place: {name: like(each, held[place]) for name, each in entry.items()}
        for place, entry in state["state"].items()
    }
    return {**state, "state": kept}


def policy_state(policy: FlowPolicy) -> dict[str, Any] | None:
    """The whole state dict of a sharded policy on rank 0, nothing on the others; None: it is not sharded."""
    from somaspeed_patch.layouts import states

    return states.model_state(policy.policy) if states.is_sharded(policy.policy) else None


@contextmanager
def shown(policy: FlowPolicy, state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the policy's module says that this is its state dict; None: it speaks for itself."""
    if state is None:
        yield
        return
    attributes = vars(policy.policy)
    attributes["state_dict"] = lambda *_, **__: dict(state)  # who saves takes names out
    try:
        yield
    finally:
        del attributes["state_dict"]
