"""Every way to switch the patches on, with the real lerobot-train on the shipped frames."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ASSETS = Path(__file__).parents[1] / "recipes" / "assets"
TRAIN = [
    "--tiny.discover_packages_path=somaspeed_patch.tiny_pi05", "--policy.type=pi05", "--policy.device=cpu",
    "--policy.push_to_hub=false", "--policy.chunk_size=4", "--policy.n_action_steps=4",
    "--policy.image_resolution=[28,28]", "--policy.train_expert_only=true",
    "--policy.tokenizer_max_length=96", "--dataset.repo_id=somaspeed/libero_spatial_tiny",
    f"--dataset.root={ASSETS / 'libero_spatial_tiny'}", "--dataset.video_backend=pyav", "--batch_size=2",
    "--num_workers=0", "--log_freq=1", "--env_eval_freq=0", "--steps=2", "--seed=7",
]  # fmt: skip
SCRIPT = """
import somaspeed_patch
somaspeed_patch.patch()
from lerobot.scripts.lerobot_train import main
if __name__ == "__main__":
    main()
"""
PY, RUN = sys.executable, ["-m", "somaspeed_patch", "run"]
TORCHRUN = [BIN / "torchrun", "--nproc_per_node=2"]
PLUGIN = "--somaspeed.discover_packages_path=somaspeed_patch.lerobot_plugin"
# Spawned workers are in test_workers_train.py.
# name: (command before lerobot's arguments, lerobot's extra arguments, environment)
WAYS = {
    "native": ([BIN / "lerobot-train"], [], {}),
    "import in a script": ([PY, "{script}"], [], {}),
    "run -- console script": ([PY, *RUN, "--", "lerobot-train"], [], {}),
    "accelerate launch": (
        [BIN / "accelerate", "launch", "--cpu", "--num_processes=1", *RUN, "--", "lerobot-train"], [], {},
    ),
    "SOMASPEED=1": ([BIN / "lerobot-train"], [], {"SOMASPEED": "1"}),
    "lerobot's plugin discovery": ([BIN / "lerobot-train"], [PLUGIN], {}),
    "plugin discovery, SOMASPEED=0": ([BIN / "lerobot-train"], [PLUGIN], {"SOMASPEED": "0"}),
    "torchrun, two ranks": ([*TORCHRUN, "--master_port=29713", *RUN, "--", "lerobot-train"], [], {}),
}  # fmt: skip
NATIVE = {"native", "plugin discovery, SOMASPEED=0"}


def start(name, folder):
    command, extra, environment = WAYS[name]
    script = folder / "train.py"
    script.write_text(SCRIPT)
    words = [str(word).format(script=script) for word in command]
    clean = {key: value for key, value in os.environ.items() if key != "SOMASPEED"}
    out, err = folder / "stdout", folder / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [*words, *TRAIN, *extra, f"--output_dir={folder / 'out'}"],
            env={**clean, **environment, "TRITON_INTERPRET": "0"},
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            start_new_session=True,
        )
        code = wait(process, err, may_hang="two ranks" in name)
    return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def wait(process, err, *, may_hang):
    """The exit code; two ranks of stock lerobot-train on gloo may hang when all is done (3 of 22 runs)."""
    deadline, ended = time.monotonic() + 300, None
    while process.poll() is None:
        time.sleep(0.5)
        if ended is None and may_hang and "End of training" in err.read_text():
            ended = time.monotonic()
        hangs = ended is not None and time.monotonic() > ended + 20
        if hangs or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 0 if hangs else "did not end in 300 s"
    return process.returncode


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every way, two at a time: name -> (finished process, output folder)."""
    folders = {name: tmp_path_factory.mktemp("way") for name in WAYS}
    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(WAYS, pool.map(lambda name: start(name, folders[name]), WAYS), strict=True))
    return {name: (done[name], folders[name] / "out") for name in WAYS}


def losses(text):
    return re.findall(r"step:\d+ .* loss:([0-9.]+) grdn:([0-9.]+)", text)


def sites(folder, name="somaspeed_report.json"):
    return {site["site"]: site for site in json.loads((folder / name).read_text())["sites"]}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_natively_and_says_what_ran(runs, way):
    done, folder = runs[way]
    assert done.returncode == 0, done.stderr[-3000:]
    native, ours = (losses(run.stderr) for run in (runs["native"][0], done))
    assert len(native) == len(ours) == 2
    if (
        "two ranks" not in way
    ):  # they see other samples; test_layouts_train compares replicas with one process
        assert ours == native
    if way in NATIVE:
        assert not (folder / "somaspeed_report.json").exists()
    else:
        assert sites(folder)["pi05/frozen_prefix"]["calls"] == 2
        assert sites(folder)["pi05/frozen_prefix"]["fallbacks"] == 0


def test_stdout_is_the_hosts(runs):
    assert runs["run -- console script"][0].stdout == runs["native"][0].stdout


def test_every_rank_is_patched(runs):
    folder = runs["torchrun, two ranks"][1]
    for name in ("somaspeed_report.json", "somaspeed_report.rank1.json"):
        assert sites(folder, name)["pi05/frozen_prefix"]["calls"] == 2


def host(*words, script, tmp_path, flags=()):
    """Run a small host program with and without us."""
    path = tmp_path / "host.py"
    path.write_text(script)
    outcomes = []
    for command in ([PY, str(path)], [PY, *RUN, *flags, "--", str(path)]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=100)
        outcomes.append((done.returncode, done.stdout, done.stderr))
    return outcomes


@pytest.mark.parametrize(
    "script",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('text for stderr')",
        "import sys; print(sys.argv[1:], __name__, sys.path[0] == sys.argv[0].rsplit('/', 1)[0])",
        "raise SystemExit",
    ],
)
def test_exit_code_arguments_and_streams_are_the_hosts(script, tmp_path):
    native, ours = host("--", "a b", "--flag=1", script=script, tmp_path=tmp_path)
    assert ours == native


def test_a_module_is_run_as_python_does(tmp_path):
    (tmp_path / "host.py").write_text("import sys; print(sys.argv[1:], __name__, __spec__.name, sys.path[0])")
    native, ours = (
        subprocess.run(
            [*command, "-m", "host", "--", "a b"], capture_output=True, text=True, timeout=100, cwd=tmp_path
        )
        for command in ([PY], [PY, *RUN, "--"])
    )
    assert (ours.returncode, ours.stdout) == (native.returncode, native.stdout) and native.stdout


def test_a_hosts_exception_keeps_its_traceback_and_exit_code(tmp_path):
    native, ours = host(script="raise ValueError('theirs')", tmp_path=tmp_path)
    assert ours[0] == native[0] == 1
    assert ours[2].splitlines()[-1] == native[2].splitlines()[-1] == "ValueError: theirs"


def test_a_signal_reaches_the_host(tmp_path):
    script = "import signal, os, sys\nsignal.signal(15, lambda *_: sys.exit(9))\nos.kill(os.getpid(), 15)"
    native, ours = host(script=script, tmp_path=tmp_path)
    assert ours == native == (9, "", "")


def test_a_spawned_process_is_patched_like_its_parent(tmp_path):
    script = """
import multiprocessing, sys

def ask(queue):
    queue.put(sorted(sys.modules["somaspeed_patch.patching"].active()))

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=ask, args=(queue,))
    child.start()
    print(queue.get(timeout=60))
    child.join()
"""
    path = tmp_path / "host.py"
    path.write_text(script)
    command = [PY, *RUN, "--target", "pi05", "--no-compact-tokens", "--", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "['pi05']\n", done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run"], "expected a command after --"),
        (["run", "--", "no-such-program"], "no-such-program is no console script of this environment"),
        (["run", "--", "-m"], "expected a module after -m"),
        (["run", "--target", "pi06", "--", "lerobot-train"], "no target is called 'pi06'; did you mean pi05"),
        (
            ["run", "--record-steps", "x", "--", "lerobot-train"],
            'feature record_steps belongs to "step_recorder"',
        ),
        (["run", "--no-such-flag", "--", "lerobot-train"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_wrong_command_is_one_clear_line(words, text):
    done = subprocess.run([PY, "-m", "somaspeed_patch", *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_environment_variable_is_one_warning_and_the_program_runs():
    done = subprocess.run(
        [PY, "-c", "print('ran')"],
        env={**os.environ, "SOMASPEED": '{"targets": ["pi06"], "features": {}}'},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "no target is called 'pi06'" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_lists_the_sites():
    done = subprocess.run(
        [PY, "-m", "somaspeed_patch", "report", "--json"], capture_output=True, text=True, timeout=200
    )
    found = {site["site"]: site["status"] for site in json.loads(done.stdout)["sites"]}
    assert found["pi05/frozen_prefix"] == "patched"
    assert found["pi05/compile"] == "native"
    assert found["groot/lerobot"] == "patched" and found["groot/nvidia"] == "waiting"  # not installed
