"""States of LIBERO for a policy, and the expert's demonstrations of them in the real simulator."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("libero") is None, reason="needs the extra rl: hf-libero")


def test_states_and_actions_are_the_environments():
    from somaspeed_patch.rl.libero_states import LiberoStates

    seen = [{"state": np.full(8, i, np.float32), "objects": np.full(14, -i, np.float32)} for i in range(3)]
    found = LiberoStates().batch(seen)["observation"]
    assert found.shape == (3, 11) and found.dtype == torch.float32
    assert found[2].tolist() == [2.0] * 5 + [-4.0] * 6
    chunks = torch.tensor([[[0.5, 2.0, -3.0, -0.25]]])
    assert LiberoStates().actions(chunks).tolist() == [[[0.5, 1.0, -1.0, 0.0, 0.0, 0.0, -0.25]]]


def test_demonstrations_are_kept_as_they_were(tmp_path):
    from somaspeed_patch.rl.libero_states import load, save

    rng = np.random.default_rng(0)
    made = [
        (rng.normal(size=(n, 22)).astype(np.float32), rng.normal(size=(n, 7)).astype(np.float32))
        for n in (3, 5)
    ]
    save(tmp_path / "made.npz", made)
    found = load(tmp_path / "made.npz")
    assert len(found) == 2
    for one, other in zip(found, made, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_demonstrations_solve_the_task_though_they_are_disturbed():
    from somaspeed_patch.rl.env_libero import LiberoWorld
    from somaspeed_patch.rl.env_process import EnvSpec, Episodes
    from somaspeed_patch.rl.libero_states import demonstrations, flat

    world = LiberoWorld(EnvSpec(horizon=240))
    [(seen, done)] = demonstrations(world, [3])
    assert 60 < len(done) < 240 and seen.shape == (len(done), 11) and done.shape == (len(done), 4)
    assert np.array_equal(flat(Episodes(world, 240).reset(3, 0)), seen[0])
    assert np.abs(seen[-1, 5:7] - seen[-1, 8:10]).max() < 0.05  # the bowl is above the plate
    asked, moved = done[:-1, :3] * 0.05, np.diff(seen[:, :3], axis=0)
    assert np.abs(moved - asked).max() > 0.01  # not the way that was asked for
