"""A flow-matching policy in two parts: what is frozen and runs once an observation, and what learns.

`PI05Flow`, `MolmoAct2Flow` and `GrootFlow` adapt LeRobot's policies; they compute through the adapters of the
same names, which have to be patched in. All speak noise time: s is 1 at noise and 0 at the action, and a
velocity points towards noise.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from somaspeed_patch import features, recorded
from somaspeed_patch.rl import flow_sde
from somaspeed_patch.rl.digest import Watch, digest
from somaspeed_patch.rl.features import Features, Tag
from somaspeed_patch.rl.flow_sde import Draws, Flow, Sample

P = TypeVar("P", bound="FlowPolicy")


@dataclass(frozen=True, kw_only=True)
class Recordable:
    """A batch whose encoding a CUDA graph can replay."""

    tensors: Mapping[str, Tensor]
    """all that is read of the batch"""
    key: Hashable
    """batches with the same one and the same shapes run the same kernels"""
    encode: Callable[[Mapping[str, Tensor]], Features]
    """waits for nothing"""
    module: nn.Module
    """whose weights are read; where another one comes back, nothing recorded holds any more"""


class FlowPolicy(ABC):
    """What the rollout and the learner need of a policy; both compute through the same functions.

    Not thread-safe. The policy stays in evaluation mode: dropout would make a replay's ratio noise.
    """

    name: ClassVar[str]
    needs_patch: ClassVar[bool] = True
    """whether it computes through an adapter"""
    graphed_encoding: ClassVar[bool] = False
    """whether there is anything `recordable`"""

    def __init__(self, policy: nn.Module, *, autocast: torch.dtype | None = None) -> None:
        """Take a policy whose backbone is frozen.

        Args:
            policy: LeRobot's.
            autocast: compute under autocast to this dtype; None: as the policy's own inference does.
        Raises: ValueError: the adapter is not patched in, the backbone trains or is not as we know it.
        """
        self.policy = policy
        self._autocast = autocast
        policy.eval()
        if self.needs_patch and features.value("frozen_prefix") is None:
            raise ValueError(f"rl: patch first: somaspeed_patch.patch({self.name!r})")
        if (why := self._refusal()) is not None:
            raise ValueError(f"rl: {type(policy).__name__} cannot be trained from cached features: {why}")
        self._digest = digest(self._frozen())
        self._watch = Watch(self._frozen())

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """H and A of the latent action chunk."""

    @property
    def action_dim(self) -> int:
        """D, what the environment executes of A: the data set's actions."""
        return int(self._host.config.output_features["action"].shape[0])

    @property
    @abstractmethod
    def value_width(self) -> int:
        """W of what `pooled` gives."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that a velocity depends on and that train, by the policy's names."""
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    @abstractmethod
    def _encode(self, batch: Mapping[str, Any]) -> Features: ...

    @abstractmethod
    def _velocity(self, encoded: Features, x: Tensor, s: Tensor) -> Tensor: ...

    @abstractmethod
    def _refusal(self) -> str | None: ...

    @abstractmethod
    def _layout(self) -> str:
        """What decides how features look, for the tag."""

    def pooled(self, encoded: Features) -> Tensor:
        """[B, W] fp32, what the value head reads; a constant of the observation."""
        return encoded.fixed["pooled"]

    @property
    def _host(self) -> Any:
        """The policy, whose own names nobody has typed."""
        return self.policy

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return next(self.policy.parameters()).device

    @property
    def tag(self) -> Tag:
        """What features that are encoded now hold for.

        Raises: ValueError: a weight of the backbone trains by now.
        """
        if self._watch.changed() is not None:
            if (why := self._refusal()) is not None:
                raise ValueError(f"rl: features can no longer be cached: {why}")
            self._digest, self._watch = digest(self._frozen()), Watch(self._frozen())
        return Tag(model=f"{self.name} {self._layout()}", backbone=self._digest)

    def encode(self, batch: Mapping[str, Any]) -> Features:
        """Run the frozen part.

        Args:
            batch: as the policy's preprocessor leaves it, on the policy's device.
        """
        with torch.no_grad(), self._context():
            return self._encode(batch)

    def recordable(self, batch: Mapping[str, Any]) -> Recordable | None:
        """What a CUDA graph of `encode` needs of a batch; None: it is run kernel by kernel."""
        return None

    def velocity(self, encoded: Features, x: Tensor, s: Tensor) -> Tensor:
        """[B, H, A] fp32, towards noise; differentiable in `trainable`.

        Args:
            encoded: of B samples, on the policy's device.
            x: [B, H, A] fp32.
            s: [B] fp32, noise time.
        """
        with self._context(), self._constants():
            return self._velocity(encoded, x, s).float()

    def sample(self, encoded: Features, flow: Flow, draws: Draws) -> Sample:
        """Sample a chunk for each observation; arguments as of `flow_sde.sample`."""
        with torch.no_grad():
            velocity = partial(self.velocity, encoded)
            return flow_sde.sample(velocity, draws.to(self.device), flow, self._kept(encoded))

    def twin(self: P) -> P:
        """The same policy with trainable weights of its own, and this one's frozen ones."""
        shared = {id(tensor): tensor for tensor in self._frozen().values()}
        return type(self)(copy.deepcopy(self.policy, shared), **self._options())

    def _options(self) -> dict[str, Any]:
        """What it was made with."""
        return {"autocast": self._autocast}

    def _kept(self, encoded: Features) -> Tensor | None:
        """[B, 1, A] fp32, 0 for action dimensions that the policy keeps at 0; None: there are none."""
        return None

    def _context(self) -> AbstractContextManager[Any]:
        dtype = self._autocast or self._inference_dtype()
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _constants(self) -> AbstractContextManager[Any]:
        """Around `_velocity`."""
        return recorded.constants()

    def _inference_dtype(self) -> torch.dtype | None:
        """What the policy's own inference computes under autocast to."""
        return None

    def _frozen(self) -> dict[str, Tensor]:
        """Weights and buffers that do not train, by name."""
        trained = self.trainable()
        every = {**dict(self.policy.named_parameters()), **dict(self.policy.named_buffers())}
        return {name: tensor for name, tensor in every.items() if name not in trained}
