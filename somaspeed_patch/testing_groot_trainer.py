"""GR00T for transformers.Trainer with the interface of NVIDIA's package: model, loader, trainer.

The model answers `model(inputs=batch)` with a plain dict, as Gr00tN1d7 does; the loader is a raw one over an
endless data set, whose collator gives {"inputs": batch}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from somaspeed_patch.testing_groot import make_config, make_policy, make_raw_batch

ROWS = 2  # samples a micro-batch


def make_model(dropout: float) -> Any:
    """LeRobot's port with NVIDIA's interface; `dropout` is that of every Dropout and of the state."""
    model = make_policy()._groot_model
    port = type(model)

    class Gr00tN1d7(port):  # type: ignore[misc, valid-type]
        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
            return dict(port.forward(self, inputs))

    model.__class__ = Gr00tN1d7
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    model.action_head.state_dropout_prob = dropout
    return model


class Batches(IterableDataset[dict[str, Any]]):
    """Batches as NVIDIA's loader gives them: ragged text, one to three images, several robots.

    Args:
        embodiments: the robots' ids, in turn.
        start: the first batch's number, which is also its seed.
        stride: from one batch's number to the next's: the number of ranks, where each has batches of its own.
    """

    def __init__(self, embodiments: Sequence[int], start: int = 0, stride: int = 1) -> None:
        self.embodiments = embodiments
        self.seeds = range(start, 10**6, stride)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        policy = SimpleNamespace(config=make_config())
        for seed in self.seeds:
            grids = [[(2, 2)] * (1 + (seed + row) % 3) for row in range(ROWS)]
            words = [3 + (seed * (row + 2)) % 7 for row in range(ROWS)]
            robots = [self.embodiments[(seed + row) % len(self.embodiments)] for row in range(ROWS)]
            yield {"inputs": make_raw_batch(policy, grids, words=words, embodiments=robots, seed=seed)}


class Gr00tLikeTrainer(Trainer):  # type: ignore[misc]
    """What NVIDIA's overrides, as far as it bears on a step; `losses` has that of every micro-batch."""

    def get_train_dataloader(self) -> Any:
        """Its seed is from a generator of its own: a resumed run draws the noise that a whole one draws."""
        return DataLoader(self.train_dataset, batch_size=None, generator=torch.Generator())

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The host's, remembered."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.losses = [*getattr(self, "losses", []), loss.detach()]
        return (loss, outputs) if return_outputs else loss
