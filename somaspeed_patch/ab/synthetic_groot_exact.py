"""GR00T N1.7 in fp32 with the draws of its low-precision self: the truth for the gate of `--synthetic`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def in_float32(policy: Any) -> Any:
    """A copy of a GrootPolicy that computes in fp32.

    The host casts what it is given to the dtype of the backbone's weights and draws noise in it; so do times
    end in it, and from them the index of the time embedding. The copy takes all of these, and the masks of
    dropout, as its original has them: what the gate allows then does not include other inputs.
    """
    exact = copy.deepcopy(policy).float()
    exact.config.use_bf16 = False
    masks = torch.bfloat16 if policy.config.use_bf16 else torch.float32
    _follow(exact._groot_model, policy._groot_model.dtype, masks)
    return exact


def _follow(model: Any, low: torch.dtype, masks: torch.dtype) -> None:
    """Let a GR00TN17 in fp32 take inputs and draws in dtype `low`, and dropout's masks in `masks`."""
    head, drawn = model.action_head, _Draws(low, masks)
    prepare, forward, sample_time = model.prepare_input, head.forward, head.sample_time
    buckets: list[Tensor] = []

    def prepare_rounded(inputs: Mapping[str, Any]) -> Any:
        return prepare({name: _rounded(value, low) for name, value in inputs.items()})

    def forward_with_draws(*args: Any, **kwargs: Any) -> Any:
        with drawn:
            return forward(*args, **kwargs)

    def sample_low(batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        times: Tensor = sample_time(batch_size, device=device, dtype=low)
        buckets[:] = [(times * head.num_timestep_buckets).long()]
        return times.to(dtype)

    vars(model)["prepare_input"] = prepare_rounded
    vars(head).update(forward=forward_with_draws, sample_time=sample_low)
    head.action_encoder.register_forward_pre_hook(lambda _, args: (args[0], buckets[0], args[2]))
    head.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "timestep": buckets[0]}), with_kwargs=True
    )


def _rounded(value: Any, low: torch.dtype) -> Any:
    return value.to(low) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Draws(TorchFunctionMode):
    """Random numbers drawn in other dtypes than they are used in: another dtype can be another draw."""

    def __init__(self, noise: torch.dtype, masks: torch.dtype) -> None:
        super().__init__()
        self.noise, self.masks = noise, masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch.randn and dropout, and everything else as it is."""
        options = kwargs or {}
        if func is torch.randn:
            return func(*args, **{**options, "dtype": self.noise}).to(options["dtype"])
        if func is F.dropout:
            return self._dropout(*args, **options)
        return func(*args, **options)

    def _dropout(
        self, states: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        kept = F.dropout(torch.ones_like(states, dtype=self.masks), p, training)
        return states * kept.to(states.dtype)
