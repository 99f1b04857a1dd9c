"""The script of recipes/groot_hf_trainer_tiny.yaml, with the recipe's arguments: native against patched."""

import json
import sys

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import testing_accelerate
from somaspeed_patch.ab import recipe
from somaspeed_patch.tiny_groot import redirect


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train in this process; the recorded updates and the report."""
    from somaspeed_patch.tiny_groot import hf_trainer

    ran = recipe.load("groot_hf_trainer_tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(name, *targets, workers, **settings):
        testing_accelerate.forget()
        words = recipe.fill(ran.arguments, out=tmp_path / name, steps=4)
        smaller = ["--batch_size=4", f"--num_workers={workers}"]
        monkeypatch.setattr(sys, "argv", ["hf_trainer", *words, *smaller])
        file = tmp_path / f"{name}.jsonl"
        with (
            redirect.installed("micro"),
            somaspeed_patch.patched(*targets, "step_recorder", record_steps=str(file), **settings),
        ):
            hf_trainer.main()
            report = somaspeed_patch.report()
        return [json.loads(line) for line in file.read_text().splitlines()], report

    return run


def test_patched_trains_as_native(run):
    native, _ = run("native", workers=0)
    state = torch.get_rng_state()
    targets = ("groot", "hf_trainer", "accelerate_clip")
    off = {"optimizer": False}  # Triton's interpreter takes 3 s an update; test_optim_trainer has it
    patched, report = run("patched", *targets, workers=1, **off)
    assert [line["samples"] for line in native] == [4] * 4 == [line["samples"] for line in patched]
    for name in ("loss", "grad_norm", "lr"):
        theirs, ours = ([line[name] for line in lines] for lines in (native, patched))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert len({line["loss"] for line in native}) == 4
    assert torch.equal(torch.get_rng_state(), state)
    sites = {site.site: site for site in report.sites}
    for name, calls in (("frozen_prefix", 4), ("modality_kv", 4), ("category_linear", 28)):
        assert (sites[f"groot/{name}"].calls, sites[f"groot/{name}"].native_calls) == (calls, 0)
    assert (sites["hf_trainer/optimizer_class"].calls, sites["hf_trainer/optimizer_class"].native_calls) == (
        0,
        1,
    )


def test_without_a_policy_it_says_what_is_missing(monkeypatch):
    from types import SimpleNamespace

    from somaspeed_patch.tiny_groot import hf_trainer

    with pytest.raises(ValueError, match="--policy.type=groot"):
        hf_trainer._arguments(SimpleNamespace(policy=None))
