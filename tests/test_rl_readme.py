"""The table of RL recipes in recipes/README.md names every key there is."""

import re
from dataclasses import fields
from pathlib import Path

from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.ppo import Clips
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl_run import recipe

README = Path(__file__).parents[1] / "recipes" / "README.md"
SECTIONS = {
    "policy": recipe.Policy, "env": recipe.Environment, "rollout": recipe.Rollouts, "ray": recipe.Ray,
    "checkpoint": recipe.Checkpoints, "evaluate": recipe.Evaluations, "log": recipe.Logs,
    "timeouts": recipe.Timeouts,
}  # fmt: skip


def documented():
    """Keys of the table by section: a name without a dot is of the section of the name before it."""
    table, found = README.read_text().split("## RL recipes")[1], set()
    for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE):
        section = ""
        for name in re.findall(r"`([a-z_.]+)`", row):
            section, _, key = name.rpartition(".") if "." in name else (section, "", name)
            found.add(f"{section}.{key}" if section else key)
    return found


def test_every_key_of_an_rl_recipe_is_in_the_table():
    known = {f"{name}.{each.name}" for name, cls in SECTIONS.items() for each in fields(cls)}
    ppo = [
        each.name for each in (*fields(Settings), *fields(Flow)) if each.name not in ("flow", "clips", "seed")
    ]
    known |= {f"ppo.{name}" for name in ppo} | {f"ppo.clip_{each.name}" for each in fields(Clips)}
    top = {each.name for each in fields(recipe.Recipe)} - {"name", "description", "ppo", *SECTIONS}
    assert documented() == known | top
