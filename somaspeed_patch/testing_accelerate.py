"""Accelerate between two runs in one process."""

from __future__ import annotations


def forget() -> None:
    """Drop the settings that accelerate keeps for the whole process: each run starts without."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
