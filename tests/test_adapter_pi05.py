"""The split forward against LeRobot's own, same weights, batches and seeds: loss, gradients, RNG, state."""

import copy

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import facts, features
from somaspeed_patch.pi05 import hints
from somaspeed_patch.testing_pi05 import make_batch, make_policy

EXPERT_ONLY = dict(train_expert_only=True)

RAGGED = dict(language_lengths=[48, 7, 1, 20])
CASES = {
    "one camera": (EXPERT_ONLY, {}),
    "two cameras, ragged language": (dict(EXPERT_ONLY, cameras=2), RAGGED),
    "absent camera in the middle": (dict(EXPERT_ONLY, cameras=3), dict(RAGGED, present=[0, 2])),
    "all-padding language": (EXPERT_ONLY, dict(language_lengths=[0, 0, 0, 0])),
    "one prompt empty": (EXPERT_ONLY, dict(language_lengths=[0, 3, 40, 1])),
    "batch 1": (dict(EXPERT_ONLY, cameras=2), dict(batch_size=1)),
    "long prompts": (dict(EXPERT_ONLY, tokenizer_max_length=200), dict(language_lengths=[48, 130, 1, 20])),
    "checkpointing": (dict(EXPERT_ONLY, cameras=2, gradient_checkpointing=True), {}),
    "chunk 1": (dict(EXPERT_ONLY, chunk_size=1, n_action_steps=1), {}),
    "vision frozen only": (dict(freeze_vision_encoder=True, cameras=2), RAGGED),
    "nothing frozen": (dict(cameras=2), {}),
}
TWENTY_STEPS = [
    "two cameras, ragged language",
    "absent camera in the middle",
    "all-padding language",
    "batch 1",
    "checkpointing",
    "vision frozen only",
]


def step(policy, batch, reduction="mean", seed=7):
    """Loss, gradients (None where there is none), the RNG state afterwards, and the loss dictionary."""
    policy.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=policy.config.dtype == "bfloat16"):
        loss, shown = policy.forward(batch, reduction=reduction)
    weights = torch.arange(1, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()}
    return loss.detach(), gradients, torch.get_rng_state(), shown


def calls(site):
    found = {s.site: s for s in somaspeed_patch.report().sites}
    return found[site].calls if site in found else 0


def assert_same_step(native, ours, tolerance=2e-6):
    assert torch.allclose(native[0], ours[0], rtol=tolerance, atol=0)
    assert torch.equal(native[2], ours[2])
    assert native[3].keys() == ours[3].keys()
    for name, gradient in native[1].items():
        assert (gradient is None) == (ours[1][name] is None), name
        if gradient is not None:
            assert (gradient - ours[1][name]).norm() <= tolerance * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("case", CASES)
def test_one_step_equals_natives(case):
    config, shape = CASES[case]
    policy = make_policy(**config)
    batch = make_batch(policy, **shape)
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05"):
        before = calls("pi05/frozen_prefix")
        ours = step(policy, batch)
        served = calls("pi05/frozen_prefix") - before
    assert served == (1 if config.get("train_expert_only") else 0)
    assert_same_step(native, ours)


@pytest.mark.parametrize("feature", ["compact_tokens", "split_attention", "cast_once", "frozen_prefix"])
def test_every_feature_can_be_off(feature):
    policy = make_policy(**EXPERT_ONLY, cameras=3)
    batch = make_batch(policy, present=[1], language_lengths=[9, 7, 0, 20])
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05", **{feature: False}):
        assert_same_step(native, step(policy, batch))


def test_a_report_gives_no_reason_of_an_earlier_patch():
    def reason():
        return next(
            site.reason for site in somaspeed_patch.report().sites if site.site == "pi05/split_attention"
        )

    policy = make_policy(**EXPERT_ONLY)
    batch = make_batch(policy)
    with somaspeed_patch.patched("pi05"):
        step(policy, batch)
        assert reason().startswith("plain PyTorch: ")
    with somaspeed_patch.patched("pi05"):
        assert reason() == ""


def test_per_sample_losses():
    policy = make_policy(**EXPERT_ONLY, cameras=2)
    batch = make_batch(policy, language_lengths=[48, 7, 1, 20])
    native = step(policy, batch, reduction="none")
    with somaspeed_patch.patched("pi05"):
        ours = step(policy, batch, reduction="none")
    assert ours[0].shape == (4,)
    assert_same_step(native, ours)


def test_evaluation_without_gradient():
    policy = make_policy(**EXPERT_ONLY, cameras=2)
    batch = make_batch(policy)
    policy.eval()
    with torch.no_grad():
        torch.manual_seed(0)
        native, _ = policy.forward(batch)
        with somaspeed_patch.patched("pi05"):
            torch.manual_seed(0)
            ours, _ = policy.forward(batch)
    assert torch.allclose(native, ours, rtol=1e-6)
    assert not ours.requires_grad


def test_masks_that_only_the_values_explain():
    """A camera absent in some samples only, language padded on the left: the general reordering."""
    policy = make_policy(**EXPERT_ONLY, cameras=2)
    batch = make_batch(policy)
    batch["observation.language.attention_mask"] = torch.arange(48).expand(4, -1) >= torch.tensor(
        [[3], [40], [0], [47]]
    )
    images, img_masks = policy._preprocess_images(batch)
    img_masks[0] = torch.tensor([True, False, True, False])
    arguments = (
        images, img_masks, batch["observation.language.tokens"], batch["observation.language.attention_mask"],
        policy.prepare_action(batch), torch.randn(4, 4, 8), torch.rand(4),
    )  # fmt: skip
    native = policy.model.forward(*arguments)
    with somaspeed_patch.patched("pi05"):
        before = calls("pi05/frozen_prefix")
        ours = policy.model.forward(*arguments)
        assert calls("pi05/frozen_prefix") == before + 1
    assert torch.allclose(native, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [EXPERT_ONLY, dict(freeze_vision_encoder=True)], ids=["expert", "vision"])
def test_bf16_is_within_twice_natives_own_rounding(config):
    policy = make_policy(**config, cameras=2, dtype="bfloat16")
    batch = make_batch(policy, batch_size=8, language_lengths=[48, 7, 1, 20, 3, 30, 0, 9])
    exact_policy = copy.deepcopy(policy).float()
    exact_policy.config = copy.deepcopy(policy.config)
    exact_policy.config.dtype = "float32"
    exact = step(exact_policy, batch)
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05"):
        ours = step(policy, batch)
    assert torch.equal(native[2], ours[2])
    eps = torch.finfo(torch.bfloat16).eps
    for name, truth in exact[1].items():
        if truth is None:
            assert ours[1][name] is None
            continue
        allowed = 2 * (native[1][name].float() - truth).norm() + eps * truth.norm()
        assert (ours[1][name].float() - truth).norm() <= allowed, name


def train(policy, steps=20, **shape):
    """Losses of `steps` AdamW updates as the trainer makes them, and the weights they lead to."""
    optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=2.5e-5, betas=(0.9, 0.95), weight_decay=0.01)
    torch.manual_seed(0)
    losses = []
    for index in range(steps):
        loss, _ = policy.forward(make_batch(policy, seed=index, **shape))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, policy.state_dict()


@pytest.mark.parametrize("case", TWENTY_STEPS)
def test_twenty_steps_lead_to_the_same_weights(case):
    config, shape = CASES[case]
    losses, weights = train(make_policy(**config), **shape)
    with somaspeed_patch.patched("pi05"):
        our_losses, our_weights = train(make_policy(**config), **shape)
    assert our_losses == pytest.approx(losses, rel=1e-5)
    assert our_weights.keys() == weights.keys()
    for name, value in weights.items():
        assert (our_weights[name] - value).abs().max() <= 1e-5, name


def test_lora_on_the_expert():
    from peft import LoraConfig, get_peft_model

    def with_lora():
        policy = make_policy(**EXPERT_ONLY, cameras=2)
        torch.manual_seed(1)
        lora = get_peft_model(policy, LoraConfig(r=4, **_targets(policy), init_lora_weights=False))
        return lora.train()

    native_policy, our_policy = with_lora(), with_lora()
    batch = make_batch(native_policy.base_model.model, language_lengths=[48, 7, 1, 20])

    def run(policy):
        policy.config = policy.base_model.model.config
        return step(policy, batch)

    native = run(native_policy)
    with somaspeed_patch.patched("pi05"):
        before = calls("pi05/frozen_prefix")
        ours = run(our_policy)
        assert calls("pi05/frozen_prefix") == before + 1
    assert any("lora" in name and gradient is not None for name, gradient in native[1].items())
    assert_same_step(native, ours)


def _targets(policy):
    found = policy._get_default_peft_targets()
    return dict(target_modules=found["target_modules"], modules_to_save=found["modules_to_save"])


def test_lora_alone_freezes_the_prefix():
    """LoRA freezes every base weight, so the prefix is frozen without train_expert_only."""
    from peft import LoraConfig, get_peft_model

    policy = make_policy(cameras=2)
    batch = make_batch(policy)
    lora = get_peft_model(policy, LoraConfig(r=4, **_targets(policy), init_lora_weights=False))
    lora.config = policy.config
    native = step(lora, batch)
    with somaspeed_patch.patched("pi05"):
        before = calls("pi05/frozen_prefix")
        assert_same_step(native, step(lora, batch))
        assert calls("pi05/frozen_prefix") == before + 1


def test_inference_is_not_touched():
    policy = make_policy(**EXPERT_ONLY, cameras=2)
    batch = {k: v for k, v in make_batch(policy).items() if k != "action"}
    torch.manual_seed(0)
    native = policy.predict_action_chunk(batch)
    with somaspeed_patch.patched("pi05"):
        torch.manual_seed(0)
        assert torch.equal(policy.predict_action_chunk(batch), native)


def test_state_dict_and_module_tree_stay_the_hosts():
    policy = make_policy(**EXPERT_ONLY, cameras=2, dtype="bfloat16")
    names = [name for name, _ in policy.named_modules()]
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    with somaspeed_patch.patched("pi05"):
        step(policy, make_batch(policy))
        assert [name for name, _ in policy.named_modules()] == names
        assert policy.state_dict().keys() == state.keys()
        assert all(torch.equal(policy.state_dict()[name], value) for name, value in state.items())


def test_a_hook_bound_to_something_large_is_not_copied_and_still_runs():
    class Owner:
        def __init__(self):
            self.seen = 0

        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        def hook(self, module, args, output):
            self.seen += 1

    policy = make_policy(**EXPERT_ONLY, dtype="bfloat16")
    owner = Owner()
    policy.model.paligemma_with_expert.paligemma.model.vision_tower.register_forward_hook(owner.hook)
    with somaspeed_patch.patched("pi05"):
        step(policy, make_batch(policy))
        site = next(s for s in somaspeed_patch.report().sites if s.site == "pi05/frozen_prefix")
    assert owner.seen == 1
    assert "failed" not in site.reason


def test_only_weights_that_autocast_casts_are_copied():
    from somaspeed_patch import frozen

    tower = make_policy(**EXPERT_ONLY).model.paligemma_with_expert.paligemma.model.vision_tower
    clone = frozen.working_copy(tower, torch.bfloat16)
    originals, copies = dict(tower.named_parameters()), dict(clone.named_parameters())
    assert originals.keys() == copies.keys()
    cast = {name for name in copies if copies[name] is not originals[name]}
    layer = "vision_model.encoder.layers.0"
    assert {
        f"{layer}.mlp.fc1.weight",
        f"{layer}.mlp.fc1.bias",
        "vision_model.embeddings.patch_embedding.weight",
    } <= cast
    assert all(torch.equal(copies[name], originals[name].bfloat16()) for name in cast)
    assert f"{layer}.layer_norm1.weight" not in cast
    assert "vision_model.embeddings.position_embedding.weight" not in cast
    assert frozen.working_copy(tower, torch.bfloat16) is clone
    frozen.release()


def test_new_frozen_weights_are_seen_at_the_next_step():
    policy = make_policy(**EXPERT_ONLY, dtype="bfloat16")
    batch = make_batch(policy)
    with somaspeed_patch.patched("pi05"):
        first = step(policy, batch)[0]
        with torch.no_grad():
            policy.model.paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight.mul_(2)
        second = step(policy, batch)[0]
    assert first != second
    assert torch.allclose(step(policy, batch)[0], second, rtol=1e-2)


def test_unfreezing_goes_back_to_the_hosts_forward():
    policy = make_policy(**EXPERT_ONLY)
    batch = make_batch(policy)
    joint = policy.model.paligemma_with_expert
    with somaspeed_patch.patched("pi05"):
        step(policy, batch)
        joint.paligemma.requires_grad_(True)
        ours = step(policy, batch)
        site = next(s for s in somaspeed_patch.report().sites if s.site == "pi05/frozen_prefix")
    assert "not frozen: vision_tower" in site.reason
    assert_same_step(step(policy, batch), ours)


def test_a_failure_of_ours_is_redone_by_the_host_and_reported(monkeypatch):
    from somaspeed_patch.pi05 import expert

    policy = make_policy(**EXPERT_ONLY)
    batch = make_batch(policy)
    native = step(policy, batch)

    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    with somaspeed_patch.patched("pi05"):
        monkeypatch.setattr(expert, "run", broken)
        ours = step(policy, batch)
        step(policy, batch)
        site = next(s for s in somaspeed_patch.report().sites if s.site == "pi05/frozen_prefix")
    assert_same_step(native, ours, tolerance=0)
    assert site.last_fallback == "RuntimeError: no such kernel"
    assert site.reason.startswith("failed once and stays native")


def test_a_failure_in_the_vision_hook_is_redone_by_the_host_too(monkeypatch):
    from somaspeed_patch.pi05 import prefix

    policy = make_policy(freeze_vision_encoder=True, cameras=2)
    batch = make_batch(policy)
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05"):
        monkeypatch.setattr(prefix, "pad_mask", None)
        ours = step(policy, batch)
        site = next(s for s in somaspeed_patch.report().sites if s.site == "pi05/frozen_vision")
    assert_same_step(native, ours, tolerance=0)
    assert "not callable" in site.last_fallback


@pytest.mark.parametrize(
    "option", ["rtc_training_max_delay", "use_visual_memory", "use_proprioceptive_memory"]
)
def test_what_lerobot_main_adds_is_left_to_the_host(option):
    policy = make_policy(**EXPERT_ONLY)
    batch = make_batch(policy)
    native = step(policy, batch)
    setattr(policy.config, option, 1)  # LeRobot 0.6.1 has no such option and does not look
    with somaspeed_patch.patched("pi05"):
        ours = step(policy, batch)
        site = next(s for s in somaspeed_patch.report().sites if s.site == "pi05/frozen_prefix")
    assert site.reason == f"the policy has {option}"
    assert_same_step(native, ours, tolerance=0)


def test_an_input_that_lerobot_main_adds_is_left_to_the_host():
    from somaspeed_patch.pi05.forward import _later_input

    assert _later_input((), {}) is None
    assert _later_input((None, None), {"states": None}) is None
    assert "states" in _later_input((), {"states": torch.zeros(1)})
    assert "prefix_mask" in _later_input((torch.zeros(1),), {})


def test_a_replaced_joint_layer_is_respected(monkeypatch):
    from lerobot.policies.pi05 import modeling_pi05

    policy = make_policy(**EXPERT_ONLY)
    original, seen = modeling_pi05.compute_layer_complete, []

    def theirs(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    with somaspeed_patch.patched("pi05"), monkeypatch.context() as on_top:
        on_top.setattr(modeling_pi05, "compute_layer_complete", theirs)
        step(policy, make_batch(policy))
    assert len(seen) == 2  # layers


def test_another_policy_in_the_process_keeps_its_own_path():
    """Patching is by class, deciding by instance: a fully trainable one beside it stays native."""
    frozen, teacher = make_policy(**EXPERT_ONLY), make_policy(seed=1)
    batch = make_batch(frozen)
    native = step(teacher, batch)
    with somaspeed_patch.patched("pi05"):
        step(frozen, batch)
        assert_same_step(native, step(teacher, batch), tolerance=0)


def test_accumulated_gradients_add_up():
    policy = make_policy(**EXPERT_ONLY)
    batches = [make_batch(policy, seed=i) for i in range(2)]

    def accumulated():
        policy.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        for batch in batches:
            (policy.forward(batch)[0] / 2).backward()
        return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}

    native = accumulated()
    with somaspeed_patch.patched("pi05"):
        ours = accumulated()
    assert native.keys() == ours.keys()
    for name, gradient in native.items():
        assert (gradient - ours[name]).norm() <= 2e-6 * gradient.norm() + 1e-12, name


def test_hints_travel_with_the_mask():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert hints.measure(mask) == hints.Valid(longest=2, leading=True, every=False)
    assert hints.measure(mask.flip(1)) == hints.Valid(longest=2, leading=False, every=False)
    meta = torch.empty(2, 3, dtype=torch.bool, device="meta")
    assert hints.of(meta) is None
    hints.attach(meta, hints.Valid(2, True, False))
    moved = torch.empty(2, 3, dtype=torch.bool, device="meta")
    facts.moved(meta, moved)
    assert hints.of(moved) == hints.Valid(2, True, False)


def test_every_feature_of_the_adapter_is_exact_by_default():
    from somaspeed_patch.adapter import adapters

    for feature in adapters()["pi05"].features:
        assert feature.exact or not feature.default
    assert features.Feature(name="x", changes="y", exact=False, default=False).default is False
