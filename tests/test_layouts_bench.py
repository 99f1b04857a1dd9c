"""The bench of layouts, on one rank and a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from somaspeed_patch.layouts import bench_ranks
from somaspeed_patch.testing_accelerate import forget

RECIPE = """
description: tiny
host: lerobot-train
steps: 1
arms:
  native: { targets: none }
synthetic:
  model: molmoact2
  size: micro
  dtype: bfloat16
  tokens: 20
  chunk: 5
  warmup: 1
  steps: 1
  repeats: 1
  arms:
    native: { batches: [2] }
    patched: { patched: true, batches: [2] }
"""
WORDS = ["--batch", "2", "--eager", "--repeats", "2", "--updates", "1"]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bench_ranks, "TARGETS", ())  # Triton's interpreter takes seconds an update for AdamW
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    yield
    forget()


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(RECIPE)
    return str(file)


def test_both_arms_run_the_same_patches_and_the_file_says_so(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    bench_ranks.main([recipe, *WORDS, "--profile", "--out", str(out)])
    found = json.loads(out.read_text())
    served = {
        arm: {
            site["site"]: (site["calls"], site["native_calls"], site["fallbacks"])
            for site in sites
            if "layouts" not in site["site"]
        }
        for arm, sites in found["sites"].items()
    }
    assert served["with"] == served["without"] and served["with"]["molmoact2/frozen_prefix"] == (2, 0, 0)
    speeds = {name: speed["repeats"] for name, speed in found["samples_per_second"].items()}
    assert found["ratio"]["ratio_by_repeat"] == pytest.approx(
        [ours / alone for ours, alone in zip(speeds["with"], speeds["without"], strict=True)]
    )
    assert found["what"].startswith("molmoact2, one shard, so none is made: ")
    assert set(found["profiles"]) == {"with", "without"}


@pytest.mark.parametrize(
    ("layout", "why"), [("dp_shard=2", "= 2 ranks, but 1 was started"), ("tp=2", "tp=2 = 2 ranks")]
)
def test_a_layout_that_does_not_fit_is_refused(recipe: str, layout: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bench_ranks.main([recipe, *WORDS, "--layout", layout])
