"""The adapter on tiny GR00T policies: loss and every gradient as natively, and what is left to the host."""

import pytest
import torch

import somaspeed_patch
from somaspeed_patch.deferred import DeferredMetrics
from somaspeed_patch.sites import site
from somaspeed_patch.testing_groot import loss_and_gradients, make_batch, make_policy, make_raw_batch

RAGGED = ["pick it up", "pick up the black bowl and place it on the plate", "open the drawer"]


def with_dropout(policy):
    """Dropout as the real configuration has it."""
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    policy._groot_model.action_head.state_dropout_prob = 0.3
    return policy


def served(name):
    return {s.site: (s.calls, s.native_calls, s.fallbacks) for s in somaspeed_patch.report().sites}[
        f"groot/{name}"
    ]


def why(name):
    return next(s.reason for s in somaspeed_patch.report().sites if s.site == f"groot/{name}")


class Ran:
    """How often a site served, left to the host and failed since this was made."""

    def __init__(self, name):
        self.name, self.before = name, served(name)

    def __call__(self):
        return tuple(now - then for now, then in zip(served(self.name), self.before, strict=True))


def assert_same(native, ours, tolerance=1e-5):
    """Losses, and gradients relative to the largest one: some are zero but for rounding (a key's bias)."""
    assert torch.allclose(ours[0], native[0], rtol=tolerance, atol=0)
    assert ours[1].keys() == native[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in native[1].values())
    for name, gradient in native[1].items():
        assert float((ours[1][name] - gradient).abs().max()) <= tolerance * largest, name


def distance(one, other):
    """Of all gradients as one vector."""
    return sum(float((one[1][name] - gradient).square().sum()) for name, gradient in other[1].items()) ** 0.5


def both(policy, batch, **settings):
    native = loss_and_gradients(policy, batch)
    with somaspeed_patch.patched("groot", **settings):
        ran = Ran("frozen_prefix")
        ours = loss_and_gradients(policy, batch)
        return native, ours, (*ran(), site("groot/frozen_prefix").reason)


@pytest.mark.parametrize("images", [1, 2, 3])
@pytest.mark.parametrize("tasks", [RAGGED, RAGGED[:1] * 3], ids=["ragged", "equal"])
@pytest.mark.parametrize("embodiments", [None, [2, 10, 2]], ids=["one", "three"])
def test_loss_and_gradients_are_natives(images, tasks, embodiments):
    policy = make_policy()
    batch = make_batch(policy, tasks=tasks, images=images, embodiments=embodiments)
    native, ours, ran = both(policy, batch)
    assert ran[:3] == (1, 0, 0)
    assert_same(native, ours)


def test_dropout_draws_the_hosts_masks():
    policy = with_dropout(make_policy())
    batch = make_batch(policy, tasks=RAGGED, images=2, embodiments=[2, 10, 3])
    native, ours, ran = both(policy, batch)
    after = torch.get_rng_state()
    loss_and_gradients(policy, batch)
    assert ran[:3] == (1, 0, 0) and torch.equal(after, torch.get_rng_state())
    assert_same(native, ours)
    assert not torch.equal(loss_and_gradients(policy, batch, seed=8)[0], native[0])


TUNED = {
    "llm": ({"tune_llm": True}, (1, 0, 0), "the vision tower alone"),
    "top layer": ({"tune_top_llm_layers": 1}, (1, 0, 0), "the vision tower alone"),
    "visual": ({"tune_visual": True}, (0, 1, 0), "the vision tower is not frozen"),
    "both": ({"tune_visual": True, "tune_llm": True}, (0, 1, 0), "the vision tower is not frozen"),
}


@pytest.mark.parametrize("case", TUNED)
def test_what_trains_has_its_gradients_and_the_report_says_so(case):
    config, expected, reason = TUNED[case]
    policy = make_policy(**config)
    batch = make_batch(policy, tasks=RAGGED, images=2)
    native, ours, ran = both(policy, batch)
    assert ran[:3] == expected and reason in ran[3]
    assert any("backbone" in name for name in native[1])
    assert_same(native, ours)


@pytest.mark.parametrize("part", ["tune_projector", "tune_diffusion_model", "tune_vlln"])
def test_frozen_parts_of_the_head_stay_frozen(part):
    policy = make_policy(**{part: False})
    native, ours, ran = both(policy, make_batch(policy, tasks=RAGGED, embodiments=[2, 10, 2]))
    assert ran[:3] == (1, 0, 0)
    assert_same(native, ours)


def test_images_of_several_sizes_are_the_hosts():
    policy = make_policy()
    batch = make_raw_batch(policy, [[(2, 2), (1, 2)], [(2, 2)]])
    native, ours, ran = both(policy, batch)
    assert ran[:3] == (0, 1, 0) and "several sizes" in ran[3]
    assert_same(native, ours)


def test_samples_with_different_numbers_of_images():
    policy = make_policy()
    batch = make_raw_batch(policy, [[(2, 2), (2, 2)], [(2, 2)], [(2, 2)] * 3], words=[3, 9, 1])
    native, ours, ran = both(policy, batch)
    assert ran[:3] == (1, 0, 0)
    assert_same(native, ours)


def test_a_sample_without_images():
    policy = make_policy()
    batch = make_raw_batch(policy, [[(2, 2)], []], words=[3, 9])
    native, ours, _ = both(policy, batch)
    assert_same(native, ours)


def test_a_batch_without_what_is_needed_fails_with_the_hosts_words():
    policy = make_policy()
    batch = make_batch(policy)
    del batch["pixel_values"]
    with pytest.raises(Exception) as native:
        policy.forward(dict(batch))
    with somaspeed_patch.patched("groot"), pytest.raises(type(native.value), match=str(native.value)):
        policy.forward(dict(batch))


def test_positions_are_computed_once_a_prompt(monkeypatch):
    policy = make_policy()
    qwen = policy._groot_model.backbone.model.model
    asked, own = [], qwen.get_rope_index
    monkeypatch.setattr(
        qwen, "get_rope_index", lambda **given: asked.append(len(given["input_ids"])) or own(**given)
    )
    with somaspeed_patch.patched("groot"):
        for seed in (0, 1):
            loss_and_gradients(policy, make_batch(policy, tasks=[*RAGGED, RAGGED[0]], seed=seed))
    assert asked == [3]


def test_no_logits_where_the_vision_tower_trains():
    policy = make_policy(tune_visual=True)
    shapes = []
    head = policy._groot_model.backbone.model.lm_head
    hook = head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
    batch = make_batch(policy, tasks=RAGGED)
    loss_and_gradients(policy, batch)
    with somaspeed_patch.patched("groot"):
        loss_and_gradients(policy, batch)
    with somaspeed_patch.patched("groot", skip_logits=False):
        loss_and_gradients(policy, batch)
    hook.remove()
    assert shapes == [batch["input_ids"].shape[1], 1, batch["input_ids"].shape[1]]


def test_bf16_is_no_worse_than_native():
    exact, low = make_policy(), make_policy(use_bf16=True)
    batch = make_batch(exact, tasks=RAGGED, images=2)
    reference = loss_and_gradients(exact, batch)
    native = loss_and_gradients(low, batch)
    with somaspeed_patch.patched("groot"):
        ran = Ran("cast_once")
        ours = loss_and_gradients(low, batch)
        assert ran() == (2, 0, 0)
    assert distance(ours, reference) <= 2 * distance(native, reference)
    loss = [float((one[0] - reference[0]).abs()) for one in (ours, native)]
    assert loss[0] <= 2 * loss[1] + 1e-3 * float(reference[0])


def test_a_hook_of_somebody_else_still_fires():
    policy = make_policy()
    seen = []
    layer = policy._groot_model.backbone.model.model.language_model.layers[0]
    layer.register_forward_hook(lambda *given: seen.append(1))
    native, ours, ran = both(policy, make_batch(policy))
    assert ran[:3] == (0, 1, 0) and "somebody has hooks" in ran[3] and seen == [1, 1]
    assert_same(native, ours)


def test_inference_is_the_hosts():
    policy = make_policy()
    batch = {key: value for key, value in make_batch(policy).items() if key != "action"}

    def actions():
        torch.manual_seed(2)
        return policy.predict_action_chunk(dict(batch))

    native = actions()
    with somaspeed_patch.patched("groot"):
        before = [served(name) for name in ("frozen_prefix", "modality_kv", "category_linear")]
        assert torch.equal(actions(), native)
        assert [served(name) for name in ("frozen_prefix", "modality_kv", "category_linear")] == before


def test_metrics_are_read_late():
    policy = make_policy()
    batch = make_batch(policy)
    with somaspeed_patch.patched("groot"):
        loss, metrics = policy.forward(dict(batch))
        assert type(metrics) is DeferredMetrics and metrics["loss"] == loss.item()
    assert type(policy.forward(dict(batch))[1]) is dict


def test_unpatch_puts_the_hosts_classes_back():
    from lerobot.policies.groot import groot_n1_7, modeling_groot
    from lerobot.policies.groot.action_head import cross_attention_dit

    classes = (
        groot_n1_7.Qwen3Backbone, groot_n1_7.CategorySpecificLinear, modeling_groot.GrootPolicy,
        cross_attention_dit.AlternateVLDiT, cross_attention_dit.SelfAttentionTransformer,
    )  # fmt: skip
    before = [dict(vars(one)) for one in classes]
    with somaspeed_patch.patched("groot"):
        assert [dict(vars(one)) for one in classes] != before
    assert [dict(vars(one)) for one in classes] == before


def test_a_weight_that_changes_is_used_at_the_next_step():
    policy = make_policy()
    batch = make_batch(policy, images=2)
    visual = policy._groot_model.backbone.model.model.visual
    with somaspeed_patch.patched("groot"):
        loss_and_gradients(policy, batch)
        with torch.no_grad():
            visual.pos_embed.weight.mul_(3.0)
        ours = loss_and_gradients(policy, batch)
    assert_same(loss_and_gradients(policy, batch), ours)
