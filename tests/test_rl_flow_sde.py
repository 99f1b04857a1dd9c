"""Steps of Flow-SDE: numbers worked out by hand, LeRobot's own integrator, the replay of what was sampled."""

import math
from dataclasses import replace

import pytest
import torch

from somaspeed_patch.rl import flow_sde, scores
from somaspeed_patch.rl.flow_sde import Flow


def one_step(steps, a, k, x=0.2, v=0.4, dtype=torch.float64, kind="sde"):
    shape = (1, 1, 1)
    x, v = torch.full(shape, x, dtype=dtype), torch.full(shape, v, dtype=dtype).requires_grad_(True)
    mean, std = flow_sde.step(x, v, torch.tensor([k]), torch.tensor([a], dtype=dtype), steps=steps, kind=kind)
    return mean, std, v


GOLDEN = [  # K, a, k, mean, std, next, logp; x .2, v .4, z 1.7
    (3, 0.5, 0, 0.041666667, 0.5, 0.891666667, -1.670791353),
    (3, 0.5, 1, 0.025, 0.408248290, 0.719022094, -1.468058799),
    (3, 0.5, 2, 0.0375, 0.204124145, 0.384511047, -0.774911618),
    (5, 0.3, 4, 0.11415, 0.067082039, 0.228189467, 0.337900408),
    (1, 0.5, 0, -0.225, 0.5, 0.625, -1.670791353),
]


@pytest.mark.parametrize(("steps", "a", "k", "mean", "std", "after", "logp"), GOLDEN)
def test_golden_steps(steps, a, k, mean, std, after, logp):
    found, deviation, _ = one_step(steps, a, k)
    x_next = found + deviation * 1.7
    score = flow_sde.log_prob(x_next, found, deviation)
    values = [each.item() for each in (found, deviation, x_next, score)]
    assert values == pytest.approx([mean, std, after, logp], abs=1e-9)


STD = {
    (3, 0.5): [0.5, 0.4082, 0.2041],
    (4, 0.5): [0.5, 0.4330, 0.25, 0.1443],
    (5, 0.5): [0.5, 0.4472, 0.2739, 0.1826, 0.1118],
    (5, 0.3): [0.3, 0.2683, 0.1643, 0.1095, 0.0671],
}


@pytest.mark.parametrize(("steps", "a"), STD)
def test_golden_deviations(steps, a):
    found = [one_step(steps, a, k)[1].item() for k in range(steps)]
    assert found == pytest.approx(STD[steps, a], abs=5e-5)
    assert found[-1] == pytest.approx(a * math.sqrt(1 / (steps * (steps - 1))))


SENSITIVITY = {
    (3, 0.5): [0.667, 0.919, 1.837],
    (4, 0.5): [0.5, 0.65, 1.125, 1.949],
    (5, 0.3): [0.667, 0.779, 1.272, 1.908, 3.116],
}


@pytest.mark.parametrize(("steps", "a"), SENSITIVITY)
def test_what_an_error_of_the_velocity_does_to_the_mean(steps, a):
    for k, golden in enumerate(SENSITIVITY[steps, a]):
        mean, std, v = one_step(steps, a, k)
        (slope,) = torch.autograd.grad(mean.sum(), v)
        expected = -1 / steps if k == 0 else -(1 + a * a / 2) / steps
        assert slope.item() == pytest.approx(expected)
        assert abs(slope.item()) / std.item() == pytest.approx(golden, abs=2e-3)


def test_log_ratio_of_a_changed_velocity():
    mean, std, v = one_step(3, 0.5, 1)
    x_next = (mean + 1.7 * std).detach()
    old = flow_sde.log_prob(x_next, mean, std)
    (slope,) = torch.autograd.grad(old.sum(), v)
    new = flow_sde.log_prob(x_next, one_step(3, 0.5, 1, v=0.5)[0], std)
    assert (new - old).item() == pytest.approx(-0.160373721, abs=1e-9)
    assert slope.item() == pytest.approx(-1.561549711, abs=1e-9)
    moved = (one_step(3, 0.5, 1, v=0.5)[0] - mean) / std
    assert (moved.square() / 2).item() == pytest.approx(0.00421875, abs=1e-9)  # KL


def linear(x, s):
    """A velocity that depends on both, with numbers that round."""
    return 0.7 * x - s.view(-1, 1, 1) * 0.3 + 0.01


@pytest.mark.parametrize("steps", [1, 3, 5, 10])
def test_without_noise_it_is_lerobots_integrator_bit_for_bit(steps):
    flow_matching = pytest.importorskip("lerobot.policies.common.flow_matching", reason="needs lerobot")
    draws = flow_sde.draw(4, (5, 7), Flow(steps=steps, noise_level=0.5), torch.Generator().manual_seed(0))
    expected = flow_matching.euler_integrate(linear, draws.noise, steps)
    for level, k in ((0.0, torch.arange(4) % steps), (0.5, torch.full((4,), -1))):
        found = flow_sde.sample(linear, replace(draws, k=k), Flow(steps=steps, noise_level=level))
        assert torch.equal(found.action, expected)
        assert torch.equal(found.log_prob, torch.zeros_like(expected))


def test_without_noise_there_is_no_policy_gradient():
    mean, std, v = one_step(3, 0.0, 1)
    score = flow_sde.log_prob(mean.detach(), mean, std)
    (slope,) = torch.autograd.grad(score.sum(), v)
    assert std.item() == score.item() == slope.item() == 0


@pytest.mark.parametrize("kind", ["sde", "cps"])
@pytest.mark.parametrize("flip", ["as it is", "action time"])
def test_variance_of_point_mass_data(kind, flip):
    """Data is the point 1.4, the velocity exact; in action time the network gives -v."""
    steps, a, mu, count = 3, 0.5, 1.4, 400_000
    rng = torch.Generator().manual_seed(1)
    golden = {"sde": [0.5434, 0.2101, 0.0456], "cps": [(2 / 3) ** 2, (1 / 3) ** 2, 0.0]}[kind]
    for k in range(steps):
        s = 1 - k / steps
        noise = torch.randn(count, 1, 1, generator=rng, dtype=torch.float64)
        x = (1 - s) * mu + s * noise
        u = (mu - x) / s  # action - noise
        v = -u if flip == "action time" else (x - mu) / s
        level = torch.full((count,), a, dtype=torch.float64)
        mean, std = flow_sde.step(x, v, torch.full((count,), k), level, steps=steps, kind=kind)
        z = torch.randn(count, 1, 1, generator=rng, dtype=torch.float64)
        variance = (mean + std * z).var().item()
        assert variance == pytest.approx(golden[k], abs=1e-4 + 3 * golden[k] * math.sqrt(2 / count))


def test_the_bias_of_all_noisy_steps_falls_as_one_over_steps():
    found = [final_deviation(steps) for steps in (3, 5, 10, 50)]
    assert found == pytest.approx([0.222, 0.119, 0.056, 0.011], abs=2e-3)


def final_deviation(steps, a=0.5, mu=0.0, count=200_000):
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(count, 1, 1, generator=rng, dtype=torch.float64)
    for k in range(steps):
        v = (x - mu) / (1 - k / steps)
        level = torch.full((count,), a, dtype=torch.float64)
        mean, std = flow_sde.step(x, v, torch.full((count,), k), level, steps=steps)
        x = mean + std * torch.randn(count, 1, 1, generator=rng, dtype=torch.float64)
    return x.std().item()


def sampled(flow, count=6, **options):
    rng = torch.Generator().manual_seed(3)
    return flow_sde.sample(linear, flow_sde.draw(count, (5, 7), flow, rng, **options), flow)


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_replay_at_unchanged_weights_has_the_same_bits(kind):
    flow = Flow(steps=4, noise_level=0.5, kind=kind)
    found = sampled(flow)
    again = flow_sde.replay(linear, found.x, found.x_next, found.k, found.noise_level, flow)
    assert torch.equal(again, found.log_prob)
    ratio = (scores.reduced(again, (3, 7)) - scores.reduced(found.log_prob, (3, 7))).exp()
    assert torch.equal(ratio, torch.ones(6))
    last = kind == "cps"
    assert all((found.log_prob[i] != 0).all() for i in range(6) if not (last and found.k[i] == 3))


def test_each_sample_has_its_own_noisy_step():
    flow = Flow(steps=4, noise_level=0.5)
    found, at = sampled(flow), flow_sde.times(4)
    assert len(found.k.unique()) > 1
    for i, k in enumerate(found.k.tolist()):
        x = found.x[i : i + 1]
        mean, std = flow_sde.step(
            x, linear(x, at[k : k + 1]), torch.tensor([k]), torch.tensor([0.5]), steps=4
        )
        z = (found.x_next[i : i + 1] - mean) / std
        assert 0.5 < z.std() < 1.6 and z.abs().max() < 4
        after = found.x_next[i : i + 1]
        for later in range(k + 1, 4):
            after = after - 0.25 * linear(after, at[later : later + 1])
        assert torch.allclose(after, found.action[i : i + 1], atol=1e-6)


def test_steps_are_drawn_alike_or_each_its_own():
    flow, rng = Flow(steps=5, noise_level=0.5), torch.Generator().manual_seed(0)
    own = flow_sde.draw(5000, (1, 1), flow, rng)
    assert own.k.bincount(minlength=5).min() > 850
    assert len(flow_sde.draw(50, (1, 1), flow, rng, shared=True).k.unique()) == 1
    assert flow_sde.draw(500, (1, 1), flow, rng, ignore_last=True).k.max() == 3
    assert abs(own.noise.mean()) < 0.06 and abs(own.noise.std() - 1) < 0.05
    assert abs((own.noise * own.step_noise).mean()) < 0.06


def test_draws_of_single_samples_make_a_batch():
    flow = Flow(steps=5, noise_level=0.5)
    single = [flow_sde.draw(1, (2, 3), flow, torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    together = flow_sde.side_by_side(single)
    assert together.noise.shape == (2, 2, 3) and torch.equal(together.noise[1:], single[1].noise)
    assert torch.equal(together.k, torch.cat([single[0].k, single[1].k]))


def test_padding_stays_zero():
    flow = Flow(steps=3, noise_level=0.5)
    keep = torch.tensor([1.0, 1.0, 0.0])[None, None].expand(4, 1, 3)
    draws = flow_sde.draw(4, (2, 3), flow, torch.Generator().manual_seed(0))
    found = flow_sde.sample(lambda x, s: 0.7 * x, draws, flow, keep)
    assert not found.action[..., 2].any() and found.action[..., :2].all()


def test_a_samples_own_noise_level_is_replayed():
    found = sampled(Flow(steps=4, noise_level=0.5))
    later = Flow(steps=4, noise_level=0.1)
    again = flow_sde.replay(linear, found.x, found.x_next, found.k, found.noise_level, later)
    assert torch.equal(again, found.log_prob)


def test_the_executed_part_is_cut_before_it_is_summed():
    score = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
    assert torch.equal(scores.reduced(score, (2, 3)), score[:, :2, :3].sum((1, 2)))
    assert torch.equal(scores.reduced(score, (2, 3), "action"), score[:, :2, :3].sum(2))
    assert torch.equal(scores.reduced(score, (2, 3), "token"), score[:, :2, :3])
    assert torch.equal(scores.reduced(score, (2, 3), scope="all"), score.sum((1, 2)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Flow(steps=0, noise_level=0.5), "steps must be at least 1"),
        (lambda: Flow(steps=3, noise_level=-1.0), "noise_level must be 0 or more"),
        (lambda: Flow(steps=3, noise_level=float("nan")), "noise_level must be 0 or more"),
        (lambda: Flow(steps=3, noise_level=0.5, kind="ode"), "kind must be sde or cps"),
        (lambda: one_step(3, 0.5, 1, dtype=torch.bfloat16), "must be float32 or float64"),
        (
            lambda: flow_sde.draw(
                2, (1, 1), Flow(steps=1, noise_level=0.5), torch.Generator(), ignore_last=True
            ),
            "leaves no step",
        ),
        (lambda: scores.reduced(torch.zeros(1, 2, 3), (3, 3)), "must lie within"),
        (lambda: scores.reduced(torch.zeros(1, 2, 3), (1, 1), "word"), "level must be"),
        (lambda: scores.reduced(torch.zeros(1, 2, 3), (1, 1), scope="some"), "scope must be"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
