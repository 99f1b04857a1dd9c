"""The benches of RL, run small on a CPU: every arm gives figures, and they are what they say."""

import json

import pytest

pytest.importorskip("lerobot", reason="needs lerobot")

from somaspeed_patch.rl_bench import iteration, learner
from somaspeed_patch.testing_rl_pictures import FACTORY as PICTURES

pytestmark = pytest.mark.usefixtures("steps_by_torch")


def test_the_learners_modes_are_compared_at_the_same_batch(tmp_path):
    words = "--size micro --batches 2 --microbatches 2 --updates 1 --repeats 2 --image-size 28"
    found = learner.main([*words.split(), "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())["cells"] == found["cells"]
    assert [cell["arm"] for cell in found["cells"]] == list(learner.ARMS)
    sizes = {cell["arm"]: cell["bytes_per_sample"] for cell in found["cells"]}
    assert sizes["recompute"] == 2 * 28 * 28 * 3 + 8 * 4  # two images and a state
    assert sizes["host"] == sizes["device"] > 0
    for ratio in found["ratios"]:
        speeds = [
            next(c for c in found["cells"] if c["arm"] == ratio[which])["samples_per_second"]["repeats"]
            for which in ("arm", "against")
        ]
        assert ratio["ratio_by_repeat"] == pytest.approx([a / b for a, b in zip(*speeds, strict=True)])


def test_iterations_of_all_arms_play_the_same_number_of_steps(tmp_path):
    words = (
        "--size micro --epochs 2 --slots 2 --horizon 6 --executed 2 --steps 2 --iterations 1 --image-size 28"
        f" --factory {PICTURES}"
    )
    found = iteration.main([*words.split(), "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())["cells"] == found["cells"]
    assert [cell["arm"] for cell in found["cells"]] == list(iteration.ARMS)
    for cell in found["cells"]:
        (one,) = cell["iterations"]
        assert (one["env_steps"], one["samples"], one["failures"]) == (12, 6, 0)
        assert one["lag"] == (cell["arm"] == "async_cached")
    assert len(found["env_steps_per_second"]) == 1 + len(iteration.ARMS)
    assert min(found["env_steps_per_second"]) > 0
