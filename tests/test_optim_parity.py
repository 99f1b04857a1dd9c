"""FusedAdamW against torch.optim.AdamW behind clip_grad_norm_: 20 steps of every dtype, layout and option.

The kernels run in Triton's interpreter on a CPU and as they are on a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.optim.fused_adamw import CALLS
from somaspeed_patch.testing_adamw import (
    HYPER,
    Record,
    assert_within_native,
    parameters,
    run,
    same_bits,
    set_gradients,
    torch_clip,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16


def copies(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [
        nn.Parameter(p.detach().clone(memory_format=torch.preserve_format).to(dtype or p.dtype))
        for p in params
    ]


def eps(dtypes: list[torch.dtype]) -> list[float]:
    return [torch.finfo(dtype).eps for dtype in dtypes]


def natives(
    params: list[nn.Parameter], groups: Any, num_steps: int = 20, **settings: Any
) -> tuple[Record, Record]:
    """Runs of torch's AdamW behind its clipping, from these weights: in their dtypes, and in fp64."""
    records = []
    for those in (copies(params), copies(params, torch.float64)):
        optimizer = torch.optim.AdamW(groups(those), **{**HYPER, **settings})
        records.append(run(optimizer, torch_clip(those), those, num_steps=num_steps, like=params))
    return records[0], records[1]


def one_group(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params}]


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], "lr": 5e-4, "eps": 1e-6, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("dtypes", "groups", "maximize"),
    [
        pytest.param([FP32], one_group, False, id="fp32"),
        pytest.param([FP32], two_groups, True, id="fp32, two groups, maximize"),
        pytest.param([BF16], two_groups, False, id="bf16, two groups"),
        pytest.param([FP32, BF16], two_groups, True, id="mixed, two groups, maximize"),
    ],
)
def test_twenty_steps_are_as_good_as_torchs(dtypes: list[torch.dtype], groups: Any, maximize: bool) -> None:
    params = parameters(dtypes, DEVICE)
    native, truth = natives(params, groups, maximize=maximize)
    before = CALLS["triton"]
    optimizer = FusedAdamW(groups(params), **HYPER, maximize=maximize)
    ours = run(optimizer, optimizer.clip_grad_norm_, params)
    assert CALLS["triton"] == before + 20 and optimizer.native_reason() is None
    assert_within_native(ours, native, truth, eps(dtypes))
    # fp64 sums of fp32 squares: the norm is good to fp32 whatever the gradients' dtype is
    assert ours.norms == pytest.approx(truth.norms, rel=3e-7)


def test_gradients_are_not_written() -> None:
    params = parameters([FP32, BF16], DEVICE)
    optimizer = FusedAdamW(params, **HYPER)
    for step in range(4):
        set_gradients(params, step)
        kept = [None if p.grad is None else (p.grad, p.grad.clone(), p.grad._version) for p in params]
        assert optimizer.clip_grad_norm_(1e-3) > 1e-3
        optimizer.step()
        for param, before in zip(params, kept, strict=True):
            if before is not None:
                assert param.grad is before[0] and param.grad._version == before[2]
                assert torch.equal(param.grad, before[1])


def test_two_runs_give_the_same_bits() -> None:
    ends = []
    for _ in range(2):
        params = parameters([FP32, BF16], DEVICE)
        optimizer = FusedAdamW(params, **HYPER)
        ends.append(run(optimizer, optimizer.clip_grad_norm_, params, num_steps=6))
    assert same_bits(*ends)


def test_without_clipping_it_is_plain_adamw() -> None:
    params = parameters([FP32], DEVICE)
    native_params, exact_params = copies(params), copies(params, torch.float64)
    records = []
    for those, optimizer in (
        (params, FusedAdamW(params, **HYPER)),
        (native_params, torch.optim.AdamW(native_params, **HYPER)),
        (exact_params, torch.optim.AdamW(exact_params, **HYPER)),
    ):
        records.append(run(optimizer, lambda max_norm: torch.zeros(()), those, num_steps=8))
    assert_within_native(records[0], records[1], records[2], eps([FP32]))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_low_precision_parameters_with_fp32_gradients_and_moments(dtype: torch.dtype) -> None:
    """torch has no such thing: the truth is fp64 AdamW of the rounded weights, step by step."""
    params = parameters([dtype], DEVICE)
    for param in params:
        param.grad_dtype = FP32
    optimizer = FusedAdamW(params, **HYPER, moments_dtype=FP32)
    exact = copies(params, torch.float64)
    reference = torch.optim.AdamW(exact, **HYPER)
    for step in range(6):
        for param, grad, twin in zip(params, _fp32(params, step), exact, strict=True):
            param.grad, twin.grad = grad, None if grad is None else grad.double()
            twin.data.copy_(param.data.double())  # the rounded weight is where each step starts
        norm = optimizer.clip_grad_norm_(1.0)
        assert float(norm) == pytest.approx(float(torch_clip(exact)(1.0)), rel=3e-7)
        optimizer.step()
        reference.step()
        for param, twin in zip(params, exact, strict=True):
            half_ulp = torch.finfo(dtype).eps / 2
            torch.testing.assert_close(
                param.double(), twin, rtol=half_ulp * 1.01, atol=3e-8
            )  # fp16's subnormals
            if twin.grad is not None:
                assert optimizer.state[param]["exp_avg"].dtype == FP32
                got = optimizer.state[param]["exp_avg_sq"].double()
                torch.testing.assert_close(got, reference.state[twin]["exp_avg_sq"], rtol=2e-6, atol=1e-30)


def _fp32(params: list[nn.Parameter], step: int) -> list[torch.Tensor | None]:
    shadow = [nn.Parameter(p.detach().float()) for p in params]
    set_gradients(shadow, step)
    return [p.grad for p in shadow]


def bf16_walk(num_steps: int, **options: Any) -> float:
    """Mean distance walked by weights of size 0.02 under gradients that always point the same way."""
    torch.manual_seed(0)
    param = nn.Parameter((torch.randn(4096) * 0.02).to(DEVICE, options.pop("dtype", BF16)))
    start = param.detach().double().clone()
    optimizer = FusedAdamW([param], lr=2.5e-5, weight_decay=0.0, **options)
    for _ in range(num_steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return float((start - param.detach().double()).mean())


def test_bf16_updates_at_a_small_lr_need_master_weights_or_stochastic_rounding() -> None:
    """K11: lr 2.5e-5 is below half a bf16 ulp of most weights of size 0.02, which then never move."""
    full = bf16_walk(30, dtype=FP32)
    assert full == pytest.approx(30 * 2.5e-5, rel=1e-3)
    assert bf16_walk(30) < 0.5 * full
    assert bf16_walk(30, master_weights=True) == pytest.approx(full, rel=0.02)
    # unbiased: 4096 weights of at most 30 rounding steps of about 1e-4, so a standard error of 1 % of the way
    assert bf16_walk(30, stochastic_rounding=True) == pytest.approx(full, rel=0.05)
    assert bf16_walk(5, stochastic_rounding=True) == bf16_walk(5, stochastic_rounding=True)
    assert bf16_walk(5, stochastic_rounding=True) != bf16_walk(5, stochastic_rounding=True, rounding_seed=1)


def test_master_weights_follow_fp32_and_an_outside_write() -> None:
    params = parameters([BF16], DEVICE)
    twins = copies(params, FP32)
    ours, fp32 = (
        FusedAdamW(params, **HYPER, master_weights=True, moments_dtype=FP32),
        FusedAdamW(twins, **HYPER),
    )
    for step in range(6):
        set_gradients(params, step)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = None if param.grad is None else param.grad.float()
        for optimizer in (ours, fp32):
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        for param, twin in zip(params, twins, strict=True):
            if param in ours.state:
                master = ours.state[param]["master"]
                assert torch.equal(param, master.to(BF16))
                torch.testing.assert_close(master, twin.detach(), rtol=5e-7, atol=1e-8)  # 6 steps' rounding
        if step == 3:  # somebody loads other weights: the master must not bring the old ones back
            with torch.no_grad():
                params[1].fill_(100.0)  # not what any master rounds to
                twins[1].fill_(100.0)


def test_gradients_are_divided_only_when_asked() -> None:
    """D1: the factor shows under clipping, while Adam alone hardly notices it."""
    params, summed = parameters([FP32], DEVICE), parameters([FP32], DEVICE)
    ours, divided = FusedAdamW(params, **HYPER), FusedAdamW(summed, **HYPER, grad_divisor=8.0)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(summed, step)
        for param in summed:
            if param.grad is not None:
                param.grad.mul_(8)
        assert torch.equal(ours.clip_grad_norm_(5.0), divided.clip_grad_norm_(5.0))
        ours.step()
        divided.step()
    assert all(torch.equal(a, b) for a, b in zip(params, summed, strict=True))


def test_parameters_that_do_not_fill_their_memory() -> None:
    """A slice of a larger tensor, and one that starts at an odd address."""
    base = torch.randn(40, 64, device=DEVICE)
    flat = torch.randn(20000, device=DEVICE)
    params = [nn.Parameter(base[:, ::2]), nn.Parameter(flat[3:19999])]
    native, truth = natives(params, one_group, num_steps=6)
    untouched = base[:, 1::2].clone()
    optimizer = FusedAdamW(params, **HYPER)
    ours = run(optimizer, optimizer.clip_grad_norm_, params, num_steps=6)
    assert_within_native(ours, native, truth, eps([FP32]))
    assert torch.equal(base[:, 1::2], untouched)
    assert torch.equal(base[:, ::2], params[0]) and optimizer.native_reason() is None


def test_many_tiles_and_frozen_neighbours() -> None:
    shapes = [(3 * 16384,), (5,), (2 * 16384 + 1,)]
    params = parameters([FP32], DEVICE, shapes=shapes)
    frozen = [nn.Parameter(torch.ones(7, device=DEVICE), requires_grad=False) for _ in range(3)]
    listed = [frozen[0], params[0], frozen[1], *params[1:], frozen[2]]
    native, truth = natives(params, one_group, num_steps=4)
    optimizer = FusedAdamW(listed, **HYPER)
    ours = run(optimizer, optimizer.clip_grad_norm_, params, num_steps=4)
    assert_within_native(ours, native, truth, eps([FP32]))
    assert all(param not in optimizer.state for param in frozen)
    assert copy.deepcopy(optimizer).native_reason() is None
