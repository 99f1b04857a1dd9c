"""`somaspeed ab`: run the arms of a recipe, judge, print, write results.json, results.md and index.html.

    somaspeed ab RECIPE                        measure
    somaspeed ab --compare OLD NEW [--check]   two results side by side; --check: does a ratio drop?
    somaspeed ab --render FILE ... --out DIR   the page and Markdown of results measured elsewhere

Exit code 0: every gate is green. 1: an arm failed. 3: a gate is red. 4: a ratio dropped. 130: interrupted;
the same command with the same --out goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def add_arguments(subparsers: Any) -> None:
    """Add the subcommand `ab`; its namespace's `command` is `main`."""
    parser = subparsers.add_parser("ab", help="compare arms of a recipe: same learning? how much faster?")
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--repeats", type=_count, help="runs of each arm; default: the recipe's")
    parser.add_argument("--out", type=Path, help="folder for runs and results; give it again to go on")
    parser.add_argument("--arms", help="comma-separated, the first is the baseline; default: all")
    parser.add_argument("--aa", action="store_true", help="the baseline against itself: what is noise here?")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="begin no further repeat after this long"
    )
    parser.add_argument("--json", action="store_true", help="print results.json instead of the tables")
    parser.add_argument(
        "--synthetic",
        action="store_true",
        help="the training step alone, by the recipe's section `synthetic`",
    )
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        help="with --synthetic: each cell's largest kernels; default: on a GPU",
    )
    _add_file_arguments(parser)
    parser.set_defaults(command=main)


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two results.json side by side"
    )
    parser.add_argument("--check", action="store_true", help="with --compare: fail where a ratio drops")
    parser.add_argument(
        "--allow", type=float, default=0.05, metavar="PART", help="with --check: what it may lose"
    )
    parser.add_argument(
        "--render", nargs="+", type=Path, metavar="FILE", help="write the page of these results.json to --out"
    )


def main(args: argparse.Namespace) -> int:
    """Run it.

    Raises: ValueError: it cannot be run; the text says where and why.
    """
    from somaspeed_patch.ab import files

    given = [args.recipe is not None, args.compare is not None, args.render is not None]
    if sum(given) != 1:
        raise ValueError("somaspeed ab: expected a recipe, or --compare OLD NEW, or --render FILE ...")
    if args.compare:
        return files.compare(*args.compare, check=args.check, allow=args.allow)
    if args.render:
        return files.render(args.render, args.out or Path())
    return _synthetic(args) if args.synthetic else _trainer(args)


def _trainer(args: argparse.Namespace) -> int:
    from somaspeed_patch.ab import recipe as recipes
    from somaspeed_patch.ab import results, runner, verdicts
    from somaspeed_patch.ab.progress import bar

    recipe = recipes.load(args.recipe).chosen(args.arms, args.repeats)
    recipe = recipe.against_itself() if args.aa else recipe
    out = args.out or _default_out(recipe.name)
    try:
        with _terminable():
            recipe = runner.with_found_batches(recipe, out, _say)
            with bar(recipe) as watch:
                runs = runner.run_all(
                    recipe,
                    out,
                    budget=args.budget,
                    watch=watch,
                    leave_out=lambda so_far: verdicts.red_arms(recipe, so_far),
                )
    except KeyboardInterrupt:
        return _interrupted(out)
    found = results.build(recipe, runs)
    verdicts.forget_gradients(recipe, runs)
    return _finish(found, out, as_json=args.json)


def _synthetic(args: argparse.Namespace) -> int:
    import torch

    from somaspeed_patch.ab import synthetic, synthetic_recipe
    from somaspeed_patch.ab.progress import counter

    recipe = synthetic_recipe.load(args.recipe).chosen(args.arms, args.repeats)
    recipe = recipe.against_itself() if args.aa else recipe
    out = args.out or _default_out(f"{recipe.name}-synthetic")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    profiled = device.type == "cuda" if args.profile is None else args.profile
    try:
        with _terminable(), counter(recipe.name) as (say, advance):
            found = synthetic.run(
                recipe,
                device=device,
                say=say,
                budget=args.budget,
                profiled=profiled,
                out=out,
                advance=advance,
            )
    except KeyboardInterrupt:
        return _interrupted(out)
    return _finish(found, out, as_json=args.json)


def _interrupted(out: Path) -> int:
    log.warning("interrupted; finished runs are kept: the same command with --out %s goes on", out)
    return 130


def _finish(found: Mapping[str, Any], out: Path, *, as_json: bool) -> int:
    """Write and show."""
    from somaspeed_patch.ab import files, results
    from somaspeed_patch.sites import write_json

    write_json(out / "results.json", found)
    written = [out / "results.json", *files.write_pages([found], out)]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    _say(f"written: {', '.join(map(str, written[:-1]))}")
    _say(f"look at: {written[-1]}")
    return results.exit_code(found)


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


def _show(found: Mapping[str, Any]) -> None:
    from rich.console import Console

    from somaspeed_patch.ab import table

    console = Console()
    for one in table.terminal(found):
        console.print(one)
    _sentences(console, table.sentences(found, brief=True))


def _sentences(console: Any, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False)
