"""Blocks of a pipeline at work: which ones this rank computes, and how the hidden state gets to them.

Every rank of a pipeline runs the same Python on the same samples. It computes its own blocks and leaves out
the others'; at a cut the hidden state goes from the stage before to the next one, and behind a stack to all.
The forwards say where:

    for block in blocks:
        (hidden,) = stages.enter(block, hidden)
        if not stages.elsewhere(block):
            hidden = block(hidden)
    hidden = stages.leave(blocks, hidden)

Without a pipeline each is one look into a dict.

Every part of a gradient is computed on one rank only: the loss counts on the last stage alone (`quiet`), and
what a rank gets for an input that other stages read too is its blocks' part. The parts of what is no block's
are summed over the stages after the backward, see `pipeline_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from somaspeed_patch.layouts import transfer
from somaspeed_patch.layouts.transfer import Line

_PLACE, _PIPELINE = "_somaspeed_place", "_somaspeed_pipeline"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one block is computed."""

    line: Line
    owner: int
    """its stage"""
    cut: transfer.Link | None
    """the way of the hidden state from the stage before; None: that of the block before is there"""
    end: transfer.Link | None
    """the way to all ranks, of the last block of a stack"""
    draws: bool
    """whether blocks of its stack draw random numbers in training"""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A parameter of one stage's."""

    stage: int
    shape: tuple[int, ...]
    """as a whole"""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model that is cut."""

    line: Line
    owned: dict[str, Owned] = field(default_factory=dict)
    """parameters of blocks, by name; all others are on every rank"""
    patterns: dict[tuple[bool, ...], tuple[bool, ...]] = field(default_factory=dict)
    """which shared parameters have a gradient here -> on any rank"""
    trained: list[tuple[list[nn.Parameter], frozenset[int]]] = field(default_factory=list)
    """once known: the shared parameters that train, and the ids of the blocks'"""


def attach(model: nn.Module, pipeline: Pipeline) -> None:
    """Note it on the model."""
    vars(model)[_PIPELINE] = pipeline


def of_model(model: Any) -> Pipeline | None:
    """What was noted on a model, or None."""
    found: Pipeline | None = vars(model).get(_PIPELINE)
    return found


def put(block: nn.Module, place: Place) -> None:
    """Note a block's place; a working copy of the block has it too."""
    vars(block)[_PLACE] = place


def _place(block: Any) -> Place | None:
    found: Place | None = vars(block).get(_PLACE)
    return found


def elsewhere(block: Any) -> bool:
    """Whether another rank computes it; its weights are not here."""
    place = _place(block)
    return place is not None and place.owner != place.line.stage


def piped(blocks: Sequence[Any]) -> bool:
    """Whether they are blocks of a pipeline."""
    return len(blocks) > 0 and _place(blocks[0]) is not None


def enter(block: Any, *hidden: Tensor) -> tuple[Tensor, ...]:
    """The hidden states that the block reads; where a stage begins, from the stage before.

    Not to be called again in a recomputation: every call sends.
    """
    place = _place(block)
    return hidden if place is None or place.cut is None else place.cut.over(*hidden)


def leave(blocks: Sequence[Any], hidden: Tensor) -> Tensor:
    """The hidden state behind a whole stack, on every rank."""
    place = _place(blocks[-1])
    return hidden if place is None or place.end is None else place.end.over(hidden)[0]


def tied(blocks: Sequence[Any], hidden: Tensor, other: Tensor) -> Tensor:
    """`hidden`, which from now on the gradient of `other` waits for: a rank without a block that reads
    `other` has part in its way back all the same."""
    if not piped(blocks) or not (torch.is_grad_enabled() and other.requires_grad):
        return hidden
    return transfer.tied(hidden, other)


@contextmanager
def apart(blocks: Sequence[Any]) -> Iterator[None]:
    """Inside, blocks draw from a generator of their stage's: outside, all ranks go on alike.

    Only where blocks draw at all; then the numbers are other ones than one process draws.
    """
    place = _place(blocks[-1]) if len(blocks) else None
    if place is None or not place.draws:
        yield
        return
    seed = int(torch.randint(2**31, ()))  # the same on every rank
    with torch.random.fork_rng([place.line.device] if place.line.device.type == "cuda" else []):
        torch.manual_seed(seed + place.line.stage)
        yield


def refuse_calls(block: nn.Module, name: str, stage: int) -> None:
    """Let every call of a part of a block that is not here raise, in the place of a mismatch of shapes."""

    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"layout: {name} is on stage {stage} of the pipeline, and the host's own code calls it here; "
            "evaluate and run that without pp, from a checkpoint"
        )

    for part in block.modules():
        cast(Any, part).forward = forward
