"""The runner with a host that is a small script: failures in words, timeouts, budgets, resumed folders."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from somaspeed_patch.ab import child, runner
from somaspeed_patch.ab.recipe import load

HOST = """\
import json, os, pathlib, signal, subprocess, sys, time
out, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(out.parent / "steps.jsonl", "w") as file:
    for step in range(1, 2 if behaviour == "short" else 4):
        line = {"step": step, "loss": 1.0, "grad_norm": 1.0, "samples": 1, "seconds": {"total": 1.0}}
        print(json.dumps(line), file=file)
if behaviour == "raise":
    raise RuntimeError("no such luck")
if behaviour == "full":
    print("torch.OutOfMemoryError: CUDA out of memory")
    sys.exit(1)
if behaviour == "bar":
    print("builtins.ValueError: bad data")
    print("Training:  0%")
    sys.exit(1)
if behaviour == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (out.parent / "child").write_text(str(child.pid))
    time.sleep(60)
if behaviour == "stay":
    time.sleep(60)
if behaviour == "environment":
    print(json.dumps(dict(os.environ)))
"""


@pytest.fixture
def make(tmp_path):
    """A recipe whose arms are named after what the host does; `good` does nothing special."""
    (tmp_path / "host.py").write_text(HOST)

    def make(*arms, repeats=1, timeout=20, environment="{}"):
        lines = [
            f"host: {tmp_path / 'host.py'}",
            "steps: 3",
            "discard: 0",
            f"repeats: {repeats}",
            f"timeout_seconds: {timeout}",
            f"environment: {environment}",
            'arguments: ["{out}"]',
            "arms:",
            *(f"  {arm}: {{targets: none, arguments: [{arm}]}}" for arm in arms),
        ]
        file = tmp_path / "recipe.yaml"
        file.write_text("\n".join(lines))
        return load(str(file))

    return make


def test_a_good_run_is_finished_and_watched(make, tmp_path):
    seen = []
    (run,) = runner.run_all(
        make("good"), tmp_path / "out", watch=lambda label, done: seen.append((label, done))
    )
    assert (run.status, run.reason, run.label) == ("finished", "", "good-1")
    assert seen[-1] == ("good-1", 3)
    assert json.loads((Path(run.folder) / "run.json").read_text())["command"][0] == sys.executable


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("raise", "exit code 1 after 3 of 3 updates: RuntimeError: no such luck; see "),
        ("bar", "exit code 1 after 3 of 3 updates: builtins.ValueError: bad data; see "),
        ("killed", "killed by SIGKILL (a system that lacks memory does that) after 3 of 3 updates; see "),
        ("full", "out of memory after 3 of 3 updates: torch.OutOfMemoryError: CUDA out of memory; see "),
        ("short", "ended well, but recorded 1 updates where the recipe's steps says 3; see "),
    ],
)
def test_a_failure_is_an_outcome_and_its_arm_is_not_run_again(make, tmp_path, arm, said):
    runs = runner.run_all(make(arm, "good", repeats=2), tmp_path / "out")
    assert [(run.label, run.status) for run in runs] == [
        (f"{arm}-1", "failed"),
        ("good-1", "finished"),
        ("good-2", "finished"),
    ]
    assert runs[0].reason.startswith(said) and runs[0].reason.endswith("log.txt")


def test_a_run_that_takes_too_long_is_stopped_with_its_children(make, tmp_path):
    begun = time.monotonic()
    (run,) = runner.run_all(make("hang", timeout=3), tmp_path / "out")
    assert run.reason.startswith("stopped after 3 s, the recipe's timeout_seconds")
    assert time.monotonic() - begun < 15
    assert _ends(Path("/proc") / (Path(run.folder) / "child").read_text() / "stat")


def test_a_run_that_has_done_its_work_but_stays_is_finished_with_a_note(make, tmp_path, monkeypatch):
    monkeypatch.setattr(child, "_EXIT", 1.0)
    (run,) = runner.run_all(make("stay"), tmp_path / "out")
    assert (run.status, run.reason) == ("finished", "")
    assert run.note == "recorded every update but did not exit within 1 s, and was stopped"


def _ends(stat: Path) -> bool:
    """Whether the process is gone, or dead and not yet reaped, within five seconds."""
    for _ in range(50):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_finished_runs_are_taken_over_and_others_run_again(make, tmp_path):
    recipe, out = make("good", "raise"), tmp_path / "out"
    first = runner.run_all(recipe, out)
    (Path(first[0].folder) / "mark").touch()
    (Path(first[1].folder) / "mark").touch()
    second = runner.run_all(recipe, out)
    assert second[0] == first[0] and (Path(first[0].folder) / "mark").exists()
    assert second[1].started > first[1].started and not (Path(first[1].folder) / "mark").exists()


def test_a_run_of_another_command_is_run_again(make, tmp_path):
    out = tmp_path / "out"
    (first,) = runner.run_all(make("good"), out)
    (second,) = runner.run_all(make("good", environment="{A: 1}"), out)
    assert second.started > first.started and second.environment == {"A": "1"}


def test_a_spent_budget_leaves_one_run_of_each_arm(make, tmp_path):
    runs = runner.run_all(make("good", "other", repeats=5), tmp_path / "out", budget=0.0)
    assert [run.label for run in runs] == ["good-1", "other-1"]


def test_the_recipe_decides_the_environment_not_the_caller(make, tmp_path, monkeypatch):
    monkeypatch.setenv("SOMASPEED", "1")
    monkeypatch.setenv("KEPT", "yes")
    (run,) = runner.run_all(make("environment", environment="{A: b}"), tmp_path / "out")
    log = (Path(run.folder) / "log.txt").read_text()
    seen = json.loads(next(line for line in log.splitlines() if line.startswith("{")))
    assert (seen["A"], seen["KEPT"]) == ("b", "yes")
    assert json.loads(seen["SOMASPEED"])["targets"] == ["step_recorder"]
    assert os.environ["SOMASPEED"] == "1"


def test_features_become_flags(make, tmp_path):
    from dataclasses import replace

    recipe = make("good")
    arm = replace(
        recipe.arms[0], targets=("pi05",), features={"frozen_prefix": False, "compile": True, "x": "y"}
    )
    words = runner.command(recipe, arm, None, 2, tmp_path)
    ours = words[: words.index("--")]
    assert ours[4:8] == ("--target", "pi05", "--target", "step_recorder")
    assert ours[9:] == ("--no-frozen-prefix", "--compile", "--x=y")


def test_the_first_repeat_keeps_gradients_and_profiles_the_last_update_of_the_warm_up(make, tmp_path):
    from dataclasses import replace

    recipe = replace(make("good"), discard=2)
    looks = [word for word in runner.command(recipe, recipe.arms[0], None, 1, tmp_path) if "record-" in word]
    assert looks[1:] == ["--record-gradients=1", "--record-profile=2"]
    bare = replace(recipe, discard=0, gradients=None)
    looks = [word for word in runner.command(bare, bare.arms[0], None, 1, tmp_path) if "record-" in word]
    assert looks == [f"--record-steps={tmp_path / 'steps.jsonl'}"]


def test_every_batch_is_a_cell_of_its_own(make, tmp_path):
    recipe = make("good", repeats=2)
    recipe.path.write_text(
        recipe.path.read_text()
        .replace('["{out}"]', '["{out}"]\nbatches: [2, 4]')
        .replace("[good]", '[good, "{batch}"]')
    )
    runs = runner.run_all(load(str(recipe.path)), tmp_path / "out")
    assert [run.label for run in runs] == ["good-b2-1", "good-b4-1", "good-b4-2", "good-b2-2"]
    assert [run.command[-1] for run in runs] == ["2", "4", "4", "2"]


def test_an_arm_that_fails_the_gate_is_not_run_again(make, tmp_path):
    asked = []

    def leave_out(runs):
        asked.append([run.label for run in runs])
        return {"other"}

    runs = runner.run_all(make("good", "other", repeats=3), tmp_path / "out", leave_out=leave_out)
    assert [run.label for run in runs] == ["good-1", "other-1", "good-2", "good-3"]
    assert asked == [["good-1", "other-1"]]


def test_the_largest_batch_is_looked_for(make, tmp_path):
    recipe = make("good")
    recipe.path.write_text(
        recipe.path.read_text()
        .replace('["{out}"]', '["{out}"]\nbatches: [2]\nfind_batch: true')
        .replace("[good]", '[good, "{batch}"]')
    )
    full = (
        'import sys\nif int(sys.argv[3]) > 11:\n    sys.exit("torch.OutOfMemoryError: CUDA out of memory")\n'
    )
    (tmp_path / "host.py").write_text(full + HOST)
    said = []
    found = runner.with_found_batches(load(str(recipe.path)), tmp_path / "out", said.append)
    assert found.batches_of(found.arms[0]) == (2, 10)
    assert "good at batch 4: fits" in said
    assert any(line.startswith("good at batch 16: out of memory after 0 of 2 updates") for line in said)
    runs = runner.run_all(found, tmp_path / "out")
    assert [run.label for run in runs] == ["good-b2-1", "good-b10-1"]


def test_a_slow_arm_is_ended_after_its_own_number_of_updates(make, tmp_path):
    recipe = make("stay")
    recipe.path.write_text(recipe.path.read_text().replace("targets: none", "targets: none, stop_after: 2"))
    begun = time.monotonic()
    (run,) = runner.run_all(load(str(recipe.path)), tmp_path / "out")
    assert (run.status, run.note) == ("finished", "ended after 2 updates")
    assert time.monotonic() - begun < 20
