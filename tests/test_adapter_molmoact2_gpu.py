"""MolmoAct2 on a GPU: bf16 against fp32, Inductor, no wait for the device, any batch size, the same bits."""

import warnings

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.testing_molmoact2 import make_batch, make_policy
from somaspeed_patch.testing_parity import (
    assert_as_accurate_as_native,
    assert_same_step,
    flow_loss,
    lively,
    step,
    with_noise,
)

pytestmark = pytest.mark.gpu

FROZEN = dict(action_mode="continuous", train_action_expert_only=True, cameras=2, device="cuda")
CONTINUOUS = dict(action_mode="continuous", device="cuda")
CHECKPOINTED = dict(gradient_checkpointing=True)
LENGTHS = dict(
    tasks=["pick up the cube", "put the very large red bowl on the plate", "go", "open the drawer"]
)
EQUAL = dict(tasks=["pick up the cube"] * 4)
PADDED = dict(LENGTHS, valid_actions=[4, 2, 1, 3])


@pytest.fixture(autouse=True)
def fresh_counts():
    sites.clear()


def site(name):
    return sites.site(f"molmoact2/{name}")


def assert_nothing_failed():
    assert not [one.last_fallback for one in sites.every() if one.fallbacks]


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [EQUAL, PADDED], ids=["equal", "padded"])
@pytest.mark.parametrize("config", [FROZEN, CONTINUOUS], ids=["frozen", "full"])
def test_bf16_weights_are_within_twice_natives_own_rounding(config, shape, compile_it):
    policy, exact = lively(make_policy(dtype="bfloat16", **config)), make_policy(**config)
    exact.load_state_dict(policy.state_dict())
    with somaspeed_patch.patched("molmoact2", compile=compile_it):
        batch = with_noise(policy, make_batch(policy, **shape))  # made here, so that it has twins
        ours = step(policy, batch, loss_of=flow_loss)
        assert site("compile").calls > 0 or not compile_it
        assert_nothing_failed()
    truth, native = (step(one, batch, loss_of=flow_loss) for one in (exact, policy))
    assert torch.isfinite(native.loss)
    assert_as_accurate_as_native(truth, native, ours, each=False)


@pytest.mark.parametrize("shape", [EQUAL, PADDED], ids=["equal", "padded"])
@pytest.mark.parametrize("config", [FROZEN, CONTINUOUS], ids=["frozen", "full"])
def test_autocast_is_within_twice_natives_own_rounding(config, shape):
    """Under it a mask of fp32's lowest value becomes minus infinity, in padding for a whole row."""
    policy = lively(make_policy(**config))
    with somaspeed_patch.patched("molmoact2"):
        batch = make_batch(policy, **shape)
        ours = step(policy, batch, autocast=True)
        assert_nothing_failed()
    truth, native = step(policy, batch), step(policy, batch, autocast=True)
    assert_as_accurate_as_native(truth, native, ours, each=False)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("config", [FROZEN | CHECKPOINTED, CONTINUOUS | CHECKPOINTED], ids=["frozen", "full"])
def test_fp32_equals_native_with_checkpointing(config, compile_it):
    policy = lively(make_policy(**config))
    with somaspeed_patch.patched("molmoact2", compile=compile_it):
        batch = make_batch(policy, **PADDED)
        ours = step(policy, batch)
        assert_nothing_failed()
    assert_same_step(step(policy, batch), ours, tolerance=1e-4)


def waits(work):
    """How often the host waits for the device in `work()`."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_waits_for_the_device_only_where_the_host_draws_its_times(dtype):
    policy = lively(make_policy(dtype=dtype, **FROZEN))
    with somaspeed_patch.patched("molmoact2"):
        first, batch = (make_batch(policy, **PADDED, seed=seed) for seed in (0, 1))
        step(policy, first)
        drawing = waits(
            lambda: policy._prepare_flow_matching_tensors(
                actions=batch["action"], action_dim_is_pad=batch["action_dim_is_pad"]
            )
        )
        random_numbers = waits(lambda: torch.manual_seed(0))
        assert waits(lambda: step(policy, batch)) == drawing + random_numbers
        assert_nothing_failed()
    assert waits(lambda: step(policy, batch)) > 10 + drawing  # native: two reads or more a sample


def test_no_wait_at_all_with_times_given_and_prompts_never_seen():
    policy = lively(make_policy(dtype="bfloat16", **FROZEN))
    with somaspeed_patch.patched("molmoact2"):
        step(policy, with_noise(policy, make_batch(policy, **EQUAL)), loss_of=flow_loss)
        batch = with_noise(policy, make_batch(policy, **PADDED))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, _ = flow_loss(policy, batch, "mean")
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_nothing_failed()
    assert torch.isfinite(loss)


def test_pooling_of_160_samples():
    """62,720 problems of one query and four keys: from 128 samples on cuDNN's attention refuses them."""
    from lerobot.policies.molmoact2.molmoact2_hf_model import modeling_molmoact2 as host

    from somaspeed_patch.molmoact2.attention import vision_attention

    torch.manual_seed(0)
    module = host.ViTMultiHeadDotProductAttention(1152, 16, 16, 72, input_dim=2304).cuda()
    source = torch.randn(160 * 392, 4, 2304, device="cuda")
    query = source.mean(1, keepdim=True)
    mask = torch.rand(len(source), 1, 1, 4, device="cuda") > 0.1
    mask[..., 0] = True
    found, exact = [], []
    for kind in ("eager", "sdpa"):  # only the second one heeds the mask
        module.attn_implementation = kind
        with torch.no_grad():
            parts = zip(query.split(392), source.split(392), mask.split(392), strict=True)
            exact.append(torch.cat([module(*part) for part in parts]))
            with torch.autocast("cuda", torch.bfloat16):
                found.append(vision_attention(module, query, source, mask))
    eps = torch.finfo(torch.bfloat16).eps
    for ours, truth in zip(found, exact, strict=True):
        assert (ours.float() - truth).norm() <= 2 * eps * truth.norm()


def test_a_batch_of_160_trains_under_autocast():
    policy = lively(make_policy(**FROZEN))
    with somaspeed_patch.patched("molmoact2"):
        batch = make_batch(policy, batch_size=160)
        ours = step(policy, batch, autocast=True)
        assert_nothing_failed()
    assert site("frozen_prefix").calls == 1
    assert all(torch.isfinite(g).all() for g in ours.gradients.values() if g is not None)


@pytest.mark.parametrize("config", [FROZEN, CONTINUOUS], ids=["frozen", "full"])
def test_the_same_step_twice_is_the_same_bits(config):
    policy = lively(make_policy(dtype="bfloat16", **config))
    with somaspeed_patch.patched("molmoact2"):
        batch = make_batch(policy, **PADDED)
        assert_same_step(step(policy, batch), step(policy, batch), tolerance=0)


def test_masks_on_the_wrong_device_are_the_hosts_error():
    policy = make_policy(dtype="bfloat16", **FROZEN)
    batch = make_batch(policy, **PADDED)
    batch["image_token_pooling"] = batch["image_token_pooling"].cpu()
    with pytest.raises(RuntimeError) as native:
        step(policy, batch)
    with somaspeed_patch.patched("molmoact2"), pytest.raises(RuntimeError) as ours:
        step(policy, batch)
    assert str(ours.value) == str(native.value)


def test_a_model_moved_between_steps_is_seen():
    """The copies for autocast lie where the weights lay."""
    policy = lively(make_policy(**FROZEN))
    with somaspeed_patch.patched("molmoact2"):
        batch = make_batch(policy, **PADDED)
        before = step(policy, batch, autocast=True)
        policy.to("cpu").to("cuda")
        after = step(policy, batch, autocast=True)
    assert_same_step(before, after, tolerance=0)
