"""The real lerobot-train under layouts on two GPUs (NCCL), against one GPU with the same samples and noise.

As a script it serves the runs: see testing_layouts.
"""

import pytest
import torch

from somaspeed_patch.testing_layouts import Found, LayoutRun, difference, run_all, serve_runs

pytestmark = pytest.mark.gpu
FAMILIES = ("pi05 deep", "molmoact2", "groot")
LAYOUTS = {"fsdp 2": "dp_shard=2", "tp 2": "tp=2", "pp 2": "pp=2"}
MORE = {
    "pi05 deep replicas": LayoutRun(policy="pi05 deep", ranks=2, layout="dp_replicate=2"),
    "pi05 deep sharded": LayoutRun(policy="pi05 deep", ranks=2, layout="dp_shard=2,frozen=sharded"),
}
RUNS = {
    **{f"{policy} alone": LayoutRun(policy=policy, patched=False) for policy in FAMILIES},
    **{
        f"{policy} {name}": LayoutRun(policy=policy, ranks=2, layout=layout)
        for policy in FAMILIES
        for name, layout in LAYOUTS.items()
    },
    **MORE,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return run_all(__file__, tmp_path_factory.mktemp("layouts"), device="cuda")


@pytest.mark.parametrize("name", [name for name in RUNS if not name.endswith("alone")])
def test_ten_updates_are_those_of_one_gpu(runs: dict[str, Found], name: str) -> None:
    alone = next(f"{policy} alone" for policy in FAMILIES if name.startswith(policy))
    assert not difference(runs[name], runs[alone])


if __name__ == "__main__":
    serve_runs(RUNS)
