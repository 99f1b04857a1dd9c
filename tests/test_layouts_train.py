"""The real lerobot-train under layouts, on gloo ranks, against one process with the same samples and noise.

As a script it serves the runs: see testing_layouts.
"""

import json
from dataclasses import replace

import pytest
import torch

from somaspeed_patch.testing_layouts import STEPS, Found, LayoutRun, difference, run_all, serve_runs

FAMILIES = ("pi05", "molmoact2", "groot")
LAYOUTS = {
    "fsdp 4": (4, "dp_shard=4,frozen=sharded"),
    "hsdp 2x2": (4, "dp_replicate=2,dp_shard=2,reshard=always"),
}
MORE = {  # pi0.5's, against one process too
    "fsdp 1": LayoutRun(policy="pi05", ranks=1, layout="dp_shard=1"),
    "fsdp 2": LayoutRun(policy="pi05", ranks=2, layout="dp_shard=2"),
    "native": LayoutRun(
        policy="pi05", patched=False, ranks=2, layout="dp_shard=2,frozen=sharded,checkpointing=selective"
    ),
    "gathered": LayoutRun(
        policy="pi05", ranks=2, layout="dp_shard=2,frozen=gathered,reshard=never,checkpointing=full"
    ),
    "replicas": LayoutRun(policy="pi05", ranks=2, layout="dp_replicate=2"),
}
GO_ON = STEPS + 3
RESUMED = {  # from whose checkpoint, and how it goes on
    "alone to alone": ("alone", LayoutRun(policy="pi05", patched=False)),
    "fsdp to alone": ("fsdp 2", LayoutRun(policy="pi05", patched=False)),
    "fsdp to hsdp": ("fsdp 2", LayoutRun(policy="pi05", ranks=4, layout=LAYOUTS["hsdp 2x2"][1])),
    "alone to fsdp": ("alone", LayoutRun(policy="pi05", ranks=2, layout="dp_shard=2")),
}
BF16 = ("--policy.dtype=bfloat16",)
RUNS = {
    **{f"{policy} alone": LayoutRun(policy=policy, patched=False) for policy in FAMILIES},
    **{f"pi05 {name}": run for name, run in MORE.items()},
    "pi05 bf16 ddp": LayoutRun(policy="pi05", patched=False, ranks=2, arguments=BF16),
    "pi05 bf16 fsdp": LayoutRun(policy="pi05", ranks=2, layout="dp_shard=2", arguments=BF16),
    "pi05 wrong mesh": LayoutRun(policy="pi05", ranks=2, layout="dp_shard=3"),
    **{
        f"{policy} {name}": LayoutRun(policy=policy, ranks=ranks, layout=layout)
        for policy in FAMILIES
        for name, (ranks, layout) in LAYOUTS.items()
        if policy == "pi05" or name != "fsdp 4"
    },
    **{
        f"pi05 {name}": replace(run, resumes=f"pi05 {source}", steps=GO_ON)
        for name, (source, run) in RESUMED.items()
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run_all(__file__, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("name", ["pi05 fsdp 4", *(f"{policy} hsdp 2x2" for policy in FAMILIES)])
def test_ten_updates_are_those_of_one_process(runs: dict[str, Found], name: str) -> None:
    assert not difference(runs[name], runs[f"{name.split()[0]} alone"])


@pytest.mark.parametrize("name", MORE)
def test_other_ways_to_split_are_exact_too(runs: dict[str, Found], name: str) -> None:
    assert not difference(runs[f"pi05 {name}"], runs["pi05 alone"])


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_from_a_checkpoint_of_another_layout(runs: dict[str, Found], name: str) -> None:
    run = runs[f"pi05 {name}"]
    assert [update["step"] for update in run.updates()] == [STEPS + 1, STEPS + 2, STEPS + 3]
    assert not difference(run, runs["pi05 alone to alone"], updates=3)


@pytest.mark.parametrize("name", ["fsdp 2", "fsdp 4", "hsdp 2x2", "gathered"])
def test_the_optimizers_file_is_the_hosts(runs: dict[str, Found], name: str) -> None:
    ours, expected = runs[f"pi05 {name}"].state, runs["pi05 alone"].state
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert ours[key].dtype == value.dtype
        assert torch.allclose(ours[key], value, rtol=1e-4, atol=1e-7), key
    groups = [runs[f"pi05 {one}"].checkpoint / "training_state" for one in (name, "alone")]
    ours_json, theirs = (json.loads((g / "optimizer_param_groups.json").read_text()) for g in groups)
    assert ours_json == theirs


def test_bf16_weights_beside_fp32_ones_stay_what_they_are(runs: dict[str, Found]) -> None:
    ours, ddp = runs["pi05 bf16 fsdp"], runs["pi05 bf16 ddp"]
    assert not ours.error
    eps = torch.finfo(torch.bfloat16).eps
    assert torch.allclose(ours.losses, ddp.losses, rtol=2 * eps)
    weights, expected = ours.weights, ddp.weights
    assert {name: w.dtype for name, w in weights.items()} == {name: w.dtype for name, w in expected.items()}
    assert "bfloat16 and float32" in ours.site("layouts/shard")["reason"]


def test_the_report_says_what_was_split_and_what_never_trains(runs: dict[str, Found]) -> None:
    run = runs["pi05 fsdp 2"]
    assert run.site("layouts/shard")["reason"].startswith("pi05, 1 x 2 ranks, 3 units: 0.0 M trainable")
    unused = "1 of 22 trainable parameters get no gradient: model.paligemma_with_expert.gemma_expert.lm_head"
    assert unused in run.site("layouts/unused")["reason"]
    for name in (*(f"{policy} hsdp 2x2" for policy in FAMILIES), "pi05 fsdp 4", "pi05 gathered"):
        served = runs[name].site(f"{name.split()[0]}/frozen_prefix")
        assert (served["calls"], served["native_calls"], served["fallbacks"]) == (STEPS, 0, 0), name
    replicas = runs["pi05 replicas"].site("layouts/shard")
    assert "the host's own DistributedDataParallel" in replicas["reason"]


def test_a_mesh_that_does_not_fit_is_refused_before_a_weight_is_loaded(runs: dict[str, Found]) -> None:
    run = runs["pi05 wrong mesh"]
    assert "layout: pp=1 x dp_replicate=1 x dp_shard=3 x tp=1 = 3 ranks, but 2 were started" in run.error
    assert "launch.py" in run.error
    assert "make_policy" not in run.error
    assert not run.folder.exists()


if __name__ == "__main__":
    serve_runs(RUNS)
