"""Rewards, advantages and losses: numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from somaspeed_patch.rl import advantages as adv
from somaspeed_patch.rl import ppo
from somaspeed_patch.rl.ppo import Clips
from somaspeed_patch.rl.value_head import ValueHead, masked_mean

VALUES = tensor([0.5, 0.6, 0.7, 0.9], dtype=torch.float64)[:, None]


def gae(rewards, dones, gamma=0.99, lam=0.95):
    rewards = tensor(rewards, dtype=torch.float64)[:, None]
    found, returns = adv.gae(rewards, VALUES, tensor(dones, dtype=torch.bool)[:, None], gamma, lam)
    return found[:, 0].tolist(), returns[:, 0].tolist()


@pytest.mark.parametrize(
    ("rewards", "dones", "options", "golden"),
    [
        ([0, 0, 1], [0, 0, 1], {}, [0.446829, 0.375150, 0.3]),
        ([0, 0, 0], [0, 0, 0], {}, [0.350414, 0.272635, 0.191]),
        ([1, 0, 0], [1, 0, 0], {}, [0.5, 0.272635, 0.191]),
        ([0, 0, 0.99 * 0.8], [0, 0, 1], {}, [0.262844, 0.179526, 0.092]),
        ([0, 0, 0], [0, 0, 1], {}, [-0.437712, -0.56535, -0.7]),
        ([0, 0, 1], [0, 0, 1], {"lam": 1.0}, [0.4801, 0.39, 0.3]),
        ([0, 0, 1], [0, 0, 1], {"lam": 0.0}, [0.094, 0.093, 0.3]),
    ],
)
def test_golden_advantages(rewards, dones, options, golden):
    found, returns = gae(rewards, dones, **options)
    assert found == pytest.approx(golden, abs=1e-6)
    assert returns == pytest.approx([a + v for a, v in zip(golden, [0.5, 0.6, 0.7], strict=True)], abs=1e-6)


def test_returns_of_a_solved_episode():
    assert gae([0, 0, 1], [0, 0, 1])[1] == pytest.approx([0.946829, 0.975150, 1], abs=1e-6)


def test_a_cut_episode_is_worth_what_comes_after_it():
    values = tensor([0.5, 0.6, 0.7, 0.8])[:, None]
    found, _ = adv.gae(torch.zeros(3, 1), values, torch.zeros(3, 1, dtype=torch.bool), 0.99, 0.95)
    assert found[:, 0].tolist() == pytest.approx([0.262844, 0.179526, 0.092], abs=1e-6)


def test_rewards_after_the_end_of_an_episode_do_not_count():
    rewards = tensor([[0.0, 1.0, -1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 2.0]])
    dones = tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    assert adv.chunk_rewards(rewards, dones).tolist() == [1.0, 3.0]


def test_normalising_over_the_mask():
    found = adv.normalised(tensor([1.0, 2.0, 3.0, 4.0]), tensor([True, True, True, False]))
    assert found.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-4)


@pytest.mark.parametrize(
    ("values", "mask"),
    [([5.0], [1]), ([5.0, 6.0], [0, 0]), ([5.0, 6.0], [1, 0]), ([2.0, 2.0], [1, 1]), ([], [])],
)
def test_normalising_what_has_no_spread_is_zero(values, mask):
    found = adv.normalised(tensor(values), tensor(mask, dtype=torch.bool))
    assert found.tolist() == [0.0] * len(values)


def test_a_short_trajectory_weighs_as_much_as_a_long_one():
    trajectory = tensor([7] + [3] * 48)
    weights = adv.trajectory_weights(trajectory)
    assert weights.mean().item() == pytest.approx(1)
    share = weights / weights.sum()
    assert share[0].item() == pytest.approx(0.5) and share[1:].sum().item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1, 1.3, -1.2, 0),
        (1, 0.7, -0.7, -0.7),
        (-1, 1.3, 1.3, 1.3),
        (-1, 0.7, 0.8, 0),
        (-1, 5, 3, 0),
        (1, 5, -1.2, 0),
    ],
)
def test_golden_policy_losses(advantage, ratio, loss, slope):
    logp = tensor([math.log(ratio)], dtype=torch.float64).requires_grad_(True)
    found = ppo.policy_loss(logp, torch.zeros_like(logp), tensor([advantage], dtype=torch.float64), Clips())
    found.loss.backward()
    assert [found.loss.item(), logp.grad.item()] == pytest.approx([loss, slope])


def test_without_the_dual_clip_a_bad_ratio_is_not_bounded():
    logp = tensor([math.log(5.0)], dtype=torch.float64)
    found = ppo.policy_loss(logp, torch.zeros_like(logp), -torch.ones_like(logp), Clips(dual=None))
    assert found.loss.item() == pytest.approx(5)


@pytest.mark.parametrize(
    ("value", "loss", "slope"), [(0.9, 0.045, 0), (0.1, 0.405, -0.9), (1.5, 0.125, 0.5), (0.5, 0.125, -0.5)]
)
def test_golden_value_losses(value, loss, slope):
    values = tensor([value], dtype=torch.float64).requires_grad_(True)
    old, returns = tensor([0.5], dtype=torch.float64), tensor([1.0], dtype=torch.float64)
    found = ppo.value_loss(values, old, returns, Clips())
    found.backward()
    assert [found.item(), values.grad.item()] == pytest.approx([loss, slope])


@pytest.mark.parametrize(
    ("lag", "ratio", "loss", "slope"),
    [(0, 1.44, -1.3, 0), (1, 1.2, -1.44, -1.44), (2, 1.12924, -1.44, -1.44), (3, 1.09545, -1.44, -1.44)],
)
def test_golden_decoupled_losses(lag, ratio, loss, slope):
    behaviour = torch.zeros(1, dtype=torch.float64)
    logp = tensor([math.log(1.44)], dtype=torch.float64).requires_grad_(True)
    proximal = ppo.interpolated(logp, behaviour, tensor([lag]))
    assert (logp - proximal).exp().item() == pytest.approx(ratio, abs=1e-5)
    one = torch.ones_like(behaviour)
    found = ppo.policy_loss(logp, proximal, one, Clips(high=0.3), logp_behaviour=behaviour)
    found.loss.backward()
    assert [found.loss.item(), logp.grad.item()] == pytest.approx([loss, slope])


def test_samples_far_from_the_policy_that_acted_are_left_out_of_the_mean():
    old = tensor([0.0, math.log(9.0), 800.0])
    logp = old.clone().requires_grad_(True)
    found = ppo.policy_loss(logp, old, torch.ones(3), Clips(behaviour=2.0), logp_behaviour=torch.zeros(3))
    found.loss.backward()
    assert found.loss.item() == -1 and found.kept.item() == pytest.approx(1 / 3)
    assert logp.grad.tolist() == [-1, 0, 0]


def test_what_is_logged_of_the_ratio():
    logp = tensor([0.0, math.log(1.5), math.log(0.5), math.log(1.1)])
    found = ppo.policy_loss(logp, torch.zeros(4), torch.ones(4), Clips())
    logs = [0.0, math.log(1.5), math.log(0.5), math.log(1.1)]
    assert found.clipfrac.item() == pytest.approx(0.5)
    assert found.old_approx_kl.item() == pytest.approx(-sum(logs) / 4)
    assert found.approx_kl.item() == pytest.approx((0.5 - 0.5 + 0.1 - sum(logs)) / 4, abs=1e-6)


def test_explained_variance_is_of_the_whole_rollout():
    returns = tensor([0.0, 1.0, 2.0, 3.0])
    assert ppo.explained_variance(returns, returns) == 1
    assert ppo.explained_variance(torch.zeros(4), returns) == 0
    assert ppo.explained_variance(tensor([0.5, 0.5, 2.5, 2.5]), returns) == pytest.approx(1 - 0.25 / 1.25)
    assert math.isnan(ppo.explained_variance(torch.zeros(4), torch.ones(4)))


def test_the_mean_over_valid_tokens():
    hidden = tensor([[[1.0, 2.0], [3.0, 4.0], [float("nan"), 9.0]], [[1.0, 1.0]] * 3])
    mask = tensor([[True, True, False], [False, False, False]])
    assert masked_mean(hidden, mask).tolist() == [[2.0, 3.0], [0.0, 0.0]]
    assert torch.equal(masked_mean(hidden[1:].bfloat16(), None), torch.ones(1, 2))


def test_the_value_head_is_fp32_under_autocast():
    torch.manual_seed(0)
    head, features = ValueHead(6, (5, 4)), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(features.bfloat16())
    layers = head.layers
    x = features.bfloat16().float()
    for layer in (layers[0], layers[2]):
        x = torch.relu(x @ layer.weight.T + layer.bias)
    expected = (x @ layers[4].weight.T + layers[4].bias)[:, 0]
    assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-6)
    assert layers[4].weight.std() < 0.05 and not layers[4].bias.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Clips(low=1.0), "0 <= low < 1"),
        (lambda: Clips(dual=1.0), "dual must be above 1"),
        (lambda: ppo.policy_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2), Clips()), "one shape"),
        (
            lambda: ppo.policy_loss(*[torch.zeros(2, dtype=torch.bfloat16)] * 3, Clips()),
            "float32 or float64",
        ),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
