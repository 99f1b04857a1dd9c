"""LeRobot's processors between LIBERO and a policy: what they are given, and what they may not do."""

import numpy as np
import pytest
import torch

pytest.importorskip("lerobot", reason="needs lerobot")

from lerobot.policies.groot.processor_groot import GrootN17PackInputsStep
from lerobot.processor import PolicyProcessorPipeline

from somaspeed_patch.rl.lerobot_interface import LeRobotInterface


class Recorded:
    """A preprocessor that keeps what it was given."""

    steps = ()

    def __call__(self, batch):
        self.batch, self.graded = batch, torch.is_grad_enabled()
        return batch


def observations(count=2):
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.integers(0, 256, (6, 4, 3), np.uint8),
            "image2": np.full((6, 4, 3), 255, np.uint8),
            "state": np.arange(8, dtype=np.float32) + index,
            "instruction": np.array(f"task {index}"),
        }
        for index in range(count)
    ]


def test_a_policy_sees_what_lerobots_evaluation_would_show_it():
    seen, recorded = observations(), Recorded()
    batch = LeRobotInterface(recorded, lambda x: x, {"observation.images.image2": "wrist"}).batch(seen)
    assert batch["task"] == ["task 0", "task 1"] and not recorded.graded
    assert batch["observation.images.image"].shape == (2, 3, 6, 4)
    expected = torch.from_numpy(seen[1]["image"]).permute(2, 0, 1) / 255
    assert torch.equal(batch["observation.images.image"][1], expected)
    assert (batch["wrist"] == 1).all() and "observation.images.image2" not in batch
    assert batch["observation.state"][1].tolist() == list(range(1, 9))


def test_actions_are_the_environments_or_refused():
    halved = LeRobotInterface(Recorded(), lambda actions: actions / 2)
    chunk = torch.tensor([[[0.5, -8.0, 8.0, 0, 0, 0, 2.0]]])
    assert halved.actions(chunk).tolist() == [[[0.25, -1, 1, 0, 0, 0, 1]]]
    with pytest.raises(ValueError, match=r"must give \[1, 1, 7\], but gave \[1, 1, 6\]"):
        LeRobotInterface(Recorded(), lambda actions: actions[..., :6]).actions(chunk)


def test_a_preprocessor_that_augments_at_random_is_refused():
    step = GrootN17PackInputsStep()
    pipeline = PolicyProcessorPipeline(steps=[step])
    LeRobotInterface(pipeline, lambda actions: actions)
    step.training = True
    with pytest.raises(ValueError, match="GrootN17PackInputsStep of the preprocessor is in training mode"):
        LeRobotInterface(pipeline, lambda actions: actions)
