"""`somaspeed ab RECIPE`: run the arms, judge, print the table, write results.json and results.md.

Exit code 0: every gate is green. 1: an arm failed. 3: a gate is red. 130: interrupted, --out goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def add_arguments(subparsers: Any) -> None:
    """Add the subcommand `ab`; its namespace's `command` is `main`."""
    parser = subparsers.add_parser("ab", help="compare arms of a recipe: same learning? how much faster?")
    parser.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--repeats", type=_count, help="runs of each arm; default: the recipe's")
    parser.add_argument("--out", type=Path, help="folder for runs and results; give it again to go on")
    parser.add_argument("--arms", help="comma-separated, the first is the baseline; default: all")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="begin no further repeat after this long"
    )
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.add_argument(
        "--synthetic",
        action="store_true",
        help="the training step alone, by the recipe's section `synthetic`",
    )
    parser.add_argument("--profile", action="store_true", help="with --synthetic: each arm's largest kernels")
    parser.set_defaults(command=main)


def main(args: argparse.Namespace) -> int:
    """Run it.

    Raises: ValueError: the recipe cannot be run; the text says where and why.
    """
    from somaspeed_patch.ab import recipe as recipes
    from somaspeed_patch.ab import results, runner
    from somaspeed_patch.ab.progress import bar
    from somaspeed_patch.sites import write_json

    if args.synthetic:
        return _synthetic(args)
    recipe = recipes.load(args.recipe).chosen(args.arms, args.repeats)
    out = args.out or _default_out(recipe.name)
    try:
        with _terminable(), bar(recipe) as watch:
            runs = runner.run_all(recipe, out, budget=args.budget, watch=watch)
    except KeyboardInterrupt:
        log.warning("interrupted; finished runs are kept: the same command with --out %s goes on", out)
        return 130
    found = results.build(recipe, runs)
    write_json(out / "results.json", found)
    _show(found, out, as_json=args.json)
    return results.exit_code(found)


def _synthetic(args: argparse.Namespace) -> int:
    import torch

    from somaspeed_patch.ab import synthetic, synthetic_recipe
    from somaspeed_patch.sites import write_json

    recipe = synthetic_recipe.load(args.recipe).chosen(args.arms, args.repeats)
    out = args.out or _default_out(f"{recipe.name}-synthetic")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = synthetic.run(recipe, device=device, say=_say, budget=args.budget, profiled=args.profile)
    write_json(out / "results.json", found)
    print(json.dumps(found, indent=2) if args.json else synthetic.table(found))
    _say(f"written: {out / 'results.json'}")
    return 0 if all(verdict["green"] for verdict in found["gate"].values()) else 3


def _say(line: str) -> None:
    """Progress goes to stderr: stdout is the table's, or the JSON's."""
    print(line, file=sys.stderr, flush=True)


def _default_out(name: str) -> Path:
    return Path("outputs") / "ab" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, but is {word}")
    return number


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the run under way as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(found: dict[str, Any], out: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from somaspeed_patch.ab import table

    table.write_markdown(found, out / "results.md")
    console = Console()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console.print(table.terminal(found))
    for sentence in table.sentences(found):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"written: {out / 'results.json'}, {out / 'results.md'}", highlight=False, markup=False)
