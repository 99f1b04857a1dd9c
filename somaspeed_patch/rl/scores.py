"""From log-densities of single numbers to the log-probability that a ratio is made of.

A chunk has H x A numbers, of which the environment executes the first C steps and D dimensions. Noise goes
into all of them; those that are not executed reach the executed ones through later steps only.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Level = Literal["chunk", "action", "token"]
Scope = Literal["executed", "all"]


def reduced(
    log_prob: Tensor, executed: tuple[int, int], level: Level = "chunk", scope: Scope = "executed"
) -> Tensor:
    """The log-probability of each unit that has a ratio of its own.

    Args:
        log_prob: [B, H, A] fp32.
        executed: C steps and D dimensions that the environment executes.
        level: `chunk` sums to [B], `action` to [B, C], `token` leaves [B, C, D].
        scope: `all` takes all H x A numbers, which is the step's true density.
    Raises: ValueError: more is executed than there is, or level or scope is unknown.
    """
    _, horizon, width = log_prob.shape
    steps, dims = executed
    if not (0 < steps <= horizon and 0 < dims <= width):
        raise ValueError(f"scores: executed {executed} must lie within the chunk's {(horizon, width)}")
    if scope not in ("executed", "all"):
        raise ValueError(f"scores: scope must be executed or all, but is {scope!r}")
    kept = log_prob[:, :steps, :dims] if scope == "executed" else log_prob
    match level:
        case "chunk":
            return kept.sum((1, 2))
        case "action":
            return kept.sum(2)
        case "token":
            return kept
    raise ValueError(f"scores: level must be chunk, action or token, but is {level!r}")
