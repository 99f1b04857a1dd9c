"""`somaspeed run -- SCRIPT.py ARGS`: the script sees what `python SCRIPT.py ARGS` gives it, launched or not.

Isaac-GR00T is started so: `somaspeed run -- gr00t/experiment/launch_finetune.py ...`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN, PY = Path(sys.executable).parent, sys.executable
RUN = ["-m", "somaspeed_patch", "run", "--"]
ARGUMENTS = ["--steps", "2", "--", "a b", "--flag=1"]
SIBLING = "def answer():\n    return 42\n"
SCRIPT = '''"""What the script is for."""
import atexit, json, os, pickle, sys
from dataclasses import dataclass

import sibling


@dataclass
class Config:
    steps: int


def seen():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "path": sys.path, "name": __name__, "doc": __doc__, "file": __file__,
        "main": [main.__file__, main.Config is Config, main.__package__, main.__spec__, main.__cached__],
        "builtins": __builtins__.__name__, "loader": repr(type(main.__loader__)), "cwd": os.getcwd(),
        "pickled": pickle.loads(pickle.dumps(Config(2))).steps, "sibling": sibling.answer(),
        "annotations": repr(Config.__annotations__),  # strings if our own __future__ imports leaked into it
    }


if __name__ == "__main__":
    print(json.dumps(seen()))
    atexit.register(lambda: print(pickle.loads(pickle.dumps(Config(3))).steps))
'''
UNDER_A_LAUNCHER = """
import json, os, sys
import sibling

active = sys.modules["somaspeed_patch.patching"].active()
print(json.dumps([os.environ.get("RANK", "0"), "hf_trainer" in active, sibling.answer(), sys.argv[1:]]))
"""
# name: (command before the script, SOMASPEED, ranks)
LAUNCHERS = {
    "accelerate launch -m": ([BIN / "accelerate", "launch", "--cpu", "--num_processes=1", *RUN], None, "0"),
    "torchrun, SOMASPEED=1": ([BIN / "torchrun", "--nproc_per_node=2", "--master_port=29717"], "1", "01"),
}


def start(command, folder, somaspeed=None):
    clean = {key: value for key, value in os.environ.items() if key not in ("SOMASPEED", "RANK")}
    environment = {**clean, **({} if somaspeed is None else {"SOMASPEED": somaspeed})}
    return subprocess.run(
        [*map(str, command), *ARGUMENTS],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory, and scripts with a module beside them in a folder of it."""
    made = tmp_path_factory.mktemp("run")
    scripts = made / "experiment"
    scripts.mkdir()
    for name, text in (
        ("script.py", SCRIPT), ("launched.py", UNDER_A_LAUNCHER), ("sibling.py", SIBLING),
    ):  # fmt: skip
        (scripts / name).write_text(text)
    (made / "linked.py").symlink_to(scripts / "script.py")
    return made


@pytest.mark.parametrize("command", [[PY, *RUN], [PY, *RUN, "python"], [BIN / "somaspeed", "run", "--"]])
@pytest.mark.parametrize("script", ["experiment/script.py", "linked.py", "{folder}/experiment/script.py"])
def test_a_script_sees_what_python_gives_it(folder, command, script):
    script = script.format(folder=folder)
    native, ours = start([PY, script], folder), start([*command, script], folder)
    assert ours.returncode == native.returncode == 0, ours.stderr
    assert ours.stdout.splitlines() == native.stdout.splitlines()
    first, at_exit = native.stdout.splitlines()
    assert at_exit == "3"
    expected = json.loads(first)
    assert expected["argv"] == [script, *ARGUMENTS]
    assert expected["path"][0] == str(folder / "experiment")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_starts_a_patched_script(folder, name):
    command, somaspeed, ranks = LAUNCHERS[name]
    done = start([*command, "experiment/launched.py"], folder, somaspeed)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert lines == [[rank, True, 42, ARGUMENTS] for rank in ranks]
