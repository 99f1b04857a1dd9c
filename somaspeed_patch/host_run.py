"""Run the host's own program in this process, as if it had been started without us.

`sys.argv`, `sys.path[0]`, `__main__`, the exit code, signals and the streams are the host's; only the
patches differ.
"""

from __future__ import annotations

import builtins
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any


def host_program(command: Sequence[str]) -> Callable[[], Any]:
    """What runs `command` to its end in this process and returns what its main function returned.

    Args:
        command: a console script and its arguments, or `-m`, a module and its arguments, or a script's
            path and its arguments; a leading `python` is skipped.

    Raises: ValueError: the command names nothing that can be run.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words:
        raise ValueError(
            "run: expected a command after --, for example: -- lerobot-train --policy.type=pi05 ..."
        )
    if words[0] == "-m":
        if len(words) < 2:
            raise ValueError("run: expected a module after -m")
        return partial(_run_module, words[1:])
    script = _console_script(words[0])
    if script is not None:
        return partial(_run_console_script, script, words)
    if Path(words[0]).is_file():
        return partial(_run_file, words)
    raise ValueError(f"run: {words[0]} is no console script of this environment ({sys.prefix}) and no file")


def _console_script(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=Path(name).name)), None)


def _run_console_script(script: EntryPoint, words: list[str]) -> Any:
    sys.argv = [shutil.which(words[0]) or words[0], *words[1:]]
    sys.path[0] = os.path.dirname(sys.argv[0])
    return script.load()()


def _run_module(words: list[str]) -> None:
    sys.argv = ["-m", *words[1:]]  # runpy puts the module's file in its place
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run_file(words: list[str]) -> None:
    """As `python FILE` does: `__main__` is the script for good, for what its threads and exit hooks look up.

    runpy would put ours back at the script's end, and would make `__file__` relative if the word is.
    """
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    path = os.path.abspath(words[0])
    main = sys.modules["__main__"] = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
