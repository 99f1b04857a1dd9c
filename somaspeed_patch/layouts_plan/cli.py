"""`somaspeed layout plan`: memory and communication of a recipe on so many GPUs, and which layout to take.

    somaspeed layout plan pi05_libero --gpus 8 --gib 48

It needs no GPU. Exit code 0: a layout fits. 1: none does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

_LINK = 25.0  # GB/s a direction: PCIe 4.0 x16; NVLink of an H100 or H200 is 450
_FORWARD = ("compile", "recompute")  # features that change what is kept
_FREE = ("optimizer",)  # features that do not


def add_arguments(subparsers: Any) -> None:
    """Add the subcommand `layout`; its namespace's `command` is `main`."""
    parser = subparsers.add_parser("layout", help="how a recipe fits on many GPUs")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    planned = commands.add_parser("plan", help="memory and communication of each layout; which to take")
    planned.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    planned.add_argument("--gpus", type=int, required=True, help="how many")
    planned.add_argument("--gib", type=float, required=True, help="memory of one, GiB")
    planned.add_argument("--arm", help="of the recipe's section `synthetic`; default: its first patched one")
    planned.add_argument("--batch", type=int, help="samples a replica; default: the recipe's --batch_size")
    planned.add_argument(
        "--link-gbs", type=float, default=_LINK, metavar="GB/S",
        help="what a GPU can send; default: %(default)g, PCIe 4.0 x16",
    )  # fmt: skip
    planned.add_argument(
        "--reshard",
        choices=("default", "always", "never"),
        default="default",
        help="as in the feature layout",
    )
    planned.add_argument("--json", action="store_true", help="print JSON")
    planned.set_defaults(command=main)


def main(args: argparse.Namespace) -> int:
    """Run it.

    Raises: ValueError: it cannot be planned; the text says why.
    """
    from somaspeed_patch.layouts_plan import table

    found = planned(args)
    if args.json:
        print(json.dumps(table.to_dict(found), indent=2))
    else:
        table.show(found)
    return 0 if found.taken is not None else 1


def planned(args: argparse.Namespace) -> Any:
    """The plan that was asked for, a `table.Plan`."""
    recipe = _recipe(args.recipe)
    _positive(gpus=args.gpus, gib=args.gib, link_gbs=args.link_gbs)
    arm = _arm(recipe, args.arm)
    forward = _forward(arm)
    batch = _batch(args.recipe, arm) if args.batch is None else args.batch
    _positive(batch=batch)

    from somaspeed_patch.layouts_plan import activations, meta, plan, sizes, table

    settings = plan.Settings(
        census=sizes.take(meta.model(recipe)),
        kept=activations.of(recipe, forward),
        batch=batch,
        autocast=_autocasts(recipe, arm),
        reshard=args.reshard,
    )
    return table.Plan(
        recipe=recipe.name,
        arm=arm.name,
        forward=forward,
        gib=args.gib,
        link_gbs=args.link_gbs,
        settings=settings,
        rows=plan.rows(settings, args.gpus),
    )


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            flag = name.replace("_", "-")
            raise ValueError(f"layout plan: --{flag} must be more than 0, but is {value:g}")


def _recipe(name: str) -> Any:
    """The section `synthetic`."""
    from somaspeed_patch.ab import recipe, synthetic_recipe
    from somaspeed_patch.ab.yaml_reader import Section

    path = recipe.find(name)
    if "synthetic" not in Section.of_file(path).names:
        raise ValueError(
            f"layout plan: {path}: expected a section `synthetic`, which says what model is trained, but "
            "there is none; add one, see recipes/README.md"
        )
    return synthetic_recipe.load(name)


def _arm(recipe: Any, name: str | None) -> Any:
    """The arm of that name, or the first patched one."""
    patched = [arm.name for arm in recipe.arms if arm.patched]
    if not patched:
        raise ValueError(f"layout plan: {recipe.name} has no patched arm, and only our forward is modelled")
    (arm,) = recipe.chosen(name or patched[0], None).arms
    if not arm.patched:
        raise ValueError(
            f"layout plan: arm {arm.name} is the host's own forward, which is not modelled; "
            f"take one of {', '.join(patched)}"
        )
    return arm


def _forward(arm: Any) -> str:
    """What the arm's features make of our forward; others than these change it in ways not modelled."""
    _refuse(arm, "features", set(arm.features) - {*_FORWARD, *_FREE})
    _refuse(arm, "policy", set(arm.policy) - {"autocast"})
    compiled, recompute = (bool(arm.features.get(name)) for name in _FORWARD)
    if not compiled:
        return "eager"
    return "recompute" if recompute else "compiled"


def _refuse(arm: Any, key: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        raise ValueError(
            f"layout plan: arm {arm.name}: {key} {', '.join(names)}: what that keeps is not modelled; "
            "take another --arm"
        )


def _autocasts(recipe: Any, arm: Any) -> bool:
    """Whether the forward is under autocast: pi0.5's and GR00T's policies see to it themselves."""
    return recipe.model in ("pi05", "groot") or bool(arm.policy.get("autocast"))


def _batch(name: str, arm: Any) -> int:
    """The recipe's --batch_size, or the smallest batch of the arm."""
    from somaspeed_patch.ab import recipe
    from somaspeed_patch.ab.yaml_reader import Section, texts

    none: tuple[str, ...] = ()
    arguments = Section.of_file(recipe.find(name)).get("arguments", texts, "a list of host arguments", none)
    given = [word.partition("=")[2] for word in arguments if word.startswith("--batch_size=")]
    return int(given[-1] if given and given[-1].isdigit() else min(arm.batches))
