"""Recipes of RL runs: what the shipped ones say, and what a wrong one is answered."""

import json
import pickle

import pytest

from somaspeed_patch.ab.yaml_reader import RecipeError
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.ppo import Clips
from somaspeed_patch.rl_run import recipe as recipes
from somaspeed_patch.rl_run.recipe_file import load

SMALL = """\
description: "small"
iterations: 3
policy: { type: pi05 }
env:
  tasks: [4, 7, 9]
  slots: 4
  horizon: 40
  egl_devices: [0, 1]
ppo:
  steps: 4
  clip_dual: none
  gamma: 0.9
"""


@pytest.fixture
def written(tmp_path):
    """A function that writes a recipe and reads it."""

    def read(text=SMALL, *settings):
        file = tmp_path / "own.yaml"
        file.write_text(text)
        return load(str(file), settings)

    return read


def test_a_recipe_is_read_whole(written):
    found = written()
    assert (found.name, found.iterations, found.lag, found.seed) == ("own", 3, None, 0)
    assert found.ppo.flow == Flow(steps=4, noise_level=0.5) and found.ppo.clips == Clips(dual=None)
    assert found.ppo.gamma == 0.9 and found.ppo.executed == 5
    assert found.rollout.init_states == tuple(range(50))
    specs = found.env.specs()
    assert [(each.task, each.egl_device) for each in specs] == [(4, 0), (7, 1), (9, 0), (4, 1)]
    assert {(each.suite, each.horizon, each.image_size) for each in specs} == {("libero_spatial", 40, 256)}
    assert pickle.loads(pickle.dumps(found)) == found
    assert json.loads(json.dumps(found.plain())) == found.plain()


def test_settings_go_over_the_file(written):
    found = written(SMALL, "ppo.gamma=0.5", "checkpoint.every=2", "lag=1", "env.tasks=all", "env.slots=10")
    assert (found.ppo.gamma, found.checkpoint.every, found.lag) == (0.5, 2, 1)
    assert [each.task for each in found.env.specs()] == list(range(10))


def test_a_seed_is_that_of_rollouts_and_learner(written):
    assert written(SMALL + "seed: 7\n").ppo.seed == 7


def test_init_states_are_a_number_or_a_list(written):
    assert written(SMALL + "rollout: { init_states: 3 }\n").rollout.init_states == (0, 1, 2)
    assert written(SMALL + "rollout: { init_states: [0, 5] }\n").rollout.init_states == (0, 5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gamma:": "gama:"}, r"own.yaml:12: ppo.gama: unknown key; did you mean gamma\?"),
        ({"iterations: 3": "iteration: 3"}, r"own.yaml:2: iteration: unknown key; did you mean iterations\?"),
        ({"iterations: 3\n": ""}, "iterations: missing; expected a whole number"),
        ({"horizon: 40": "horizon: far"}, r"own.yaml:7: env.horizon: expected a whole number, but is 'far'"),
        ({"gamma: 0.9": "gamma: 1.5"}, "own.yaml:9: ppo: rl: gamma must be within 0 and 1, but is 1.5"),
        ({"steps: 4": "steps: 0"}, "own.yaml:9: ppo: flow: steps must be at least 1"),
        ({"pi05": "pi0"}, r"own.yaml:3: policy.type: expected one of pi05, molmoact2, groot, but is 'pi0'"),
        ({"type: pi05": "path: x"}, "own.yaml:3: policy: expected either `type`.*or `factory`"),
        ({"type: pi05": "type: pi05, factory: 'a:b'"}, "expected either `type`"),
        ({"tasks: [4, 7, 9]": "suite: mine"}, "own.yaml:4: env: tasks: name them"),
        ({"slots: 4": "slots: 2"}, "env: slots: 2 slots leave some of the 3 tasks out"),
        (
            {"tasks: [4, 7, 9]": "tasks: four"},
            r"env.tasks: expected a list, each a whole number, but is 'four'",
        ),
        ({"iterations: 3": "iterations: 3\nlag: -1"}, "lag: expected a whole number, but is -1"),
        ({"iterations: 3": "iterations: 3\nmemory: disk"}, "memory: expected one of host, device, recompute"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(written, changed, words):
    text = SMALL
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(RecipeError, match=words):
        written(text)


def test_a_setting_that_is_none_is_refused(written):
    with pytest.raises(RecipeError, match="--set: expected section.key=value, but is 'ppo.gamma'"):
        written(SMALL, "ppo.gamma")
    with pytest.raises(RecipeError, match="ppo.gama: unknown key"):
        written(SMALL, "ppo.gama=1")
    with pytest.raises(RecipeError, match="did you mean rl_reach"):
        load("rl_reech")


def test_what_a_resume_may_change(written):
    before = written().plain()
    free = (
        "iterations=9",
        "log.tensorboard=true",
        "checkpoint.keep=1",
        "evaluate.every=1",
        "timeouts.step=5",
    )
    assert recipes.changes(before, written(SMALL, *free, "description=other").plain()) == []
    odd = recipes.changes(before, written(SMALL, "ppo.gamma=0.8", "seed=1", "ppo.clip_low=0.1").plain())
    assert odd == [
        "ppo.clips.low: 0.2, now 0.1", "ppo.gamma: 0.9, now 0.8", "ppo.seed: 0, now 1", "seed: 0, now 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "flow", "executed", "horizon", "epochs", "episodes", "lag"),
    [
        ("spatial", (3, 0.5), 5, 240, 1, (64, 8), None),
        ("object", (5, 0.3), 5, 240, 1, (64, 8), None),
        ("goal", (5, 0.3), 5, 320, 4, (64, 8), None),
        ("10", (5, 0.5), 10, 480, 4, (64, 8), None),
        ("spatial_async", (3, 0.5), 5, 240, 2, (128, 1), 1),
    ],
)
def test_the_shipped_recipes_have_the_published_numbers(name, flow, executed, horizon, epochs, episodes, lag):
    found = load(f"rl_pi05_libero_{name}")
    ppo = found.ppo
    assert (ppo.flow.steps, ppo.flow.noise_level, ppo.flow.kind) == (*flow, "sde")
    assert (ppo.executed, found.env.horizon, ppo.update_epoch, found.lag) == (executed, horizon, epochs, lag)
    assert (found.env.slots, found.rollout.episodes) == episodes
    assert (ppo.micro_batch, ppo.global_batch, ppo.actor_lr, ppo.critic_lr) == (128, 2048, 5e-6, 1e-4)
    assert (ppo.betas, ppo.eps, ppo.weight_decay, ppo.max_grad_norm) == ((0.9, 0.95), 1e-8, 0.01, 1.0)
    assert (ppo.gamma, ppo.lam, ppo.clips.low, ppo.clips.high) == (0.99, 0.95, 0.2, 0.2)
    assert (ppo.clips.value, ppo.clips.huber) == (0.2, 10.0)
    tasks = [each.task for each in found.env.specs()]
    assert {tasks.count(task) for task in range(10)} <= {len(tasks) // 10, len(tasks) // 10 + 1}
    assert found.evaluate.episodes * found.env.slots == 512 and found.policy.autocast == "bfloat16"


def test_with_rlinfs_choices(written):
    found = written(
        SMALL.replace("  clip_dual: none\n", "") + "parity: rlinf\nrollout: { bootstrap: true }\n"
    )
    assert (found.policy.pool, found.rollout.shared_step, found.rollout.bootstrap) == ("all", True, False)
    assert found.ppo.proximal == "interpolate" and found.ppo.clips == Clips(dual=None)
    beside = written(SMALL.replace("  clip_dual: none\n", "") + "parity: rlinf\nlag: 1\n")
    assert beside.ppo.clips == Clips() and beside.ppo.gamma == 0.9
    groot = written(SMALL.replace("pi05", "groot") + "parity: rlinf\n")
    assert groot.policy.pool == "valid"
    with pytest.raises(RecipeError, match="pool: `all` is pi0.5's only"):
        written(SMALL.replace("type: pi05", "type: groot, pool: all"))


def test_libero_10_has_the_published_schedule():
    ppo = load("rl_pi05_libero_10").ppo
    assert [ppo.rate(each) for each in (0, 500, 1000, 2000)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert load("rl_pi05_libero_goal").ppo.rate(1000) == 1


def test_the_small_recipes_are_read():
    assert load("rl_libero_tiny").env.slots == 4 and load("rl_reach").policy.factory is not None
