"""MolmoAct2's metrics through what accelerate does to a policy: still unread, the same values."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import somaspeed_patch
from somaspeed_patch.deferred import DeferredMetrics
from somaspeed_patch.testing_molmoact2 import make_batch, make_policy

EXPERT = dict(action_mode="continuous", train_action_expert_only=True)


@pytest.fixture(params=["no", "bf16"])
def accelerator(request):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision=request.param)
    AcceleratorState._reset_state(reset_partial_state=True)


def forward(policy, batch, **options):
    torch.manual_seed(3)
    return policy.forward(batch, **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}])
def test_metrics_stay_unread_under_mixed_precision(accelerator, options):
    native, policy = accelerator.prepare(make_policy(**EXPERT)), make_policy(**EXPERT)
    batch = make_batch(native)
    wanted_loss, wanted = forward(native, batch, **options)
    assert type(wanted) is dict
    with somaspeed_patch.patched("molmoact2"):
        policy = accelerator.prepare(policy)
        loss, metrics = forward(policy, batch, **options)
        assert type(metrics) is DeferredMetrics and metrics._on_device is not None
        assert loss.dtype == wanted_loss.dtype == torch.float32
        torch.testing.assert_close(loss, wanted_loss, rtol=2e-2, atol=0)
        assert metrics.keys() == wanted.keys() and metrics["loss"] == loss.mean().item()
    loss, metrics = forward(policy, batch, **options)
    assert type(metrics) is dict and torch.equal(loss, wanted_loss) and metrics == wanted


def test_without_deferral_the_metrics_are_read(accelerator):
    with somaspeed_patch.patched("molmoact2", deferred_metrics=False):
        policy = accelerator.prepare(make_policy(**EXPERT))
        _, metrics = forward(policy, make_batch(policy))
    assert type(metrics) is dict and isinstance(metrics["loss"], float)
