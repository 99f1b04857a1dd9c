"""The real lerobot-train under layouts, on gloo ranks, against one process with the same samples and noise.

As a script it serves the runs: see testing_layouts.
"""

import pytest
import torch

from somaspeed_patch.testing_layouts import STEPS, Found, LayoutRun, run_all, serve_runs

FAMILIES = ("pi05", "molmoact2", "groot")
LAYOUTS = {
    "ddp 2": (2, None),
    "fsdp 1": (1, "dp_shard=1"),
    "fsdp 2": (2, "dp_shard=2"),
    "fsdp 4": (4, "dp_shard=4,frozen=sharded"),
    "hsdp 2x2": (4, "dp_replicate=2,dp_shard=2,reshard=always"),
}
RUNS = {
    **{f"{policy} alone": LayoutRun(policy=policy, patched=False) for policy in FAMILIES},
    **{
        f"{policy} {name}": LayoutRun(policy=policy, ranks=ranks, layout=layout)
        for policy in FAMILIES
        for name, (ranks, layout) in LAYOUTS.items()
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run_all(__file__, tmp_path_factory.mktemp("layouts"))


def assert_same(run: Found, alone: Found) -> None:
    assert not run.error
    assert len(run.losses) == len(alone.losses) == STEPS
    assert torch.allclose(run.losses, alone.losses, rtol=1e-5)
    assert torch.allclose(run.norms, alone.norms.expand_as(run.norms), rtol=1e-5)
    weights, expected = run.weights, alone.weights
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype
        assert (weights[name] - value).abs().max() <= 1e-5, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", FAMILIES)
def test_ten_updates_are_those_of_one_process(runs: dict[str, Found], policy: str, layout: str) -> None:
    assert_same(runs[f"{policy} {layout}"], runs[f"{policy} alone"])


if __name__ == "__main__":
    serve_runs(RUNS)
