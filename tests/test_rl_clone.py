"""Cloning demonstrations: what is cut out of them, and that the cloned policy does what they did."""

import numpy as np
import pytest
import torch

from somaspeed_patch.rl import flow_sde
from somaspeed_patch.rl.clone import clone, windows
from somaspeed_patch.rl.flow_sde import Draws, Flow


def demonstrations(count=8, steps=12):
    """The action is a function of the observation, and the next one of the one before."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        seen = rng.normal(size=(steps, 3)).astype(np.float32)
        done = np.tile(np.tanh(seen[:, :1]), (1, 7)).astype(np.float32)
        made.append((seen, done))
    return made


def test_windows_begin_at_every_observation_and_repeat_the_last_action():
    seen, done = demonstrations(count=2, steps=4)[0]
    other = demonstrations(count=2, steps=4)[1]
    observed, chunks = windows([(seen, done), other], 3)
    assert observed.shape == (8, 3) and chunks.shape == (8, 3, 7)
    assert np.array_equal(observed[:4], seen) and np.array_equal(chunks[1], done[1:4])
    assert np.array_equal(chunks[3], done[[3, 3, 3]]) and np.array_equal(chunks[4:, 0], other[1])


@pytest.mark.usefixtures("steps_by_torch")
def test_a_cloned_policy_does_what_was_demonstrated():
    episodes = demonstrations(count=40)
    policy, loss = clone(episodes, horizon=1, steps=600, width=64, batch=128, seed=0)
    observed, chunks = windows(demonstrations(count=40)[:5], 1)
    draws = flow_sde.draw(len(observed), policy.shape, Flow(steps=4, noise_level=0.0), torch.Generator())
    still = Draws(noise=draws.noise, step_noise=draws.step_noise, k=torch.full_like(draws.k, -1))
    found = policy.sample(policy.encode({"observation": observed}), Flow(steps=4, noise_level=0.0), still)
    assert loss < 0.2
    assert (found.action - chunks).square().mean().sqrt() < 0.2 < chunks.std()
    again, same = clone(episodes, horizon=1, steps=600, width=64, batch=128, seed=0)
    assert same == loss and torch.equal(next(again.policy.parameters()), next(policy.policy.parameters()))
