"""LeRobot's MolmoAct2: the language model encodes, the action expert learns from its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from somaspeed_patch.molmoact2 import context, flow, forward, refusals
from somaspeed_patch.molmoact2.expert import Rows
from somaspeed_patch.rl.features import Features, leading, packed
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.value_head import masked_mean

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PADDED = "action_dim_is_pad"


class MolmoAct2Flow(FlowPolicy):
    """MolmoAct2Policy with `train_action_expert_only`. A sample of 504 tokens takes 71 MiB in bf16."""

    name: ClassVar[str] = "molmoact2"

    @property
    def shape(self) -> tuple[int, int]:
        """The generated chunk and the padded action."""
        return self._host._generation_action_horizon(), int(self._host._backbone().config.max_action_dim)

    @property
    def value_width(self) -> int:
        """The language model's width."""
        return int(self._host._backbone().transformer.config.hidden_size)

    def _refusal(self) -> str | None:
        why = refusals.of_pipeline(self.policy)
        if why is None and any("action_expert" not in name for name in self.trainable()):
            return "more than the action expert trains"
        gated = getattr(self._host._backbone(), "action_expert_depth_gate", None) is not None
        return "the context has a depth gate" if why is None and gated else why

    def _layout(self) -> str:
        config = self._host._backbone().transformer.config
        return f"{config.num_hidden_layers} layers x {config.num_key_value_heads} x {config.head_dim}"

    def _inference_dtype(self) -> torch.dtype | None:
        return _HALF.get(str(self._host.config.model_dtype).removeprefix("torch."))

    def _encode(self, batch: Mapping[str, Any]) -> Features:
        inputs = self._host._model_inputs(batch)
        found = forward.encode(self.policy, inputs, need_hidden=True)
        valid = self._host._encoder_attention_mask_for_action_expert(
            input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask")
        )
        keys, values = (_stacked(each) for each in (found.keys, found.values))
        hidden = found.hidden
        if hidden is None:
            raise RuntimeError("molmoact2: the context came without the hidden states that were asked for")
        valid = torch.ones(hidden.shape[:2], dtype=torch.bool) if valid is None else valid.bool()
        valid = valid.to(hidden.device)
        return Features(
            tokens={"key": packed(keys, valid), "value": packed(values, valid)},
            length=valid.sum(1, dtype=torch.int32),
            fixed={"pooled": masked_mean(hidden, valid), "keep": self._real(batch, hidden)},
        )

    def _real(self, batch: Mapping[str, Any], hidden: Tensor) -> Tensor:
        """[B, A] fp32, 0 where the policy masks a padded action dimension."""
        found = torch.ones(len(hidden), self.shape[1], device=hidden.device)
        padded = batch.get(_PADDED)
        if not self._host.config.mask_action_dim_padding or padded is None:
            return found
        return found.masked_fill(padded.to(hidden.device).bool().expand_as(found), 0)

    def _kept(self, encoded: Features) -> Tensor | None:
        return encoded.fixed["keep"][:, None]

    def _velocity(self, encoded: Features, x: Tensor, s: Tensor) -> Tensor:
        keys, values = encoded.tokens["key"], encoded.tokens["value"]
        found = context.Context(keys=list(keys), values=list(values), hidden=None)
        predicted = forward.velocity(self.policy, found, self._rows(encoded, x, 1 - s), x)
        return -predicted * encoded.fixed["keep"][:, None]

    def _rows(self, encoded: Features, x: Tensor, time: Tensor) -> Rows:
        expert = self._host._action_expert()
        seen = leading(encoded.length, encoded.tokens_per_sample)
        return Rows(
            timesteps=1,
            conditioning=self._host._action_time_conditioning(expert, time),
            rotary=flow.rotary(expert, x),
            self_mask=expert._build_self_attention_mask(None, x.shape[1], x.device, x.dtype),
            cross_mask=expert._build_cross_attention_mask(seen, len(x), x.dtype),
            valid=None,
        )


def _stacked(layers: list[Tensor | None]) -> Tensor:
    """[L, B, S, HK * D]."""
    return torch.stack([layer for layer in layers if layer is not None])
