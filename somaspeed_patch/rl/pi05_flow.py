"""LeRobot's pi0.5: PaliGemma encodes, the Gemma expert learns from its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from somaspeed_patch.pi05 import forward, hints, prefix
from somaspeed_patch.rl.features import Features, leading, packed
from somaspeed_patch.rl.flow_policy import FlowPolicy, Recordable
from somaspeed_patch.rl.value_head import masked_mean

_TOKENS, _MASK = "observation.language.tokens", "observation.language.attention_mask"
_UNUSED = "gemma_expert.lm_head."  # 263 M parameters that no step computes


class PI05Flow(FlowPolicy):
    """PI05Policy with `train_expert_only`. A sample of 562 tokens takes 9.9 MiB in bf16."""

    name: ClassVar[str] = "pi05"
    graphed_encoding: ClassVar[bool] = True

    def __init__(
        self,
        policy: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        pool: Literal["valid", "all"] = "valid",
    ) -> None:
        """Take a policy whose backbone is frozen; see `FlowPolicy`.

        Args:
            pool: tokens whose mean the critic reads. `all` takes the prompt's padding, too, as RLinf does, so
                it is computed: 712 tokens instead of 576 with two cameras.
        """
        self._pool = pool
        super().__init__(policy, autocast=autocast)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "pool": self._pool}

    @property
    def shape(self) -> tuple[int, int]:
        """The chunk and the padded action."""
        config = self._model.config
        return config.chunk_size, config.max_action_dim

    @property
    def value_width(self) -> int:
        """PaliGemma's width."""
        return int(self._joint.paligemma.config.text_config.hidden_size)

    @property
    def _model(self) -> Any:
        return self._host.model

    @property
    def _joint(self) -> Any:
        return self._model.paligemma_with_expert

    def trainable(self) -> dict[str, nn.Parameter]:
        """The expert and the projections around it, without its unused lm_head."""
        return {name: p for name, p in super().trainable().items() if _UNUSED not in name}

    def recordable(self, batch: Mapping[str, Any]) -> Recordable | None:
        """See `FlowPolicy`; None where only the device knows how long the prompts are."""
        known = hints.of(batch[_MASK])
        if known is None:
            return None
        hint = known._replace(longest=prefix.bucket(known.longest, batch[_MASK].shape[1]))
        read = (*self._model.config.image_features, _TOKENS, _MASK)
        with torch.no_grad(), self._context():
            trunk = forward.working_trunk(self._model, self.device)
        return Recordable(
            tensors={name: batch[name] for name in read if name in batch},
            key=hint,
            encode=partial(self._encode_hinted, hint),
            module=trunk,
        )

    def _encode_hinted(self, hint: hints.Valid, batch: Mapping[str, Any]) -> Features:
        hints.attach(batch[_MASK], hint)
        return self.encode(batch)

    def _refusal(self) -> str | None:
        return forward.refusal(self._model)

    def _layout(self) -> str:
        text = self._joint.paligemma.config.text_config
        cameras = ",".join(self._model.config.image_features)
        return f"{text.num_hidden_layers} layers x {text.head_dim}, cameras {cameras}, pool {self._pool}"

    def _encode(self, batch: Mapping[str, Any]) -> Features:
        images, masks = self._host._preprocess_images(batch)
        found = forward.encode(
            self._model, images, masks, batch[_TOKENS], batch[_MASK], need_hidden=True,
            compact=None if self._pool == "valid" else False,
        )  # fmt: skip
        keys, values = (_stacked(each) for each in (found.keys, found.values))
        valid = _valid(found)
        if found.length is None:
            keys, values = (packed(each, valid) for each in (keys, values))
        return Features(
            tokens={"key": keys, "value": values},
            length=valid.sum(1, dtype=torch.int32),
            fixed={"pooled": masked_mean(found.hidden, None if self._pool == "all" else valid)},  # type: ignore[arg-type]
        )

    def _constants(self) -> AbstractContextManager[Any]:
        """The adapter puts them around what needs them: the layers may be compiled."""
        return nullcontext()

    def _velocity(self, encoded: Features, x: Tensor, s: Tensor) -> Tensor:
        context = prefix.Prefix(
            keys=[key[:, None] for key in encoded.tokens["key"]],
            values=[value[:, None] for value in encoded.tokens["value"]],
            length=encoded.length,
            mask=None,
            offset=encoded.length[:, None].long(),
        )
        return forward.velocity(self._model, x, s, context)


def _stacked(layers: list[Tensor | None]) -> Tensor:
    """[L, B, N, D] of one head's [B, 1, N, D] a layer."""
    return torch.stack([layer[:, 0] for layer in layers if layer is not None])


def _valid(found: prefix.Prefix) -> Tensor:
    """[B, N] bool."""
    if found.mask is not None:
        return found.mask
    count = found.keys[0].shape[2]  # type: ignore[union-attr]  # no pipeline here
    return leading(found.offset[:, 0], count)
