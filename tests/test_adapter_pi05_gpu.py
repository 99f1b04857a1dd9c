"""pi0.5 on a GPU: the kernel serves, Inductor compiles, no device sync is added."""

import copy
import warnings

import pytest
import torch

import somaspeed_patch
from somaspeed_patch.pi05 import hints
from somaspeed_patch.testing_pi05 import loss_and_gradients as step
from somaspeed_patch.testing_pi05 import make_batch, make_policy

pytestmark = pytest.mark.gpu
MASK = "observation.language.attention_mask"


def policy_and_batch(dtype, **config):
    policy = make_policy(train_expert_only=True, cameras=2, device="cuda", dtype=dtype, **config)
    batch = make_batch(policy, batch_size=8, language_lengths=[48, 7, 1, 20, 3, 30, 0, 9])
    return policy, batch


def counts(site):
    found = {s.site: s for s in somaspeed_patch.report().sites}
    return found[site].calls, found[site].fallbacks


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("hinted", [False, True], ids=["all slots", "compacted"])
def test_bf16_within_twice_natives_own_rounding_by_the_kernel(compile_it, hinted):
    policy, batch = policy_and_batch("bfloat16")
    exact_policy = copy.deepcopy(policy).float()
    exact_policy.config = copy.deepcopy(policy.config)
    exact_policy.config.dtype = "float32"
    exact, native = step(exact_policy, batch), step(policy, batch)
    if hinted:
        hints.attach(batch[MASK], hints.measure(batch[MASK].cpu()))
    with somaspeed_patch.patched("pi05", compile=compile_it):
        before = counts("pi05/split_attention")[0]
        ours = step(policy, batch)
        assert counts("pi05/split_attention")[0] > before
        assert counts("pi05/split_attention")[1] == counts("pi05/compile")[1] == 0
    assert ours[1].keys() == native[1].keys()
    eps = torch.finfo(torch.bfloat16).eps
    for name, truth in exact[1].items():
        allowed = 2 * (native[1][name].float() - truth).norm() + eps * truth.norm()
        assert (ours[1][name].float() - truth).norm() <= allowed, name


def test_fp32_equals_native():
    policy, batch = policy_and_batch("float32")
    native = step(policy, batch)
    with somaspeed_patch.patched("pi05"):
        ours = step(policy, batch)
    assert torch.allclose(native[0], ours[0], rtol=1e-5)
    for name, gradient in native[1].items():
        assert (gradient - ours[1][name]).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def syncs(policy, batch):
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(policy, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("hinted", [False, True])
def test_syncs_do_not_rise_above_natives(hinted):
    policy, batch = policy_and_batch("bfloat16")
    step(policy, batch)
    native = syncs(policy, batch)
    assert native > 0
    if hinted:
        hints.attach(batch[MASK], hints.measure(batch[MASK].cpu()))
    with somaspeed_patch.patched("pi05"):
        step(policy, batch)
        assert syncs(policy, batch) <= native


def test_a_mask_on_the_wrong_device_is_the_hosts_error():
    policy, batch = policy_and_batch("bfloat16")
    batch[MASK] = batch[MASK].cpu()
    with pytest.raises(RuntimeError) as native:
        step(policy, batch)
    with somaspeed_patch.patched("pi05"), pytest.raises(RuntimeError) as ours:
        step(policy, batch)
    assert str(ours.value) == str(native.value)
