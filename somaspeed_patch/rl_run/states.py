"""A small policy over LIBERO's states, cloned from demonstrations: RL that learns on a CPU, with no images.

python -m somaspeed_patch.rl.libero_states --task 0 --init-states 0:20 --out demonstrations.npz
somaspeed rl rl_libero_states --set policy.config.demonstrations=[demonstrations.npz] --out DIR
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from somaspeed_patch.rl.clone import clone
from somaspeed_patch.rl.libero_states import LiberoStates, load
from somaspeed_patch.rl_run.recipe import Recipe
from somaspeed_patch.rl_run.state_parts import StateParts

_DEFAULTS: Mapping[str, Any] = {"demonstrations": [], "episodes": 20, "steps": 400}


def make(recipe: Recipe) -> StateParts:
    """Clone demonstrations; a chunk is as long as what is executed of it.

    Of the recipe's `policy.config`: `demonstrations`, files that `libero_states` wrote; `episodes`, how many
    of them are cloned; `steps`, of behaviour cloning. With fewer the policy is worse, and has more to learn.

    Raises: ValueError: there are no demonstrations, or another key is given.
    """
    config = {**_DEFAULTS, **recipe.policy.config}
    files = config["demonstrations"]
    if odd := config.keys() - _DEFAULTS.keys():
        raise ValueError(f"policy.config: expected only {', '.join(_DEFAULTS)}, but there is {min(odd)}")
    if not isinstance(files, list) or not files or not all(Path(file).is_file() for file in files):
        raise ValueError(
            f"policy.config.demonstrations: expected files, but is {files}; make some with "
            "python -m somaspeed_patch.rl.libero_states --out demonstrations.npz"
        )
    episodes = [each for file in files for each in load(Path(file))][: config["episodes"]]
    policy, _ = clone(episodes, horizon=recipe.ppo.executed, steps=config["steps"], seed=recipe.seed)
    return StateParts(policy, LiberoStates())
