"""The policy that every arm of `--synthetic` trains in turn, as lerobot-train does; what all models share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from somaspeed_patch.ab.synthetic_recipe import Synthetic

PHASES = ("forward", "backward", "optimizer")


class Subject(ABC):
    """The model under test with its optimizer; arms switch the host's own options on and off around it."""

    changes_results: frozenset[str] = frozenset()
    """the options that change what is computed, not how: the gate compares with a native run that has them"""
    gate_samples = 2
    """samples of the gate's batch"""

    def __init__(self, recipe: Synthetic, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        # As lerobot-train sets them.
        torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True
        self.policy = self.build()
        self._preset = self.policy.config.get_optimizer_preset()

    @abstractmethod
    def build(self) -> Any:
        """The host's policy on the device, in training mode, with random weights of a fixed seed."""

    @abstractmethod
    def in_float32(self, policy: Any) -> Any:
        """A copy of the policy that computes in fp32: the same weights and the same random draws."""

    @abstractmethod
    def switched(self, options: Mapping[str, bool | str]) -> AbstractContextManager[None]:
        """The host's own options inside the block, as an arm's `policy` names them."""

    @abstractmethod
    def batch(self, size: int, seed: int = 1, padding: str | None = None) -> dict[str, Tensor]:
        """Random samples as the host's preprocessor leaves them on the device.

        Args:
            padding: the side on which prompts of different lengths are padded; None: all are equally long.
        """

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """What accelerate puts around the forward."""

    @contextmanager
    def exact(self) -> Iterator[None]:
        """The policy in fp32 inside the block."""
        low = self.policy
        self.policy = self.in_float32(low)
        try:
            yield
        finally:
            self.policy = low

    @contextmanager
    def optimized(self) -> Iterator[None]:
        """An optimizer as the trainer builds and prepares it, with the patches that are on now."""
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=self.device.type == "cpu")
        optimizer = self._preset.build(self.policy.get_optim_params())
        self._optimizer = self._accelerator.prepare_optimizer(optimizer, device_placement=False)
        try:
            yield
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            del self._optimizer, self._accelerator

    def lengths(self, size: int, padding: str | None, seed: int = 1) -> Tensor:
        """Real language tokens of each sample, [size] int64 on the CPU.

        The recipe's; with padding those of the first sample, and half as many or more of the others.
        """
        most = self.recipe.tokens
        found = torch.full((size,), most)
        if padding is not None:
            rng = torch.Generator().manual_seed(seed)
            found[1:] = torch.randint(max(most // 2, 1), max(most, 2), (size - 1,), generator=rng)
        return found

    def update(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """One training step as lerobot-train does it; seconds of its phases, its loss and gradient norm."""
        self._finish()
        begun, marks = time.perf_counter(), [self._mark()]
        with self.autocast():
            loss, _ = self.policy.forward(batch)
        marks.append(self._mark())
        loss.backward()
        marks.append(self._mark())
        norm = self._accelerator.clip_grad_norm_(self.policy.parameters(), self._preset.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        marks.append(self._mark())
        values = {"loss": loss.item(), "grad_norm": norm.item()}
        self._finish()
        total = time.perf_counter() - begun
        pairs = zip(PHASES, marks, marks[1:], strict=False)
        return {**{name: self._seconds(*pair) for name, *pair in pairs}, "total": total, **values}

    def loss_and_gradients(self, batch: dict[str, Tensor], seed: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and every gradient of one batch, with the noise and times of `seed`."""
        self.policy.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with self.autocast():
            loss, _ = self.policy.forward(batch)
        loss.backward()
        found = {n: p.grad for n, p in self.policy.named_parameters() if p.grad is not None}
        self.policy.zero_grad(set_to_none=True)
        return loss.detach(), found

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        """A moment on the device's own clock: as in the trainer, no phase waits for the one before."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, first: Any, last: Any) -> float:
        if self.device.type != "cuda":
            return float(last - first)
        return float(first.elapsed_time(last)) / 1e3
