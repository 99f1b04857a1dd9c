"""`somaspeed rl RECIPE`: a run of reinforcement learning.

    somaspeed rl RECIPE                              a YAML file, or the name of a shipped recipe
    somaspeed rl RECIPE --out DIR --resume           go on behind DIR's last checkpoint
    somaspeed rl RECIPE --set ppo.update_epoch=2     with another value of a key
    torchrun --nproc_per_node 8 -m somaspeed_patch rl RECIPE --set layout.dp_shard=8     on several ranks

Exit code 0: all iterations are done. 1: one failed. 2: the recipe cannot be run. 143, 130: SIGTERM or SIGINT
ended it, within 60 s and behind a checkpoint; a second one ends it at once, but for several ranks.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def add_arguments(subparsers: Any) -> None:
    """Add the subcommand `rl`; its namespace's `command` is `main`."""
    parser = subparsers.add_parser("rl", help="reinforcement learning of a flow policy in LIBERO")
    parser.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--out", type=Path, help="folder of checkpoints, metrics, videos and results")
    parser.add_argument("--resume", action="store_true", help="go on behind the last checkpoint in --out")
    parser.add_argument("--iterations", type=int, metavar="N", help="in all; default: the recipe's")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="another value than the recipe's, for example ppo.gamma=0.9; repeatable",
    )  # fmt: skip
    parser.set_defaults(command=main)


def main(args: argparse.Namespace) -> int:
    """Run it.

    Raises: ValueError: it cannot be run; the text says where and why.
    """
    from somaspeed_patch.rl_run import recipe_file

    if args.resume and args.out is None:
        raise ValueError("somaspeed rl: --resume needs --out, the folder of the run to go on with")
    recipe = recipe_file.load(args.recipe, args.settings)
    if args.iterations is not None:
        recipe = replace(recipe, iterations=args.iterations)
    out = args.out or Path("outputs") / "rl" / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _run(recipe, out, resume=args.resume)


def _run(recipe: Any, out: Path, *, resume: bool) -> int:
    from somaspeed_patch.rl_run import screen, session

    ranks = session.joined(recipe)
    if not ranks.leads:
        logging.getLogger("somaspeed_patch").setLevel(logging.ERROR)
    out = ranks.first(lambda: out)  # its default is of this second
    try:
        code = session.run(recipe, out, resume=resume, ranks=ranks)
    except session.RunFailed as error:
        log.error("%s", error, exc_info=error.__cause__)
        return 1
    if ranks.leads:
        screen.say(f"written: {out}")
    return code
