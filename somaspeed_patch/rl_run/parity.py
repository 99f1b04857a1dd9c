"""Where RLinf decides otherwise than we do, and a recipe that decides as it does.

What we hold for better is the default: each sample has its own stochastic step, the critic reads valid
tokens, the proximal policy is computed anew, negative advantages have their dual clip. RLinf, at a3816b5: one
step for a batch, the mean over padding too, an interpolated proximal policy, and a dual clip that its
synchronous actor does not pass on but for GR00T. Padding's hidden states are whatever an implementation
computes for tokens that nobody reads, so the critic's input is RLinf's in kind, not in bits.
"""

from __future__ import annotations

from dataclasses import replace

from somaspeed_patch.rl_run.recipe import Recipe


def applied(recipe: Recipe) -> Recipe:
    """The recipe as its key `parity` wants it."""
    return rlinf(recipe) if recipe.parity == "rlinf" else recipe


def rlinf(recipe: Recipe) -> Recipe:
    """The recipe with RLinf's choices."""
    clips, in_turn = recipe.ppo.clips, recipe.lag is None
    return replace(
        recipe,
        policy=replace(recipe.policy, pool="all" if recipe.policy.type == "pi05" else recipe.policy.pool),
        rollout=replace(recipe.rollout, shared_step=True, bootstrap=False),
        ppo=replace(
            recipe.ppo,
            proximal="interpolate",
            clips=replace(clips, dual=None) if in_turn and recipe.policy.type != "groot" else clips,
        ),
    )
