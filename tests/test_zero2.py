"""GR00T on transformers.Trainer under DeepSpeed's ZeRO-2: native against patched, on one rank and on two.

Checked: losses, norms before clipping, learning rates and weights of 20 updates; a checkpoint of either that
the other resumes, against the run that went through; that the report says whose optimizer and clipping are.
The optimizer is that of DeepSpeed's config on one rank, the Trainer's on two; testing_zero2 has the runs.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs deepspeed (DS_BUILD_OPS=0 pip install deepspeed)"
)
STEPS, SAVED, MAX_NORM = 20, 10, 1.0  # testing_zero2's; importing it takes 9 s
MICRO_BATCHES = {1: 1, 2: 2}  # of an update, by number of ranks
LIMIT = 300  # seconds
Rank = dict[str, dict[str, Any]]
worlds = pytest.mark.parametrize("world", MICRO_BATCHES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Rank]]:
    """What each rank's runs found, by their names; by number of ranks."""
    folder = tmp_path_factory.mktemp("zero2")
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    gloo = {"GLOO_SOCKET_IFNAME": "lo"}  # else it looks the machine's name up, which a sandbox may not know
    done = subprocess.run(
        [sys.executable, "-m", "somaspeed_patch.testing_zero2", str(folder)],
        env={**os.environ, **environment, **gloo},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {n: [torch.load(folder / f"{n}.rank{rank}.pt") for rank in range(n)] for n in MICRO_BATCHES}


def assert_same(ours: dict[str, Any], native: dict[str, Any]) -> None:
    """`ours` may have begun later."""
    assert len(ours["norms"]) == len(native["norms"]) == STEPS
    losses = native["losses"][-len(ours["losses"]) :]
    torch.testing.assert_close(ours["losses"], losses, rtol=1e-5, atol=0)
    assert ours["norms"] == pytest.approx(native["norms"], rel=1e-5)
    assert ours["rates"] == native["rates"]
    assert ours["weights"].keys() == native["weights"].keys()
    for name, weight in native["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=1e-5, msg=name)


@worlds
def test_it_is_zero2_and_every_rank_has_samples_of_its_own(ranks: dict[int, list[Rank]], world: int) -> None:
    first, *others = ranks[world]
    for found in (run for rank in ranks[world] for run in rank.values()):
        assert found["engine"] == ("DeepSpeedEngine", "DeepSpeedZeroOptimizer", 2)
    native = first["native"]
    assert len(native["losses"]) == STEPS * MICRO_BATCHES[world]
    assert max(native["norms"]) > 2 * MAX_NORM
    for other in (rank["native"] for rank in others):
        assert not torch.isclose(other["losses"], native["losses"], rtol=1e-3).any()
        assert other["norms"] == native["norms"]
        assert all(torch.equal(other["weights"][name], native["weights"][name]) for name in native["weights"])


@worlds
def test_twenty_updates_are_the_same(ranks: dict[int, list[Rank]], world: int) -> None:
    for rank in ranks[world]:
        assert_same(rank["ours"], rank["native"])


@worlds
@pytest.mark.parametrize("resumed", ["native from ours", "ours from native"])
def test_a_checkpoint_goes_on_at_the_other(ranks: dict[int, list[Rank]], world: int, resumed: str) -> None:
    for rank in ranks[world]:
        assert len(rank[resumed]["losses"]) == (STEPS - SAVED) * MICRO_BATCHES[world]
        assert_same(rank[resumed], rank["native"])


@worlds
@pytest.mark.parametrize(("run", "updates"), [("ours", STEPS), ("ours from native", STEPS - SAVED)])
def test_the_report_says_whose_the_optimizer_and_the_clipping_are(
    ranks: dict[int, list[Rank]], world: int, run: str, updates: int
) -> None:
    for sites in (rank[run]["sites"] for rank in ranks[world]):
        assert sites["hf_trainer/optimizer_class"] == (0, 1, 0, "DeepSpeed owns the optimizer")
        assert sites["accelerate_clip/clip"] == (0, updates, 0, "clipping belongs to DEEPSPEED")
        assert sites["accelerate_clip/optimizer"][:3] == (0, 0, 0)
        batches = updates * MICRO_BATCHES[world]
        for name in ("groot/frozen_prefix", "groot/modality_kv"):
            assert sites[name] == (batches, 0, 0, "")
        assert sites["groot/category_linear"] == (7 * batches, 0, 0, "")


@worlds
def test_a_native_run_has_nothing_of_ours(ranks: dict[int, list[Rank]], world: int) -> None:
    for rank in ranks[world]:
        for run in ("native", "native from ours"):
            assert not any(calls for calls, *_ in rank[run]["sites"].values())
