"""A small policy over states as a run's policy, see `build.Parts`."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from somaspeed_patch.rl.interface import Interface
from somaspeed_patch.rl.state_flow import StateFlow


class StateParts:
    """A `StateFlow`, and what it sees."""

    def __init__(self, policy: StateFlow, interface: Interface) -> None:
        self.policy, self.interface = policy, interface

    def save(self, directory: Path) -> None:
        """The network's weights as model.safetensors."""
        save_file(self.policy.policy.state_dict(), directory / "model.safetensors")
