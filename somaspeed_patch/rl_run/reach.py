"""The smallest run, without simulator, images or LeRobot: a point learns to move to a goal in seconds.

    somaspeed rl rl_reach

Also the pattern for a policy of your own: `policy.factory` names a function that gets the recipe.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from somaspeed_patch.rl.state_flow import StateFlow, StateNet
from somaspeed_patch.rl_run.recipe import Recipe
from somaspeed_patch.testing_rl_reach import ACTIONS, OBSERVED, ReachInterface


class ReachParts:
    """See `build.Parts`."""

    def __init__(self, policy: StateFlow) -> None:
        self.policy, self.interface = policy, ReachInterface()

    def save(self, directory: Path) -> None:
        """The network's weights as model.safetensors."""
        save_file(self.policy.policy.state_dict(), directory / "model.safetensors")


def make(_: Recipe) -> ReachParts:
    """A network with random weights, from torch's seed."""
    return ReachParts(StateFlow(StateNet(observed=OBSERVED, horizon=3, actions=ACTIONS, width=32)))
