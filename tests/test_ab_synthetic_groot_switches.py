"""GR00T N1.7 in `somaspeed ab --synthetic`: the host's options that an arm switches, and the gate's truth."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from somaspeed_patch import patched
from somaspeed_patch.ab import synthetic_gate, synthetic_groot
from somaspeed_patch.ab.synthetic_recipe import Synthetic

CPU = torch.device("cpu")
NOISE = ("to_k.bias",)  # softmax does not see a shift of all keys: what is there is rounding alone


@pytest.fixture(scope="module")
def subject():
    steps = {"warmup": 1, "steps": 1, "repeats": 1, "arms": ()}
    shape = {"size": "micro", "cameras": 2, "slots": 0, "tokens": 24, "chunk": 16}
    return synthetic_groot.Subject(
        Synthetic(name="tiny", model="groot", dtype="bfloat16", **shape, **steps), CPU
    )


def state(policy):
    """What the switches touch: every module's own attributes, the parameters and the configurations."""
    modules = {
        name: {key: value for key, value in vars(module).items() if not key.endswith("hooks")}
        for name, module in policy.named_modules()
    }
    head = policy._groot_model.action_head
    assert "_beta_dist" in modules["_groot_model.action_head"]  # drawn once, at the first loss
    attention = [getattr(*holder) for holder in synthetic_groot._attention(policy)]
    cache = policy._groot_model.backbone.language_model.config.use_cache
    weights = {name: (p.dtype, p.detach().clone()) for name, p in policy.named_parameters()}
    return modules, attention, cache, head.state_dropout_prob, weights


def same(before, after):
    modules, *rest, weights = before
    modules_after, *rest_after, weights_after = after
    assert rest == rest_after
    for name, attributes in modules.items():
        assert modules_after[name].keys() == attributes.keys(), name
        for key in attributes.keys() - {"rope_deltas"}:  # of the last batch
            assert modules_after[name][key] is attributes[key] or modules_after[name][key] == attributes[key]
    for name, (dtype, values) in weights.items():
        assert weights_after[name][0] == dtype
        assert torch.equal(weights_after[name][1], values), name


def distance(gradients, others):
    """The largest relative one of any parameter whose gradient is not rounding alone."""
    return max(
        float((gradients[name].float() - others[name].float()).norm() / gradients[name].float().norm())
        for name in gradients
        if not name.endswith(NOISE)
    )


def recorders(policy):
    hooks = [hook for module in policy.modules() for hook in module._forward_hooks.values()]
    return sum(hook.__module__ == "transformers.utils.output_capturing" for hook in hooks)


def test_hooks_that_a_native_step_leaves_are_not_there_in_the_next_arm(subject):
    batch = subject.batch(2)
    loss, _ = subject.loss_and_gradients(batch)
    assert recorders(subject.policy) > 2
    left = recorders(subject.policy)
    with subject.switched({}), patched("groot"):
        subject.loss_and_gradients(batch)
        assert recorders(subject.policy) == 0
    with subject.switched({}):
        assert torch.equal(subject.loss_and_gradients(batch)[0], loss)
    assert recorders(subject.policy) == left


@pytest.mark.parametrize(
    ("options", "bits", "close"),
    [
        ({"attention": "eager"}, False, 0.2),
        ({"dropout": "off", "attention": "sdpa"}, False, None),
        ({"dropout": "host"}, True, 0.0),
        ({"all_fp32": True}, False, None),
        ({"all_bf16": True}, False, 0.2),
    ],
)
def test_a_switch_changes_how_and_is_undone(subject, options, bits, close):
    batch = subject.batch(2)
    loss, gradients = subject.loss_and_gradients(batch)
    before = state(subject.policy)
    with subject.switched(options):
        other_loss, others = subject.loss_and_gradients(batch)
    assert (torch.equal(loss, other_loss) and distance(gradients, others) == 0) is bits
    if close is not None:
        assert distance(gradients, others) <= close
        assert float(other_loss) == pytest.approx(float(loss), rel=0.01)
    same(before, state(subject.policy))
    assert torch.equal(subject.loss_and_gradients(batch)[0], loss)


def test_weights_have_the_dtype_that_is_asked_for(subject):
    model = subject.policy._groot_model
    for options, backbone, head in (
        ({"all_bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"all_fp32": True}, torch.float32, torch.float32),
        ({}, torch.bfloat16, torch.float32),
    ):
        with subject.switched(options):
            assert {parameter.dtype for parameter in model.backbone.parameters()} == {backbone}
            assert {parameter.dtype for parameter in model.action_head.parameters()} == {head}
    with (
        pytest.raises(ValueError, match="all_bf16 and all_fp32 exclude each other"),
        subject.switched({"all_bf16": True, "all_fp32": True}),
    ):
        pass


def test_without_dropout_no_random_number_but_noise_and_times_is_drawn(subject):
    batch = subject.batch(2)
    with subject.switched({"dropout": "off"}):
        assert subject.policy._groot_model.action_head.state_dropout_prob == 0
        torch.manual_seed(3)
        subject.policy.forward(batch)
        after = torch.get_rng_state()
    torch.manual_seed(3)
    torch.randn(batch["action"].shape, dtype=torch.bfloat16)
    subject.policy._groot_model.action_head.sample_time(2, CPU, torch.bfloat16)
    assert torch.equal(after, torch.get_rng_state())


def test_eager_reaches_vision_tower_and_language_model(subject):
    backbone = subject.policy._groot_model.backbone
    attention = [backbone.visual.blocks[0].attn, backbone.language_model.layers[0].self_attn]
    with subject.switched({"attention": "eager"}):
        assert [part.config._attn_implementation for part in attention] == ["eager"] * 2
    assert [part.config._attn_implementation for part in attention] == ["sdpa"] * 2


def test_compiled_blocks_compute_the_same_and_are_left_as_they_were(subject, monkeypatch):
    # dynamo's part alone, which sees hooks and caches; what inductor rounds is not what is asked here
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    blocks = list(subject.policy._groot_model.backbone.language_model.layers)
    assert len(synthetic_groot._blocks(subject.policy)) == 3 + len(blocks) + 1 + 4
    monkeypatch.setattr(synthetic_groot, "_blocks", lambda policy: blocks)
    batch = subject.batch(2)
    loss, gradients = subject.loss_and_gradients(batch)
    before = state(subject.policy)
    with subject.switched({"compile_blocks": True}):
        first = [block.forward for block in blocks]
        for _ in range(2):  # the second call has another hook on the last decoder layer
            other_loss, others = subject.loss_and_gradients(batch)
            assert torch.equal(other_loss, loss)
            assert distance(gradients, others) == 0
    same(before, state(subject.policy))
    with subject.switched({"compile_blocks": True}):
        assert all(block.forward is compiled for block, compiled in zip(blocks, first, strict=True))
    subject._compiled.clear()


def seen(policy, batch):
    """What the backbone's images, the head's noisy actions and times, and dropout's masks were in a step."""
    found, head = {"masks": []}, policy._groot_model.action_head
    handles = [
        policy._groot_model.backbone.visual.register_forward_pre_hook(
            lambda _, args: found.update(pixels=args[0].float())
        ),
        head.action_encoder.register_forward_pre_hook(
            lambda _, args: found.update(noisy=args[0].float(), times=args[1])
        ),
        head.model.register_forward_pre_hook(
            lambda _, args, kwargs: found.update(timestep=kwargs["timestep"]), with_kwargs=True
        ),
        *(
            module.register_forward_hook(lambda _, args, result: found["masks"].append(result == 0))
            for module in head.modules()
            if isinstance(module, nn.Dropout)
        ),
    ]
    torch.manual_seed(3)
    policy.forward(batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("options", [{}, {"all_fp32": True}, {"all_bf16": True, "dropout": "off"}])
def test_the_truth_has_the_draws_and_inputs_of_its_original(subject, options):
    batch = subject.batch(8)
    with subject.switched(options):
        native, exact = seen(subject.policy, batch), seen(subject.in_float32(subject.policy), batch)
    for name in ("pixels", "times", "timestep"):
        assert torch.equal(native[name], exact[name]), name
    # (1 - t) noise + t action: three roundings in bf16, none in fp32
    assert torch.allclose(native["noisy"], exact["noisy"], rtol=0, atol=2**-6)
    assert len(native["masks"]) == len(exact["masks"]) == 4 + 4 * 4
    for mask, other in zip(native["masks"], exact["masks"], strict=True):
        assert torch.equal(mask, other)
        assert bool(mask.any()) is (options.get("dropout") != "off")


@pytest.mark.parametrize("options", [{}, {"all_fp32": True}, {"all_bf16": True, "dropout": "off"}])
def test_the_truth_is_near_native(subject, options):
    batch = subject.batch(2)
    with subject.switched(options):
        native = subject.loss_and_gradients(batch)
        exact = synthetic_gate.truth(subject, batch)
    assert {gradient.dtype for gradient in exact[1].values()} == {torch.float32}
    assert subject.policy.config.use_bf16
    assert float(native[0]) == pytest.approx(float(exact[0]), rel=2e-3)
    # a unit of the decoder's ReLU that bf16's rounding switches is worth some per cent at this size
    assert distance(exact[1], native[1]) < 0.3
    assert synthetic_gate.judge(exact, native, native)["green"]


def test_a_policy_that_computes_in_fp32_is_its_own_truth(subject):
    high = synthetic_groot.Subject(replace(subject.recipe, dtype="float32"), CPU)
    high.policy.config.use_bf16 = False
    batch = high.batch(2)
    native, exact = high.loss_and_gradients(batch), synthetic_gate.truth(high, batch)
    assert torch.equal(native[0], exact[0])
    assert distance(exact[1], native[1]) < 1e-5


def test_other_masks_or_noise_than_natives_are_red(subject):
    batch = subject.batch(2)
    native, exact = subject.loss_and_gradients(batch), synthetic_gate.truth(subject, batch)
    assert not synthetic_gate.judge(exact, native, subject.loss_and_gradients(batch, seed=4))["green"]
    with subject.switched({"dropout": "off"}):
        off = subject.loss_and_gradients(batch)
    assert not synthetic_gate.judge(exact, native, off)["green"]
