"""MolmoAct2's other ways of training, every feature off in turn, and half precision, against LeRobot's own.

Where the backbone trains, gradients pass through tower and language model and are rounded more often, so the
budget is twice native's own distance from the same step in fp64.
"""

from functools import cache

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import sites, testing_molmoact2
from somaspeed_patch.adapter import adapters
from somaspeed_patch.testing_molmoact2 import make_policy
from somaspeed_patch.testing_parity import (
    assert_as_accurate_as_native,
    assert_same_step,
    flow_loss,
    in_float64,
    lively,
    remembering,
    step,
    with_noise,
)

FROZEN = dict(action_mode="continuous", train_action_expert_only=True)
CONTINUOUS = dict(action_mode="continuous")
BOTH = dict(action_mode="both")
DISCRETE = dict(action_mode="discrete", inference_action_mode="discrete")
INSULATED = dict(enable_knowledge_insulation=True)
LORA = dict(enable_lora_vlm=True, lora_rank=4)
LORA_EVERYWHERE = dict(LORA, enable_lora_action_expert=True)
CHECKPOINTED = dict(gradient_checkpointing=True)
TASKS = dict(tasks=["pick up the cube", "put the very large red bowl on the plate", "go", "open the drawer"])
RAGGED = dict(TASKS, valid_actions=[4, 2, 1, 3], still=[2])

CASES = {
    "full, sdpa, one timestep": (
        CONTINUOUS | dict(attn_implementation="sdpa", num_flow_timesteps=1),
        "shared_context",
    ),
    "full with embedding, checkpointing": (
        CONTINUOUS | CHECKPOINTED | dict(freeze_embedding=False),
        "shared_context",
    ),
    "both, eight timesteps": (BOTH | dict(num_flow_timesteps=8), "shared_context"),
    "both, insulated, checkpointing": (BOTH | INSULATED | CHECKPOINTED, "shared_context"),
    "continuous, insulated": (CONTINUOUS | INSULATED, "frozen_prefix"),
    "insulated, LoRA": (CONTINUOUS | INSULATED | LORA, "shared_context"),
    "insulated, LoRA without dropout": (
        CONTINUOUS | INSULATED | LORA | dict(lora_dropout=0.0),
        "frozen_prefix",
    ),
    "discrete": (DISCRETE, None),
    "LoRA": (CONTINUOUS | LORA, "shared_context"),
    "LoRA, expert too": (CONTINUOUS | LORA_EVERYWHERE | dict(lora_dropout=0.3), "shared_context"),
    "LoRA, both, checkpointing": (BOTH | LORA | CHECKPOINTED, "shared_context"),
    "LoRA, both, expert too": (BOTH | LORA_EVERYWHERE, "shared_context"),
}
make_batch = remembering(testing_molmoact2.make_batch)


@cache
def policy_of(**config):
    """One policy for all tests that leave it as it was."""
    return lively(make_policy(**config))


@pytest.fixture(autouse=True)
def fresh_counts():
    sites.clear()


def calls(name):
    return sites.site(f"molmoact2/{name}").calls


def patched_step(policy, batch, features=None, **arguments):
    with somaspeed_patch.patched("molmoact2", **(features or {})):
        ours = step(policy, batch, **arguments)
    assert not any(one.fallbacks for one in sites.every())
    return ours


@pytest.mark.parametrize("case", CASES)
def test_as_accurate_as_native(case):
    config, way = CASES[case]
    policy = policy_of(**config)
    batch = make_batch(policy, **RAGGED)
    native = step(policy, batch, reduction="none")
    ours = patched_step(policy, batch, reduction="none")
    for name in ("frozen_prefix", "shared_context"):
        assert calls(name) == (1 if name == way else 0), name
    assert_as_accurate_as_native(in_float64(policy, batch, reduction="none"), native, ours)


def test_dropout_of_lora_is_drawn():
    """Or the cases with dropout would say nothing of the order of random numbers."""
    policy = policy_of(**CONTINUOUS, **LORA)
    batch = make_batch(policy)
    states = [step(one, batch).random_state for one in (policy, policy_of(**CONTINUOUS))]
    assert not torch.equal(*states)


FEATURES = [feature.name for feature in adapters()["molmoact2"].features if feature.default]
STEPS = {"frozen": FROZEN, "both": BOTH}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", STEPS)
def test_every_feature_can_be_off(kind, feature):
    policy = policy_of(**STEPS[kind])
    batch = make_batch(policy, **RAGGED)
    native = step(policy, batch)
    ours = patched_step(policy, batch, {feature: False})
    assert calls(feature) == 0
    assert_same_step(native, ours, tolerance=1e-5)


@pytest.mark.parametrize("kind", STEPS)
def test_all_features_off_is_the_hosts_step_bit_for_bit(kind):
    policy = policy_of(**STEPS[kind])
    batch = make_batch(policy, **RAGGED)
    ours = patched_step(policy, batch, dict.fromkeys(FEATURES, False))
    assert not any(one.calls for one in sites.every())
    assert_same_step(step(policy, batch), ours, tolerance=0)


HALF = {"frozen": FROZEN | dict(cameras=2), "full, checkpointing": CONTINUOUS | CHECKPOINTED}


@pytest.mark.parametrize(
    ("kind", "cast_once"), [("frozen", True), ("frozen", False), ("full, checkpointing", True)]
)
def test_autocast_is_within_twice_natives_own_rounding(kind, cast_once):
    policy = policy_of(**HALF[kind])
    batch = make_batch(policy, **RAGGED)
    truth, native = step(policy, batch), step(policy, batch, autocast=True)
    ours = patched_step(policy, batch, dict(cast_once=cast_once), autocast=True)
    assert bool(calls("cast_once")) == (cast_once and kind == "frozen")
    assert_as_accurate_as_native(truth, native, ours, each=False)


@pytest.mark.parametrize("kind", HALF)
def test_bf16_weights_are_within_twice_natives_own_rounding(kind):
    policy = lively(make_policy(dtype="bfloat16", **HALF[kind]))
    exact = make_policy(**HALF[kind])
    exact.load_state_dict(policy.state_dict())
    batch = with_noise(policy, make_batch(policy, **RAGGED))
    truth, native = (step(one, batch, loss_of=flow_loss) for one in (exact, policy))
    ours = patched_step(policy, batch, loss_of=flow_loss)
    assert_as_accurate_as_native(truth, native, ours, each=False)


def test_discrete_training_uses_what_also_serves_a_trainable_backbone():
    policy = policy_of(**DISCRETE)
    patched_step(policy, make_batch(policy, still=[1]))
    served = {name: calls(name) for name in ("batched_images", "split_embedding", "fused_attention")}
    tower = len(policy._backbone().vision_backbone.image_vit.transformer.resblocks)
    assert served == {"batched_images": 1, "split_embedding": 1, "fused_attention": tower + 1}


def test_two_policies_in_one_process():
    """Patching is by class, deciding by instance."""
    frozen, teacher = policy_of(**FROZEN), policy_of(**BOTH)
    batches = [make_batch(policy, **RAGGED) for policy in (frozen, teacher)]
    natives = [step(*pair) for pair in zip((frozen, teacher), batches, strict=True)]
    with somaspeed_patch.patched("molmoact2"):
        ours = [step(*pair) for pair in zip((frozen, teacher), batches, strict=True)]
    assert (calls("frozen_prefix"), calls("shared_context")) == (1, 1)
    for native, mine in zip(natives, ours, strict=True):
        assert_same_step(native, mine, tolerance=1e-5)
