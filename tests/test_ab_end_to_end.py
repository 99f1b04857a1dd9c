"""`somaspeed ab` with the real lerobot-train: green, planted faults, a resumed folder, an interruption.

Each fault is caught by the gate, or named, and makes no claim.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from somaspeed_patch.ab import figures
from somaspeed_patch.testing_pi05 import make_dataset

# A package of LeRobot's plugin discovery: it spoils the run as the variable says.
PLUGIN = """\
import os, time
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

fault = os.environ["FAULT"]

if fault == "fallback":
    from somaspeed_patch.pi05 import forward

    def raise_(*args):
        raise RuntimeError("no kernel for this GPU")

    forward.split_forward = raise_

if fault == "loader":
    read = LeRobotDataset.__getitem__

    def slow(self, index):
        time.sleep(0.15)
        return read(self, index)

    LeRobotDataset.__getitem__ = slow

if fault == "memory":
    step = torch.optim.Optimizer.zero_grad

    def full(self, *args, **kwargs):
        torch.empty(2**60, dtype=torch.uint8)
        return step(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = full
"""
RECIPE = """\
description: "end to end"
host: lerobot-train
steps: 6
discard: 3
repeats: 1
timeout_seconds: 120
environment:
  OMP_NUM_THREADS: 1
  HF_HUB_OFFLINE: 1
  CUDA_VISIBLE_DEVICES: ""
  TRITON_INTERPRET: 0 # which the tests set for kernels: the optimizer's would take a second an update
  PYTHONPATH: FOLDER
  FAULT: ""
arguments:
  - --tiny.discover_packages_path=somaspeed_patch.tiny_pi05
  - --fault.discover_packages_path=planted_fault
  - --policy.type=pi05
  - --policy.device=cpu
  - --policy.push_to_hub=false
  - --policy.chunk_size=4
  - --policy.n_action_steps=4
  - --policy.image_resolution=[28,28]
  - --policy.tokenizer_max_length=48
  - --policy.train_expert_only=true
  - --dataset.repo_id=local/noise
  - --dataset.root=FOLDER/dataset
  - --dataset.video_backend=pyav
  - --output_dir={out}
  - --steps={steps}
  - --batch_size=4
  - --num_workers=0
  - --log_freq=1
  - --save_checkpoint=false
  - --env_eval_freq=0
  - --wandb.enable=false
  - --seed=1
arms:
  native: {targets: none}
  patched: {targets: default}
  reseeded: {targets: none, arguments: [--seed=2]}
  falls_back: {targets: default, environment: {FAULT: fallback}}
  slow_loader: {targets: default, environment: {FAULT: loader}}
  out_of_memory: {targets: default, environment: {FAULT: memory}}
  not_a_number: {targets: default, arguments: [--policy.optimizer_lr=1.0e+38]}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ab")
    make_dataset(folder / "dataset")
    (folder / "planted_fault").mkdir()
    (folder / "planted_fault" / "__init__.py").write_text(PLUGIN)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


def command(workplace: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "somaspeed_patch", "ab", str(workplace / "recipe.yaml"), *words]


def ab(workplace, *words):
    """One call; all calls of this module share the finished runs of one folder."""
    return subprocess.run(
        command(workplace, "--out", str(workplace / "out"), *words), capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def green(workplace):
    return ab(workplace, "--arms", "native,patched", "--json")


def test_green(green, workplace):
    assert green.returncode == 0, green.stderr
    found = json.loads(green.stdout)
    assert found == json.loads((workplace / "out" / "results.json").read_text())
    native, patched = found["cells"]
    assert native["completed_steps"] == patched["completed_steps"] == 6
    assert found["gate"]["patched"]["reasons"] == []
    withheld = [*native["withheld"], *patched["withheld"]]  # frames are most of so small a step
    assert all(why.startswith("loader-bound") for why in withheld)
    assert {"python", "torch", "lerobot", "transformers", "accelerate"} <= set(found["versions"])
    assert found["machine"]["devices"] == ["cpu"] and found["machine"]["cpu"]
    assert any("lerobot-train" in word for word in native["runs"][0]["command"])
    assert {site["site"].split("/")[0] for site in patched["sites"]} >= {"step_recorder"}
    assert str(workplace / "out") not in green.stdout and sys.executable not in green.stdout


def test_every_gradient_was_compared_and_the_files_are_gone(green, workplace):
    verdict = json.loads(green.stdout)["gate"]["patched"]
    assert 0 <= verdict["gradient"]["share"] <= 1 and verdict["gradient"]["parameters"] > 30
    kept = [file.parent.name for file in (workplace / "out").rglob("gradients.safetensors")]
    assert verdict["notes"] == [] and kept == ["native-1"]  # for arms that come later


def test_the_pages_say_what_the_json_says(green, workplace):
    found, out = json.loads(green.stdout), workplace / "out"
    speed = found["cells"][1]["samples_per_second"]["median"]
    assert str(figures.plain(speed)) in (out / "results.md").read_text()
    assert f'data-value="{speed!r}"' in (out / "index.html").read_text()


def test_recorded_phases_add_up_and_equal_what_lerobot_logs(green, workplace):
    run = workplace / "out" / "runs" / "native-1"
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 7))
    for step in steps:
        phases = {name: value for name, value in step["seconds"].items() if name != "total"}
        assert sum(phases.values()) == pytest.approx(step["seconds"]["total"])
        assert min(phases.values()) > 0 and step["samples"] == 4 and step["peak_bytes"] > 0
    logged = [line for line in (run / "log.txt").read_text().splitlines() if " loss:" in line]
    for step, line in zip(steps, logged, strict=True):
        assert f" loss:{step['loss']:.3f} grdn:{step['grad_norm']:.3f}" in line


@pytest.fixture(scope="module")
def found(green, workplace):
    done = ab(workplace, "--json")
    assert done.returncode == 3, done.stderr  # a red gate
    return json.loads(done.stdout)


def cell(found, arm):
    (one,) = [cell for cell in found["cells"] if cell["arm"] == arm]
    return one


def no_claim(found, arm):
    said = found["comparison"]["arms"][arm]
    return said["equal_batch"] == [] and said["best_batch"] is None and bool(said["withheld"])


def test_a_silent_fallback_is_named_and_makes_no_claim(found):
    fell = cell(found, "falls_back")
    assert found["gate"]["falls_back"]["green"]  # the host computed it, so it is right: only not ours
    assert fell["withheld"][0].startswith("pi05/frozen_prefix fell back to the host ")
    assert "no kernel for this GPU" in fell["withheld"][0]
    assert fell["samples_per_second"]["median"] > 0 and no_claim(found, "falls_back")


def test_a_loader_bound_arm_is_named_and_makes_no_claim(found):
    assert found["gate"]["slow_loader"]["green"]
    assert cell(found, "slow_loader")["withheld"][0].startswith("loader-bound: data and preprocessing take ")
    assert no_claim(found, "slow_loader")


def test_an_arm_without_memory_is_a_result_in_words(found):
    full = cell(found, "out_of_memory")
    assert full["failure"].startswith("run 1: out of memory after 0 of 6 updates: ")
    assert no_claim(found, "out_of_memory") and "out_of_memory" not in found["gate"]


def test_an_arm_that_learns_nothing_is_red(found):
    verdict = found["gate"]["not_a_number"]
    assert not verdict["green"]
    assert verdict["reasons"][0].startswith("not_a_number, run 1, rank 0: loss is nan at update ")
    assert "samples_per_second" not in cell(found, "not_a_number") and no_claim(found, "not_a_number")


def test_a_changed_loss_is_red(found):
    verdict = found["gate"]["reseeded"]
    assert not verdict["green"] and verdict["reasons"][0].startswith("loss differs by")
    assert verdict["gradient"]["share"] > 1
    assert "samples_per_second" not in cell(found, "reseeded") and no_claim(found, "reseeded")


def test_the_page_says_it_all(found, workplace):
    page = (workplace / "out" / "index.html").read_text()
    for words in ("no kernel for this GPU", "loader-bound", "out of memory", "loss is nan"):
        assert words in page


def test_an_ab_killed_in_repeat_2_goes_on_with_what_is_finished(found, workplace):
    """SIGKILL to the runner alone: its child lives on, and the next call ends it and runs again."""
    words = command(
        workplace, "--out", str(workplace / "out"), "--arms", "native", "--repeats", "2", "--json"
    )
    first = workplace / "out" / "runs" / "native-1" / "run.json"
    before, second = first.read_text(), first.parents[1] / "native-2"
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while killed.poll() is None and not (second / "pid").is_file():
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    orphan = int((second / "pid").read_text())
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    native = cell(json.loads(done.stdout), "native")
    assert native["repeats"] == 2 and len(native["samples_per_second"]["repeats"]) == 2
    assert first.read_text() == before and (second / "run.json").is_file()
    assert int((second / "pid").read_text()) != orphan and not _alive(orphan)


def _alive(pid: int) -> bool:
    """Whether it runs; a dead one that nobody has reaped does not."""
    try:
        os.kill(pid, signal.SIGCONT)
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() or ["Z"])[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_finished_runs_are_taken_over(green, workplace):
    started = time.monotonic()
    done = ab(workplace, "--arms", "native,patched")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 5  # no process of the host was started


def test_an_interruption_leaves_no_process_behind(workplace):
    out = workplace / "interrupted"
    parent = subprocess.Popen(
        command(workplace, "--out", str(out), "--arms", "native"), stderr=subprocess.PIPE, text=True
    )
    log = out / "runs" / "native-1" / "log.txt"
    while parent.poll() is None and not (log.is_file() and log.stat().st_size):  # until the host is at work
        time.sleep(0.1)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 130 and "finished runs are kept" in said
    assert not _running_in(out)


def _running_in(out: Path) -> list[str]:
    """Command lines of processes that were given this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if str(out) in words and int(entry.parent.name) != os.getpid():
            found.append(words)
    return found


def test_a_recipe_that_is_wrong_is_one_line(workplace):
    file = workplace / "wrong.yaml"
    file.write_text(RECIPE.replace("steps: 6", "step: 6", 1))
    words = [sys.executable, "-m", "somaspeed_patch", "ab", str(file)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        f"{file}:3: step: unknown key; did you mean steps?" in done.stderr and "Traceback" not in done.stderr
    )
