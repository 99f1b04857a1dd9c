"""`somaspeed ab --synthetic` on a tiny pi0.5: the gate, the figures, and what it says of failures."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from somaspeed_patch import features
from somaspeed_patch.ab import synthetic, synthetic_gate, synthetic_recipe, table
from somaspeed_patch.ab.yaml_reader import RecipeError
from somaspeed_patch.pi05 import hints

RECIPE = """
description: tiny
host: lerobot-train
steps: 1
arms:
  native: { targets: none }
synthetic:
  model: pi05
  size: micro
  dtype: bfloat16
  slots: 48
  tokens: 20
  chunk: 5
  warmup: 1
  steps: 2
  repeats: 2
  arms:
    native: { batches: [2, 4] }
    native_checkpointed: { policy: { gradient_checkpointing: true }, batches: [2] }
    patched: { patched: true, batches: [2] }
"""


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def changed(path, old, new):
    other = path.with_name("changed.yaml")
    other.write_text(path.read_text().replace(old, new))
    return str(other)


@pytest.fixture(scope="module")
def results(recipe_file):
    out = recipe_file.parent / "out"
    command = [sys.executable, "-m", "somaspeed_patch", "ab", str(recipe_file), "--synthetic", "--profile"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "gate patched: green" in done.stderr and "patched: the parity gate is green" in done.stdout
    return json.loads((out / "results.json").read_text())


def test_the_gate_compares_every_gradient_with_fp32(results):
    verdict = results["gate"]["patched"]
    assert verdict["green"]
    assert 0 < verdict["worst_parameter"]["share"] <= 1
    assert verdict["gradients_of_one_arm_only"] == []
    assert verdict["loss"]["patched"] == pytest.approx(verdict["loss"]["fp32"], rel=1e-2)


def test_every_arm_and_batch_has_its_repeats_and_its_own_calls(results):
    cells = {(cell["arm"], cell["batch"]): cell for cell in results["cells"]}
    assert set(cells) == {("native", 2), ("native", 4), ("native_checkpointed", 2), ("patched", 2)}
    assert all(len(cell["samples_per_second"]["repeats"]) == 2 for cell in cells.values())
    assert cells["native", 2]["sites"] == []
    ran = {site["site"]: site for site in cells["patched", 2]["sites"]}
    assert ran["pi05/frozen_prefix"]["calls"] == 3  # a second repeat: one update to warm up, two timed


def test_the_profile_adds_up(results):
    profile = next(cell["profile"] for cell in results["cells"] if cell["arm"] == "patched")
    assert sum(kernel["share"] for kernel in profile["largest"]) <= 1
    largest = [kernel["ms"] for kernel in profile["largest"]]
    assert largest == sorted(largest, reverse=True)
    assert largest[0] / profile["total_ms"] == pytest.approx(profile["largest"][0]["share"])


def test_ratios_are_to_native_arms(results):
    compared = results["comparison"]
    (equal,) = compared["arms"]["patched"]["equal_batch"]
    assert equal["batch"] == 2 and equal["against"] in ("native", "native_checkpointed")
    cells = {(cell["arm"], cell["batch"]): cell for cell in results["cells"]}
    ours, theirs = (cells[arm, 2]["samples_per_second"]["repeats"] for arm in ("patched", equal["against"]))
    assert equal["ratio_by_repeat"] == [a / b for a, b in zip(ours, theirs, strict=True)]
    assert equal["low"] <= equal["ratio"] <= equal["high"]
    best = compared["arms"]["patched"]["best_batch"]
    assert (best["against"], best["against_batch"]) == tuple(compared["best_native"].values())
    assert cells["patched", 2]["tflops"] == pytest.approx(
        cells["patched", 2]["tflop_per_sample"] * cells["patched", 2]["samples_per_second"]["median"]
    )


@pytest.fixture
def out(results, recipe_file, tmp_path):
    """A copy of the folder of finished repeats."""
    return shutil.copytree(recipe_file.parent / "out", tmp_path / "out")


def test_a_killed_run_takes_over_finished_repeats(results, recipe_file, out, monkeypatch):
    """With every repeat there, nothing is gated or measured again; a recipe that says otherwise is."""
    monkeypatch.setattr(synthetic.Subject, "update", None)
    monkeypatch.setattr(synthetic.Subject, "loss_and_gradients", None)
    recipe, told = synthetic_recipe.load(str(recipe_file)), []
    found = synthetic.run(recipe, device=CPU, say=told.append, out=out)
    assert found["cells"] == results["cells"] and found["gate"] == results["gate"]
    other = synthetic.run(replace(recipe, steps=3), device=CPU, say=told.append, out=out)
    assert "TypeError" in other["gate"]["patched"]["reasons"][0]


def test_an_interrupted_repeat_alone_is_run_again(results, recipe_file, out):
    (out / "step" / "native-b4-2.json").unlink()
    found = synthetic.run(synthetic_recipe.load(str(recipe_file)), device=CPU, say=lambda line: None, out=out)
    again, before = ({(c["arm"], c["batch"]): c for c in one["cells"]} for one in (found, results))
    assert again["patched", 2] == before["patched", 2]
    repeats = again["native", 4]["samples_per_second"]["repeats"]
    assert repeats[0] == before["native", 4]["samples_per_second"]["repeats"][0] and len(repeats) == 2


def test_the_largest_batch_of_an_arm_is_found_and_measured(recipe_file, monkeypatch):
    text = "native: { batches: [2, 4] }", "native: { batches: [2], find_batch: true }"
    recipe = synthetic_recipe.load(changed(recipe_file, *text)).chosen("native", 1)
    update = synthetic.Subject.update

    def full(self, batch):
        if len(batch["action"]) > 5:
            raise torch.OutOfMemoryError("full")
        return update(self, batch)

    monkeypatch.setattr(synthetic.Subject, "update", full)
    found = synthetic.run(recipe, device=CPU, say=lambda line: None)
    assert [cell["batch"] for cell in found["cells"]] == [2, 5]


def test_the_baseline_against_itself_states_an_interval(recipe_file):
    recipe = synthetic_recipe.load(str(recipe_file)).chosen("native", 2).against_itself()
    found = synthetic.run(recipe, device=CPU, say=lambda line: None)
    ratios = found["comparison"]["arms"]["native_again"]["equal_batch"]
    assert [ratio["against"] for ratio in ratios] == ["native", "native"]
    assert all(ratio["low"] < ratio["high"] for ratio in ratios) and found["gate"] == {}


def test_a_red_gate_has_no_figures(recipe_file, monkeypatch):
    recipe = synthetic_recipe.load(str(recipe_file)).chosen("native,patched", 1)
    judge = synthetic_gate.judge

    def doubled(exact, native, ours):
        return judge(exact, native, (ours[0], {name: 2 * gradient for name, gradient in ours[1].items()}))

    monkeypatch.setattr(synthetic_gate, "judge", doubled)
    found = synthetic.run(recipe, device=CPU, say=lambda line: None)
    assert not found["gate"]["patched"]["green"]
    (red,) = [cell for cell in found["cells"] if cell["arm"] == "patched"]
    assert "samples_per_second" not in red and red["withheld"][0].startswith(
        "the parity gate is red: the gradi"
    )
    assert "the parity gate is RED, so no speed is given" in table.markdown(found)


def test_an_arm_that_does_not_fit_is_a_line_and_the_others_run(recipe_file, monkeypatch):
    recipe = synthetic_recipe.load(str(recipe_file)).chosen("native", 1)
    update = synthetic.Subject.update

    def full(self, batch):
        if len(batch["action"]) == 4:
            raise torch.OutOfMemoryError("full")
        return update(self, batch)

    monkeypatch.setattr(synthetic.Subject, "update", full)
    found = synthetic.run(recipe, device=CPU, say=lambda line: None)
    assert [cell["failure"] for cell in found["cells"]] == ["", "out of memory"]
    assert found["comparison"]["arms"]["native"]["withheld"] == ["batch 4: out of memory"]


def test_an_arm_that_fails_at_the_gate_is_red_and_the_others_run(recipe_file, monkeypatch):
    recipe = synthetic_recipe.load(str(recipe_file)).chosen("native,patched", 1)
    loss_and_gradients = synthetic.Subject.loss_and_gradients

    def refuse(self, batch):
        if features.values():
            raise RuntimeError("no such kernel")
        return loss_and_gradients(self, batch)

    monkeypatch.setattr(synthetic.Subject, "loss_and_gradients", refuse)
    found = synthetic.run(recipe, device=CPU, say=lambda line: None)
    said = "it failed: RuntimeError: no such kernel"
    assert found["gate"]["patched"] == {"green": False, "reasons": [said]}
    assert said in table.markdown(found)


@pytest.mark.parametrize("padding", [None, "right"])
def test_the_mask_carries_what_its_values_say(recipe_file, padding):
    subject = synthetic.SUBJECTS["pi05"](synthetic_recipe.load(str(recipe_file)), torch.device("cpu"))
    mask = subject.batch(4, padding=padding)["observation.language.attention_mask"]
    assert mask.shape == (4, 48)
    assert (mask.sum(1)[1:] < 20).all() == (padding == "right")
    assert hints.of(mask) == hints.measure(mask) == hints.Valid(20, True, False)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "model: pi05",
            "model: pi06",
            r":8: synthetic.model: expected one of pi05, molmoact2, groot, but is 'pi06'",
        ),
        ("slots: 48", "slot: 48", r":11: synthetic.slot: unknown key; did you mean slots\?"),
        ("tokens: 20", "tokens: 64", r":12: synthetic.tokens: must be at most slots, 48, but is 64"),
        ("size: micro", "size: mikro", r"synthetic.size: expected one of full, micro, small, but is 'mikro'"),
        ("batches: [2, 4]", "batches: []", r"arms.native.batches: expected a list of batch sizes"),
        ("patched: true,", "patched: yes please,", r"arms.patched.patched: expected true or false"),
        ("patched: true,", "padding: left,", r"arms.patched.padding: expected right, but is 'left'"),
        ("gradient_checkpointing", "checkpointing", r"unknown key; did you mean gradient_checkpointing\?"),
        ("synthetic:", "synthetics:", r"synthetic: missing; --synthetic needs this section"),
    ],
)
def test_a_wrong_section_is_named_with_file_line_and_key(recipe_file, old, new, text):
    with pytest.raises(RecipeError, match=text):
        synthetic_recipe.load(changed(recipe_file, old, new))
