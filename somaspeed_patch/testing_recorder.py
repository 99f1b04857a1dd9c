"""What the step recorder's tests share: LeRobot's loop in small, which keeps every gradient it trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import somaspeed_patch
from somaspeed_patch import testing_accelerate

ROWS = 48
MAX_NORM = 0.01  # the gradients' norm is about 1, so clipping shows


class Net(nn.Module):
    """Two layers that train and one that nobody uses. Args of forward: x [B, 3]. Returns: [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.unused = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


class Loop:
    """accelerate's training loop, with the calls of lerobot-train in their order.

    Args:
        accumulation: micro-batches of an update.
        max_norm: None: the host does not clip.
        dtype: of the weights.
        before: updates that a run which this one resumes has done.
        optimizer: its class.
        wrap: what the host makes of the model before accelerate gets it.
    """

    def __init__(
        self,
        *,
        accumulation: int = 1,
        max_norm: float | None = MAX_NORM,
        dtype: torch.dtype = torch.float32,
        before: int = 0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

        testing_accelerate.forget()
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulation,
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.net, self._max_norm = Net().to(dtype), max_norm
        self.gradients: list[dict[str, Tensor]] = []
        rows: Any = list(torch.randn(ROWS, 3).to(dtype))
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=4)
        model = self.net if wrap is None else wrap(self.net)
        inner = optimizer(model.parameters(), lr=1e-2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, inner, loader)
        meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr")}
        self._tracker = MetricsTracker(4, ROWS, 1, meters, initial_step=before, accelerator=self.accelerator)

    def train(self, updates: int) -> Loop:
        """At most as many updates as the data has batches for."""
        batches = iter(self.loader)
        for _ in range(updates):
            while not self._micro_batch(next(batches)):
                pass
        return self

    def _micro_batch(self, x: Tensor) -> bool:
        """Whether it completed an update."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            with accelerator.autocast():
                loss = self.model(x).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                self._keep_gradients()
                if self._max_norm is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), self._max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if accelerator.sync_gradients:
            self._tracker.loss = loss.item()
            self._tracker.step()
        return bool(accelerator.sync_gradients)

    def _keep_gradients(self) -> None:
        named = self.net.named_parameters()
        self.gradients.append({name: one.grad.clone() for name, one in named if one.grad is not None})


def recorded(
    folder: Path, updates: int, *, features: dict[str, str], **options: Any
) -> tuple[Loop, list[dict[str, Any]]]:
    """Train with the recorder on.

    Args:
        folder: for `steps.jsonl` and what the features write beside it.
        features: more features of the recorder.
        options: of Loop.

    Returns: the loop, and the lines of rank 0.
    """
    file = folder / "steps.jsonl"
    with somaspeed_patch.patched("step_recorder", record_steps=str(file), **features):
        loop = Loop(**options).train(updates)
    written = file if file.is_file() else file.with_name("steps.jsonl.rank0")
    return loop, [json.loads(line) for line in written.read_text().splitlines()]
