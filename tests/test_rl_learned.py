"""Whether a policy has become better: the arithmetic over seeds and ways, and a recipe's cloned policy."""

import json
import math

import numpy as np
import pytest
import torch

from somaspeed_patch.rl.libero_states import save
from somaspeed_patch.rl_run import learned, states
from somaspeed_patch.rl_run.recipe_file import load


def run(seed, before, after, lag=None, episodes=100.0):
    lines = [
        {"iteration": number, "env_steps": 10 * number, "seconds": number, "success": success}
        for number, success in enumerate((before, after))
    ]
    evaluations = [{**line, "episodes": episodes} for line in lines]
    return {
        "date": "now", "command": [], "commit": "0", "versions": {}, "machine": {}, "curve": lines,
        "recipe": {"lag": lag, "seed": seed}, "evaluations": evaluations,
    }  # fmt: skip


def test_seeds_are_put_together_and_ways_are_not():
    found = learned.summary([run(0, 0.4, 0.8), run(1, 0.2, 0.9), run(0, 0.5, 0.5, lag=1)])["ways"]
    assert list(found) == ["one behind the other", "side by side"]
    both = found["one behind the other"]
    assert both["before"]["success"] == pytest.approx(0.3) and both["after"]["success"] == pytest.approx(0.85)
    errors = math.sqrt(0.3 * 0.7 / 200), math.sqrt(0.85 * 0.15 / 200)
    assert both["before"]["standard_error"] == pytest.approx(errors[0])
    assert both["standard_errors"] == pytest.approx(0.55 / math.hypot(*errors))
    assert [seed["seed"] for seed in both["seeds"]] == [0, 1]
    assert found["side by side"]["standard_errors"] == 0


def test_a_run_that_was_evaluated_once_is_refused():
    short = run(0, 0.4, 0.8)
    with pytest.raises(ValueError, match="an evaluation before its first iteration"):
        learned.summary([{**short, "evaluations": short["evaluations"][:1]}])


def test_runs_become_one_file_and_a_plot(tmp_path):
    folders = []
    for name, each in (("a", run(0, 0.4, 0.8)), ("b", run(0, 0.4, 0.7, lag=1))):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        each["command"] = ["rl", "--set", f"demonstrations=[{folders[-1]}/1.npz,{tmp_path}/2.npz]", "a/b"]
        (folders[-1] / "results.json").write_text(json.dumps(each))
    found = learned.main([*map(str, folders), "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["ways"]["side by side"]["after"]["success"] == 0.7
    assert found["runs"][0]["command"] == ["rl", "--set", "demonstrations=[1.npz,2.npz]", "a/b"]
    assert "one behind the other" in (tmp_path / "found.svg").read_text()


def test_a_recipes_policy_is_cloned_from_its_demonstrations(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "own.npz"
    save(file, [(rng.normal(size=(20, 11)).astype(np.float32), np.zeros((20, 4), np.float32))] * 3)
    given = f"policy.config={{demonstrations: [{file}], episodes: 2, steps: 3}}"
    parts = [states.make(load("rl_libero_states", [given])) for _ in range(2)]
    weights = [each.policy.policy.state_dict() for each in parts]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert parts[0].policy.shape == (4, 4) and parts[0].policy.value_width == 11
    parts[0].save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 1000
    for wrong, words in (
        ("policy.config={demonstrations: [none.npz]}", "expected files, but is"),
        ("policy.config={demonstration: [x]}", "there is demonstration"),
    ):
        with pytest.raises(ValueError, match=words):
            states.make(load("rl_libero_states", [wrong]))
