"""The smallest run, without simulator, images or LeRobot: a point learns to move to a goal in seconds.

    somaspeed rl rl_reach

Also the pattern for a policy of your own: `policy.factory` names a function that gets the recipe.
"""

from __future__ import annotations

from somaspeed_patch.rl.state_flow import StateFlow, StateNet
from somaspeed_patch.rl_run.recipe import Recipe
from somaspeed_patch.rl_run.state_parts import StateParts
from somaspeed_patch.testing_rl_reach import ACTIONS, OBSERVED, ReachInterface


def make(_: Recipe) -> StateParts:
    """A network with random weights, from torch's seed."""
    net = StateNet(observed=OBSERVED, horizon=3, actions=ACTIONS, width=32)
    return StateParts(StateFlow(net), ReachInterface())
