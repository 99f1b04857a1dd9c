"""The learner over a small policy: what it trains on, how often, towards what; and that it learns."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from somaspeed_patch.rl import features, flow_sde, heads, ppo, samples, scores
from somaspeed_patch.rl.features import Record, Tag
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.minibatch import Targets
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.trajectory import Chunk, Trajectory
from somaspeed_patch.testing_rl import state_policy, trajectories, value_head

pytestmark = pytest.mark.usefixtures("steps_by_torch")
FLOW = Flow(steps=3, noise_level=0.5)
SETTINGS = Settings(
    flow=FLOW, executed=2, global_batch=16, micro_batch=16, actor_lr=1e-3, critic_lr=1e-3, weight_decay=0.0
)


def rollout(policy, critic, count=16, seed=5, **options):
    rng = torch.Generator().manual_seed(seed)
    batch = {"observation": torch.randn(count, 5, generator=rng)}
    options.setdefault("reward", lambda actions: float(actions.sum()))
    return trajectories(policy, critic, batch, FLOW, rng, **options)


def made(**settings):
    policy = state_policy()
    return Learner(policy, value_head(policy), replace(SETTINGS, **settings))


def weights(learner):
    return heads.snapshot(learner.policy, learner.value_head)


def test_a_step_is_that_of_the_losses_by_hand():
    learner = made(max_grad_norm=1e9)
    episodes = rollout(learner.policy, learner.value_head, length=2)
    policy, critic = copy.deepcopy(learner.policy.policy), copy.deepcopy(learner.value_head)
    metrics = learner.iterate(episodes)

    found = samples.collate(episodes, gamma=0.99, lam=0.95)
    gained = (found.advantages - found.advantages.mean()) / (found.advantages.std() + 1e-5)
    observed = torch.stack([record.fixed["pooled"] for record in found.records])
    s = 1 - found.k / 3
    v = policy(observed, found.x, s)
    sigma = torch.where(found.k == 0, 3.0, s / (1 - s)) * 0.25
    column = (-1, 1, 1)
    mean = found.x - v / 3 - (sigma / (6 * s)).view(column) * (found.x + (1 - s).view(column) * v)
    logp = torch.distributions.Normal(mean, (sigma / 3).sqrt().view(column)).log_prob(found.x_next)
    ratio = (logp[:, :2].sum((1, 2)) - found.log_prob[:, :2].sum((1, 2))).exp()
    actor = torch.maximum(-gained * ratio, -gained * ratio.clamp(0.8, 1.2)).mean()
    value = critic(observed)
    loss = actor + ppo.value_loss(value, found.values, found.returns, SETTINGS.clips)
    loss.backward()
    torch.optim.AdamW(
        [*policy.parameters(), *critic.parameters()], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    ).step()

    assert metrics["losses/policy_loss"] == pytest.approx(actor.item(), abs=1e-5)
    assert learner.version == 1 and learner.steps == 1
    for mine, expected in zip(learner.policy.policy.parameters(), policy.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=2e-6)
    for mine, expected in zip(learner.value_head.parameters(), critic.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=2e-6)


def test_advantages_of_trajectories_side_by_side_are_those_of_each():
    rng = torch.Generator().manual_seed(0)
    lengths, cut = [3, 1, 7, 4], [False, True, True, False]
    episodes = [_episode(count, after, rng) for count, after in zip(lengths, cut, strict=True)]
    found = samples.collate(episodes, gamma=0.9, lam=0.8)
    begin = 0
    for each, after in zip(episodes, cut, strict=True):
        rewards = torch.stack([chunk.rewards.sum() for chunk in each.chunks])
        values = torch.tensor([*(chunk.value for chunk in each.chunks), each.final_value])
        trace, expected = 0.0, []
        for index in reversed(range(len(each))):
            last = index == len(each) - 1
            ahead = values[index + 1] if after or not last else 0.0
            trace = rewards[index] + 0.9 * ahead - values[index] + (0.0 if last else 0.9 * 0.8 * trace)
            expected.insert(0, trace)
        mine = slice(begin, begin + len(each))
        assert torch.allclose(found.advantages[mine], torch.stack(expected), atol=1e-6)
        assert torch.allclose(found.returns[mine], torch.stack(expected) + values[:-1], atol=1e-6)
        begin += len(each)
    assert begin == len(found)


def _episode(count, cut, rng):
    nothing, record = torch.zeros(2, 3), Record(tokens={}, fixed={}, tag=Tag(model="test", backbone="0"))
    chunks = [
        Chunk(
            record=record, x=nothing, x_next=nothing, k=0, noise_level=0.5, log_prob=nothing,
            value=float(torch.rand((), generator=rng)),
            rewards=torch.rand(2, generator=rng), dones=torch.zeros(2, dtype=torch.bool),
        )
        for _ in range(count)
    ]  # fmt: skip
    final = float(torch.rand((), generator=rng)) if cut else 0.0
    return Trajectory(env=0, episode=0, version=0, chunks=chunks, terminated=not cut, final_value=final)


@pytest.mark.parametrize(("epochs", "batch"), [(1, 16), (3, 8), (2, 48)])
def test_each_chunk_is_trained_update_epoch_times(monkeypatch, epochs, batch):
    learner = made(update_epoch=epochs, global_batch=batch, micro_batch=8)
    trained = []
    rows = Targets.rows
    monkeypatch.setattr(Targets, "rows", lambda self, part: (trained.append(part), rows(self, part))[1])
    learner.iterate(rollout(learner.policy, learner.value_head, count=20))
    assert torch.cat(trained).bincount().tolist() == [epochs] * 20
    assert learner.steps == epochs * -(-20 // batch)
    first, second = torch.cat(trained)[:20], torch.cat(trained)[20:40]
    assert not len(second) or not torch.equal(first, second)


def test_at_rate_zero_all_ratios_are_one():
    learner = made(actor_lr=0.0, critic_lr=0.0, update_epoch=2)
    before = weights(learner)
    metrics = learner.iterate(rollout(learner.policy, learner.value_head))
    assert metrics["losses/clipfrac"] == 0 and abs(metrics["losses/approx_kl"]) < 1e-9
    assert abs(metrics["losses/old_approx_kl"]) < 1e-5
    after = weights(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_microbatches_add_up_to_the_batch():
    ways = []
    for micro in (16, 4):
        learner = made(micro_batch=micro)
        learner.iterate(rollout(learner.policy, learner.value_head))
        ways.append(weights(learner))
    assert all(torch.allclose(ways[0][name], ways[1][name], atol=1e-6) for name in ways[0])


def test_it_goes_on_exactly_where_it_was():
    whole = made(update_epoch=2)
    episodes = rollout(whole.policy, whole.value_head)
    whole.iterate(episodes)
    stopped = copy.deepcopy((whole.policy.policy.state_dict(), whole.state_dict()))
    later = rollout(whole.policy, whole.value_head, seed=6, version=1)
    whole.iterate(later)

    resumed = made(update_epoch=2)
    resumed.policy.policy.load_state_dict(stopped[0])
    resumed.load_state_dict(stopped[1])
    resumed.iterate(later)
    mine, expected = weights(resumed), weights(whole)
    assert resumed.version == 2 and all(torch.equal(mine[name], expected[name]) for name in mine)


def stale(**settings):
    """A learner that has moved on from the policy that acted."""
    learner = made(**settings)
    episodes = rollout(learner.policy, learner.value_head)
    learner.iterate(episodes)
    return learner, episodes


def recorded(monkeypatch, learner):
    calls = []
    loss = ppo.policy_loss
    monkeypatch.setattr(ppo, "policy_loss", lambda *a, **k: (calls.append((a, k)), loss(*a, **k))[1])
    return calls


def test_samples_of_an_older_policy_are_clipped_around_the_one_the_iteration_began_with(monkeypatch):
    learner, episodes = stale()
    found = samples.collate(episodes, gamma=0.99, lam=0.95)
    with torch.no_grad():
        encoded = features.batch(found.records, learner.policy.tag)
        velocity = partial(learner.policy.velocity, encoded)
        score = flow_sde.replay(velocity, found.x, found.x_next, found.k, found.noise_level, FLOW)
        now = scores.reduced(score, (2, 3))
    calls = recorded(monkeypatch, learner)
    learner.iterate(episodes)
    (logp, old, _, _), options = calls[0]
    assert sorted(old.tolist()) == pytest.approx(sorted(now.tolist()), abs=1e-4)
    assert torch.allclose(logp, old, atol=1e-4)
    behaviour = scores.reduced(found.log_prob, (2, 3))
    assert sorted(options["logp_behaviour"].tolist()) == pytest.approx(sorted(behaviour.tolist()), abs=1e-4)
    assert not torch.allclose(now, behaviour, atol=1e-2)


def test_rlinfs_interpolation_is_an_option(monkeypatch):
    learner, episodes = stale(proximal="interpolate")
    calls = recorded(monkeypatch, learner)
    learner.iterate(episodes)
    (logp, old, _, _), options = calls[0]
    behaviour = options["logp_behaviour"]
    assert torch.allclose(old, behaviour + (logp.detach() - behaviour) / 2, atol=1e-5)


def test_fresh_samples_need_no_other_policy(monkeypatch):
    learner = made()
    calls = recorded(monkeypatch, learner)
    learner.iterate(rollout(learner.policy, learner.value_head))
    assert calls[0][1]["logp_behaviour"] is None


def test_during_the_critics_warmup_the_policy_stays():
    learner = made(critic_warmup=1)
    before = weights(learner)
    metrics = learner.iterate(rollout(learner.policy, learner.value_head))
    moved = {name for name, each in weights(learner).items() if not torch.equal(each, before[name])}
    assert moved and all(name.startswith("value_head.") for name in moved)
    assert "losses/policy_loss" not in metrics
    later = made(critic_warmup=1, update_epoch=2)
    both = later.iterate(rollout(later.policy, later.value_head))
    assert both["losses/kept"] == 1  # of the one update that has it, not of both
    learner.iterate(rollout(learner.policy, learner.value_head, version=1))
    assert any(not torch.equal(weights(learner)[name], before[name]) for name in learner.policy.trainable())


def test_a_gradient_that_is_not_finite_changes_nothing():
    learner = made()
    episodes = rollout(learner.policy, learner.value_head)
    with torch.no_grad():
        learner.value_head.layers[0].weight[0, 0] = float("inf")
    before = weights(learner)
    with pytest.raises(ValueError, match="the gradient norm of optimizer step 0 is"):
        learner.iterate(episodes)
    after = weights(learner)
    assert all(torch.equal(before[name], after[name]) for name in before) and learner.steps == 0


def test_bad_samples_are_refused():
    learner = made()
    early = rollout(learner.policy, learner.value_head, version=3)
    for call, words in (
        (lambda: learner.iterate(early), "samples of version 3, but it is at 0"),
        (lambda: learner.iterate([]), "there is no trajectory"),
        (lambda: replace(early[0], chunks=[]), "has no chunk"),
        (
            lambda: replace(early[0], chunks=[replace(early[0].chunks[0], value=float("nan"))]),
            "holds NaN",
        ),
        (lambda: replace(SETTINGS, micro_batch=5), "must be a multiple of micro_batch 5"),
        (lambda: replace(SETTINGS, gamma=1.5), "gamma must be within 0 and 1"),
        (lambda: replace(SETTINGS, update_epoch=0), "update_epoch must be at least 1"),
        (lambda: replace(SETTINGS, schedule="linear"), "constant or cosine"),
        (lambda: replace(SETTINGS, proximal="guess"), "recompute or interpolate"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_rates_fall_as_a_cosine_over_iterations_and_a_resume_knows_where():
    learner = made(schedule="cosine", schedule_iterations=4, schedule_floor=0.1, critic_lr=2e-3)
    rates = []
    for version in range(6):
        learner.version = version  # as after a resume
        learner.iterate(rollout(learner.policy, learner.value_head, version=version))
        rates.append([group["lr"] for group in learner.optimizer.param_groups])
    middle = 0.1 + 0.9 * 0.5
    assert [actor for actor, _ in rates[::2]] == pytest.approx([1e-3, 1e-3 * middle, 1e-4])
    assert [critic for _, critic in rates] == pytest.approx([2 * actor for actor, _ in rates])
    assert rates[5] == rates[4] and rates[1][0] == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + 0.5**0.5) / 2))


def test_half_precision_weights_have_fp32_masters():
    policy = state_policy()
    policy.policy.layers.bfloat16()
    learner = Learner(policy, value_head(policy), replace(SETTINGS, actor_lr=1e-6))
    assert learner.optimizer.options.master_weights
    assert not made().optimizer.options.master_weights


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_be_rewarded(seed):
    """A bandit: the first action's first number should be 0.5. Signs that are wrong make it worse."""
    learner = made(actor_lr=5e-3, global_batch=128, micro_batch=128, update_epoch=4, seed=seed)

    def reward(actions):
        return -float((actions[0, 0] - 0.5).square())

    found = []
    for iteration in range(20):
        episodes = rollout(
            learner.policy, learner.value_head, count=128, seed=1000 * seed + iteration, reward=reward,
            version=iteration,
        )  # fmt: skip
        found.append(sum(float(each.chunks[0].rewards.sum()) for each in episodes) / 128)
        learner.iterate(episodes)
    assert found[0] < -0.7 and sum(found[-3:]) / 3 > -0.15
