"""GR00T N1.7 as LeRobot has it: Qwen3-VL encodes, everything behind its features learns.

The host's self-attention over the features sees padding as if it were tokens. Here each sample sees its own
tokens alone, which is what the host computes for a batch of one, the way a robot runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from somaspeed_patch import facts, recorded
from somaspeed_patch.groot import backbone, dit
from somaspeed_patch.rl.features import Features, leading, packed
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.value_head import masked_mean

# Times are whole buckets of 1/1000, cut off as the host does; s in fp32 may lie 6e-5 of a bucket below one.
_SLACK = 1e-3


class GrootFlow(FlowPolicy):
    """GrootPolicy with a frozen backbone. A sample of 172 tokens takes 0.7 MiB in bf16."""

    name: ClassVar[str] = "groot"

    @property
    def shape(self) -> tuple[int, int]:
        """The model's horizon and padded action."""
        return int(self._head.action_horizon), int(self._head.action_dim)

    @property
    def value_width(self) -> int:
        """The features' and the state's."""
        return int(self._head.config.backbone_embedding_dim + self._head.input_embedding_dim)

    @property
    def _model(self) -> Any:
        return self._host._groot_model

    @property
    def _head(self) -> Any:
        return self._model.action_head

    def _refusal(self) -> str | None:
        if not self._head.config.use_alternate_vl_dit:
            return "the DiT is not the alternating one"
        why = backbone.why_not_frozen(self._model.backbone)
        return None if why is None else f"the backbone is not frozen: {why}"

    def _layout(self) -> str:
        return f"features of {self._head.config.backbone_embedding_dim}, horizon {self._head.action_horizon}"

    def _inference_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self._host.config.use_bf16 else None

    def _encode(self, batch: Mapping[str, Any]) -> Features:
        inputs = self._host._filter_groot_inputs(batch, include_action=False)
        seen, given = self._model.prepare_input(inputs)
        found = backbone.encode(self._model.backbone, seen)
        valid, image = found["backbone_attention_mask"].bool(), found["image_mask"].bool()
        tokens = {
            "hidden": packed(found["backbone_features"][None], valid),
            "image": packed(image[None], valid),
        }
        length = valid.sum(1, dtype=torch.int32)
        facts.attach(tokens["image"], facts.TWIN, tokens["image"].cpu())
        facts.attach(length, facts.TWIN, length.cpu())
        fixed = {"state": given["state"], "embodiment": given["embodiment_id"]}
        return Features(tokens=tokens, length=length, fixed=fixed)

    def pooled(self, encoded: Features) -> Tensor:
        """[B, W] fp32 of the features as the policy now attends to them; the critic does not train them."""
        with torch.no_grad(), self._context(), recorded.constants():
            hidden, valid = self._attended(encoded)
            state = self._state(encoded)
        return torch.cat([masked_mean(hidden, valid), state[:, 0].float()], dim=1)

    def _velocity(self, encoded: Features, x: Tensor, s: Tensor) -> Tensor:
        head, embodiment = self._head, encoded.fixed["embodiment"]
        hidden, valid = self._attended(encoded)
        buckets = ((1 - s) * head.num_timestep_buckets + _SLACK).long()
        actions = head.action_encoder(x, buckets, embodiment)
        if head.config.add_pos_embed:
            actions = actions + head.position_embedding(torch.arange(actions.shape[1], device=x.device))
        output = dit.run(
            head.model,
            hidden_states=torch.cat((self._state(encoded), actions), dim=1),
            encoder_hidden_states=hidden,
            timestep=buckets,
            image_mask=self._image(encoded),
            backbone_attention_mask=valid,
        )
        predicted: Tensor = head.action_decoder(output, embodiment)
        return -predicted[:, -x.shape[1] :]

    def _attended(self, encoded: Features) -> tuple[Tensor, Tensor]:
        """The features behind the head's own attention over them [B, N, W], and which are valid [B, N]."""
        hidden = self._head.vlln(encoded.tokens["hidden"][0])
        valid, all_valid = _valid(encoded, hidden.shape[1])
        attention = self._head.vl_self_attention
        if isinstance(attention, nn.Identity):
            return hidden, valid
        for block in attention.transformer_blocks:
            hidden = block(hidden, attention_mask=None if all_valid else valid)
        return hidden, valid

    def _state(self, encoded: Features) -> Tensor:
        """[B, 1, W]."""
        state = encoded.fixed["state"]
        found: Tensor = self._head.state_encoder(state.flatten(1)[:, None], encoded.fixed["embodiment"])
        return found

    def _image(self, encoded: Features) -> Tensor:
        """[B, N] bool, with its twin."""
        found = encoded.tokens["image"]
        image = found[0]
        facts.attach(image, facts.TWIN, facts.on_cpu(found)[0])
        return image


def _valid(encoded: Features, size: int) -> tuple[Tensor, bool]:
    """[B, N] bool with its twin, and whether all are."""
    twin = leading(facts.on_cpu(encoded.length), size)
    valid = twin.to(encoded.length.device, non_blocking=True)
    facts.attach(valid, facts.TWIN, twin)
    return valid, bool(twin.all())
