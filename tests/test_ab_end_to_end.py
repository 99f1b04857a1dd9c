"""`somaspeed ab` with the real lerobot-train: green, red, a crash, a resumed folder, an interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from somaspeed_patch.testing_pi05 import make_dataset

RECIPE = """\
description: "end to end"
host: lerobot-train
steps: 8
discard: 5
repeats: 1
timeout_seconds: 120
environment: {OMP_NUM_THREADS: 1, HF_HUB_OFFLINE: 1, CUDA_VISIBLE_DEVICES: ""}
arguments:
  - --tiny.discover_packages_path=somaspeed_patch.tiny_pi05
  - --policy.type=pi05
  - --policy.device=cpu
  - --policy.push_to_hub=false
  - --policy.chunk_size=4
  - --policy.n_action_steps=4
  - --policy.image_resolution=[28,28]
  - --policy.tokenizer_max_length=48
  - --policy.train_expert_only=true
  - --dataset.repo_id=local/noise
  - --dataset.root=DATASET
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
  broken: {targets: none, arguments: [--batch_size=none]}
"""
PUBLISHED = {
    "completed_steps",
    "setup_seconds",
    "samples_per_second_steady",
    "peak_allocated_gib",
    "median_step_seconds",
    "loss_first",
    "loss_last",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ab")
    make_dataset(folder / "dataset")
    (folder / "recipe.yaml").write_text(RECIPE.replace("DATASET", str(folder / "dataset")))
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
    assert set(found["comparison"]["native"]) == PUBLISHED
    assert set(found["comparison"]["patched"]) == {*PUBLISHED, "ratio", "ratio_by_repeat"}
    assert found["comparison"]["native"]["completed_steps"] == 8
    assert found["gate"]["patched"]["green"] and found["gate"]["patched"]["reasons"] == []
    assert {"python", "torch", "lerobot", "transformers", "accelerate"} <= set(found["versions"])
    assert found["machine"]["devices"] == ["cpu"] and found["machine"]["cpu"]
    assert any("lerobot-train" in word for word in found["arms"]["native"]["runs"][0]["command"])
    assert {site["site"].split("/")[0] for site in found["arms"]["patched"]["sites"]} >= {"step_recorder"}
    assert "speed against baseline" in (workplace / "out" / "results.md").read_text()


def test_recorded_phases_add_up_and_equal_what_lerobot_logs(green, workplace):
    run = workplace / "out" / "runs" / "native-1"
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 9))
    for step in steps:
        phases = {name: value for name, value in step["seconds"].items() if name != "total"}
        assert sum(phases.values()) == pytest.approx(step["seconds"]["total"])
        assert min(phases.values()) > 0 and step["samples"] == 4 and step["peak_bytes"] > 0
    logged = [line for line in (run / "log.txt").read_text().splitlines() if " loss:" in line]
    for step, line in zip(steps, logged, strict=True):
        assert f" loss:{step['loss']:.3f} grdn:{step['grad_norm']:.3f}" in line


def test_another_seed_is_red_and_has_no_ratio(green, workplace):
    done = ab(workplace, "--arms", "native,reseeded", "--json")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert not found["gate"]["reseeded"]["green"]
    assert "loss differs by" in found["gate"]["reseeded"]["reasons"][0]
    assert not {"ratio", "samples_per_second_steady", "median_step_seconds"} & set(
        found["comparison"]["reseeded"]
    )


def test_a_crash_is_reported_in_words(green, workplace):
    done = ab(workplace, "--arms", "native,broken")
    assert done.returncode == 1, done.stderr
    assert "broken failed: run 1: exit code" in done.stdout and "Traceback" not in done.stdout
    found = json.loads((workplace / "out" / "results.json").read_text())
    assert found["comparison"]["broken"]["completed_steps"] == 0


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
    file.write_text(RECIPE.replace("steps: 8", "step: 8", 1))
    words = [sys.executable, "-m", "somaspeed_patch", "ab", str(file)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        f"{file}:3: step: unknown key; did you mean steps?" in done.stderr and "Traceback" not in done.stderr
    )
