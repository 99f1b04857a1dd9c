"""The command line: `somaspeed run | report | features | doctor | ab | layout | rl`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from somaspeed_patch import features, patching, sites
from somaspeed_patch._version import __version__
from somaspeed_patch.adapter import every_feature
from somaspeed_patch.host_run import host_program

_RUN_HELP = "patch, then run the host's own command: somaspeed run [flags] -- lerobot-train ARGS"


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run one command; what it returns is the exit code, as `sys.exit` takes it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours, host = _split(words)
    parser = _parser()
    args = parser.parse_args(ours)
    args.host = host
    try:
        result = args.command(args)
    except ValueError as error:
        parser.exit(2, f"somaspeed: {error}\n")
    return result() if callable(result) else result  # a host's own errors are its own


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our words and, after the first `--`, the host's."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="somaspeed", description="Faster VLA training for the recipe you have."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help=_RUN_HELP, usage="somaspeed run [flags] -- COMMAND [ARGS]")
    _add_patch_flags(run)
    run.set_defaults(command=_run)
    shown = commands.add_parser(
        "report", help="what patch() does with the hosts installed here, or a saved report"
    )
    shown.add_argument("file", nargs="?", help="a somaspeed_report.json to print instead")
    shown.add_argument("--json", action="store_true", help="print JSON")
    _add_patch_flags(shown)
    shown.set_defaults(command=_report)
    table = commands.add_parser("features", help="every feature: what it changes, exact or not, its default")
    table.set_defaults(command=_features)
    doctor = commands.add_parser("doctor", help="check this environment: hosts, GPU, compiler, kernel")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)
    importlib.import_module("somaspeed_patch.ab.cli").add_arguments(commands)
    importlib.import_module("somaspeed_patch.layouts_plan.cli").add_arguments(commands)
    importlib.import_module("somaspeed_patch.rl_run.cli").add_arguments(commands)
    return parser


def _add_patch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", action="append", default=[], help="an adapter; repeatable; default: all that fit"
    )
    for feature in every_feature():
        flag = "--" + feature.name.replace("_", "-")
        text = feature.changes.replace("%", "%%")
        if isinstance(feature.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, default=None, metavar="VALUE", help=text)


def _patch(args: argparse.Namespace) -> None:
    names = [feature.name for feature in every_feature()]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    patching.patch(*args.target, **given)


def _run(args: argparse.Namespace) -> Any:
    start = host_program(args.host)
    _patch(args)
    return start


def _report(args: argparse.Namespace) -> int:
    shown = sites.Report.load(args.file) if args.file else _arranged(args)
    print(json.dumps(shown.to_dict(), indent=2) if args.json else shown)
    return 0


def _arranged(args: argparse.Namespace) -> sites.Report:
    """Patch, and import the hosts that are installed, so that every site of theirs is decided."""
    _patch(args)
    for adapter in list(patching.active().values()):
        for module in adapter.modules:
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                importlib.import_module(module)
    return patching.snapshot()


def _features(_: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("feature", "adapter", "changes", "exact", "default")
    for feature, owners in every_feature().items():
        default = str(feature.default)
        table.add_row(feature.name, ", ".join(owners), feature.changes, _exactness(feature), default)
    Console().print(table)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from somaspeed_patch import doctor

    found = doctor.examine()
    print(json.dumps(doctor.to_list(found), indent=2) if args.json else doctor.table(found))
    return doctor.exit_code(found)


def _exactness(feature: features.Feature) -> str:
    return "yes" if feature.exact else "no"
