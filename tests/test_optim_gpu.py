"""FusedAdamW on a GPU: CUDA graphs, compile, GradScaler, sizes beyond int32, memory, launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_adamw import HYPER, parameters, same_bits, set_gradients, snapshot

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]


def pair(**options: Any) -> tuple[list[nn.Parameter], FusedAdamW]:
    params = parameters(DTYPES, "cuda", shapes=[(33,), (257, 65), (), (3 * 16384 + 5,)])
    return params, FusedAdamW(params, **{**HYPER, **options})


def step(optimizer: FusedAdamW) -> Tensor:
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return norm


def fill(params: list[nn.Parameter], number: int) -> None:
    """New gradients at the same addresses."""
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    set_gradients(twins, number)
    for param, twin in zip(params, twins, strict=True):
        param.grad.copy_(twin.grad)


def captured(params: list[nn.Parameter], optimizer: FusedAdamW) -> tuple[Callable[[], None], Tensor]:
    """A graph of clip and step on the gradients that are there, and its norm."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step(optimizer)
    return graph.replay, norm


def test_a_captured_step_equals_an_eager_one_while_the_schedule_moves() -> None:
    (params, optimizer), (twins, eager) = pair(), pair()
    for one in (params, twins):
        set_gradients(one, 0)
    step(optimizer), step(eager)
    replay, norm = captured(params, optimizer)
    for number in range(1, 5):
        for group in (*optimizer.param_groups, *eager.param_groups):
            group["lr"] = 1e-3 / number
        fill(params, number), fill(twins, number)
        optimizer.upload_hyperparameters()
        replay()
        assert torch.equal(norm, step(eager))
        assert same_bits(snapshot(optimizer, params), snapshot(eager, twins))


def test_eager_steps_with_other_gradients_do_not_disturb_a_graph() -> None:
    (params, optimizer), (twins, eager) = pair(), pair()
    for one in (params, twins):
        set_gradients(one, 0)
    step(optimizer), step(eager)
    replay, _ = captured(params, optimizer)
    static = [param.grad for param in params]
    for number in range(1, 4):
        for one, do in ((params, optimizer), (twins, eager)):
            set_gradients(one, number)  # new tensors
            step(do)
        for param, grad in zip(params, static, strict=True):
            param.grad = grad
        fill(params, 10 + number), fill(twins, 10 + number)
        replay(), step(eager)
        assert same_bits(snapshot(optimizer, params), snapshot(eager, twins))


def test_an_lr_on_the_device_is_read_at_every_replay() -> None:
    lr = torch.tensor(1e-3, device="cuda")
    (params, optimizer), (twins, eager) = pair(lr=lr), pair(lr=float(lr))
    for one in (params, twins):
        set_gradients(one, 0)
    step(optimizer), step(eager)
    replay, _ = captured(params, optimizer)
    for number in range(1, 4):
        lr.fill_(1e-3 / number)
        eager.param_groups[0]["lr"] = float(lr)
        replay(), step(eager)
    assert same_bits(snapshot(optimizer, params), snapshot(eager, twins))


def test_a_whole_training_step_in_one_graph() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [FusedAdamW(model.parameters(), lr=1e-2) for model in models]
    x = torch.randn(32, 64, device="cuda")

    def train(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](x).square().mean().backward()
        step(optimizers[which])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            train(0), train(1)
    torch.cuda.current_stream().wait_stream(side)
    optimizers[0].zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        models[0](x).square().mean().backward()
        step(optimizers[0])
    for _ in range(5):
        x.normal_()
        graph.replay()
        train(1)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_capture_without_a_step_before_says_so() -> None:
    params, optimizer = pair()
    set_gradients(params, 0)
    with (
        pytest.raises(RuntimeError, match="before capturing a graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step(optimizer)


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("clip", [True, False])
def test_grad_scaler_skips_an_overflow_and_unscales_once(fused: bool | None, clip: bool) -> None:
    ends = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        param = nn.Parameter(torch.linspace(0.5, 1.5, 4096, device="cuda"))
        optimizer = kind([param], lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2)
        for number in range(6):
            loss = (param * (float("inf") if number == 2 else number + 1)).square().mean()
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                if kind is FusedAdamW:
                    optimizer.clip_grad_norm_(0.1)
                else:
                    nn.utils.clip_grad_norm_([param], 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append((param.detach(), float(optimizer.state[param]["step"]), scaler.get_scale()))
    (ours, our_step, our_scale), (native, native_step, native_scale) = ends
    assert our_step == native_step == 5 and our_scale == native_scale
    torch.testing.assert_close(ours, native, rtol=1e-6, atol=1e-7)


def test_a_compiled_training_step_equals_the_eager_one() -> None:
    ends = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)

        def train(x: Tensor, model: nn.Module = model, optimizer: FusedAdamW = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            norm = step(optimizer)
            optimizer.zero_grad()
            return norm

        run = torch.compile(train) if compiled else train
        torch.manual_seed(1)
        norms = [float(run(torch.randn(32, 64, device="cuda"))) for _ in range(5)]
        assert optimizer.native_reason() is None
        ends.append((norms, [param.detach() for param in model.parameters()]))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-4)
    for a, b in zip(ends[0][1], ends[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_more_elements_than_int32_counts() -> None:
    """K17: 2.2e9 elements; the tail and the place where int32 would wrap equal a small tensor's update."""
    numel, window = 2_200_000_003, 5000
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 18 GB for one parameter")
    param = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.zeros_like(param)
    places = [0, 2**31 - window // 2, numel - window]
    small = [nn.Parameter(torch.randn(window, device="cuda").to(torch.bfloat16)) for _ in places]
    for place, twin in zip(places, small, strict=True):
        twin.grad = torch.randn_like(twin)
        param.data[place : place + window] = twin.data
        param.grad[place : place + window] = twin.grad
    norms = []
    for params in ([param], small):
        optimizer = FusedAdamW(params, **HYPER)
        norms.append(step(optimizer))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    for place, twin in zip(places, small, strict=True):
        assert torch.equal(param.data[place : place + window], twin.data)


def test_four_launches_and_no_synchronization() -> None:
    params, optimizer = pair()
    for number in range(2):
        set_gradients(params, number)
        step(optimizer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(optimizer)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    kernels = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
    assert sorted(kernels) == [
        "_adamw_scalars_kernel",
        "_adamw_slot_squares_kernel",
        "_adamw_tile_squares_kernel",
        "_adamw_update_kernel",
    ]


def test_state_moved_to_the_host_and_back_frees_its_memory() -> None:
    (params, optimizer), (twins, untouched) = pair(), pair()
    for number in range(4):
        for one, do in ((params, optimizer), (twins, untouched)):
            set_gradients(one, number)
            step(do)
        for entry in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = entry[name].cpu()
        used = torch.cuda.memory_allocated()
        for entry in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = entry[name].cuda()
        assert torch.cuda.memory_allocated() - used >= sum(2 * p.numel() * p.element_size() for p in params)
    assert same_bits(snapshot(optimizer, params), snapshot(untouched, twins))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_on_another_device_than_the_current_one() -> None:
    """K18"""
    ends = []
    for device in ("cuda:0", "cuda:1"):
        params = parameters(DTYPES, device, shapes=[(33,), (257, 65)])
        optimizer = FusedAdamW(params, **HYPER)
        for number in range(3):
            set_gradients(params, number)
            step(optimizer)
        ends.append(snapshot(optimizer, params))
    assert torch.cuda.current_device() == 0 and same_bits(*ends)
