"""What happens between clip_grad_norm_ and step, and what inf and NaN do: as torch does, or an error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.optim.fused_adamw import CALLS
from somaspeed_patch.testing_adamw import HYPER, snapshot

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Twins:
    """The same parameters under FusedAdamW and under torch's AdamW; `grads` gives both the same gradients."""

    def __init__(self, num_params: int = 3, **options: Any) -> None:
        torch.manual_seed(0)
        values = [torch.randn(5, 7, device=DEVICE) for _ in range(num_params)]
        self.params = [nn.Parameter(value.clone()) for value in values]
        self.native_params = [nn.Parameter(value.clone()) for value in values]
        names = [f"layer.{i}.weight" for i in range(num_params)]
        self.ours = FusedAdamW(list(zip(names, self.params, strict=True)), **{**HYPER, **options})
        self.native = torch.optim.AdamW(self.native_params, **HYPER)

    def both(self, act: Callable[[list[nn.Parameter], Any], None]) -> None:
        act(self.params, self.ours)
        act(self.native_params, self.native)

    def grads(self, seed: int = 1) -> None:
        for params in (self.params, self.native_params):
            generator = torch.Generator().manual_seed(seed)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)

    def clip(self, max_norm: float = 0.5) -> None:
        ours = self.ours.clip_grad_norm_(max_norm)
        native = nn.utils.clip_grad_norm_(self.native_params, max_norm)
        torch.testing.assert_close(ours, native, rtol=1e-6, atol=0)

    def step(self) -> None:
        self.ours.step()
        self.native.step()

    def assert_equal(self) -> None:
        assert self.ours.native_reason() is None
        for ours, native in zip(self.params, self.native_params, strict=True):
            torch.testing.assert_close(ours, native, rtol=1e-6, atol=1e-7)
            assert float(self.ours.state[ours]["step"]) == float(self.native.state[native]["step"])
            for name in ("exp_avg", "exp_avg_sq"):
                got, expected = self.ours.state[ours][name], self.native.state[native][name]
                # some roundings of fp32, in the tensor's own scale: single elements may cancel
                assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_second_clip_sees_the_clipped_gradients() -> None:
    twins = Twins()
    twins.grads()
    twins.clip(1.0)
    twins.clip(0.25)  # compares the norm, which is 1.0 now
    twins.step()
    twins.assert_equal()


def test_a_clip_without_a_step_ends_with_zero_grad() -> None:
    twins = Twins()
    twins.grads()
    twins.clip(1e-3)
    twins.both(lambda params, optimizer: optimizer.zero_grad())
    twins.grads(2)
    twins.step()  # not clipped: the factor belonged to other gradients
    twins.assert_equal()


def test_a_clip_without_a_step_ends_with_new_gradients() -> None:
    twins = Twins()
    twins.grads()
    twins.clip(1e-3)
    for params in (twins.params, twins.native_params):
        for param in params:
            param.grad = None  # the model's zero_grad, which the optimizer does not see
    twins.grads(2)
    twins.step()
    twins.assert_equal()


def test_some_gradients_replaced_between_clip_and_step() -> None:
    twins = Twins()
    twins.grads()
    twins.clip(0.1)
    twins.params[1].grad = torch.ones(5, 7, device=DEVICE)
    twins.native_params[1].grad = torch.ones(5, 7, device=DEVICE)
    twins.params[2].grad = twins.native_params[2].grad = None
    twins.step()
    assert twins.params[2] not in twins.ours.state
    twins.params, twins.native_params = twins.params[:2], twins.native_params[:2]
    twins.assert_equal()


def test_gradients_written_between_clip_and_step_are_refused() -> None:
    twins = Twins()
    twins.grads()
    twins.clip()
    before = snapshot(twins.ours, twins.params)
    with torch.no_grad():
        twins.params[1].grad.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \[5, 7\] was written between clip_grad_norm_ and step"):
        twins.ours.step()
    after = snapshot(twins.ours, twins.params)
    assert before.steps == after.steps == [None] * 3
    assert all(torch.equal(a, b) for a, b in zip(before.values["param"], after.values["param"], strict=True))
    with pytest.raises(
        RuntimeError, match=r"optimizer\.zero_grad\(\) to start over"
    ):  # still, also for who caught it
        twins.ours.step()
    twins.ours.zero_grad()
    twins.native.zero_grad()
    twins.grads(2)
    twins.clip()
    twins.step()
    twins.assert_equal()


def test_settling_first_allows_writing() -> None:
    twins = Twins()
    for number in range(3):
        twins.grads(number)
        twins.clip(0.2)
        twins.ours.settle_clip()
        for params in (twins.params, twins.native_params):
            for param in params:
                param.grad.add_(0.01)
        twins.step()
    twins.assert_equal()


def test_accumulating_after_a_clip_is_refused() -> None:
    twins = Twins()
    twins.grads()
    twins.clip()
    (twins.params[0] * 2).sum().backward()
    with pytest.raises(RuntimeError, match="Clip once, after the last backward"):
        twins.ours.clip_grad_norm_(0.5)


def test_lr_and_groups_may_change_between_clip_and_step() -> None:
    twins = Twins()
    for number in range(4):
        twins.grads(number)
        twins.clip()
        for optimizer in (twins.ours, twins.native):
            optimizer.param_groups[0].update(lr=1e-2 / (number + 1), weight_decay=0.1 * number)
            optimizer.param_groups[0]["betas"] = (0.8, 0.9) if number > 1 else (0.9, 0.95)
        twins.step()
    twins.assert_equal()


def test_hooks_and_closure_run_once() -> None:
    twins = Twins()
    seen: list[str] = []
    twins.ours.register_step_pre_hook(lambda *_: seen.append("pre"))
    twins.ours.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        twins.grads()
        return torch.tensor(3.0)

    assert twins.ours.step(closure) == 3.0
    twins.native.step()
    assert seen == ["pre", "post"]
    twins.assert_equal()


def test_a_state_restored_by_a_step_pre_hook() -> None:
    """State that lives on the host between steps: the hook brings it back, in other memory."""
    twins = Twins()

    def onload(optimizer: Any, *_: Any) -> None:
        for entry in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = entry[name].clone()

    twins.ours.register_step_pre_hook(onload)
    for number in range(3):
        twins.grads(number)
        twins.clip()
        twins.step()
    twins.assert_equal()


def poison(params: list[nn.Parameter], value: float) -> None:
    with torch.no_grad():
        params[1].grad[2, 3] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_propagate_is_torchs_way(value: float) -> None:
    twins = Twins()
    twins.grads()
    for params in (twins.params, twins.native_params):
        poison(params, value)
    ours = twins.ours.clip_grad_norm_(1.0)
    native = nn.utils.clip_grad_norm_(twins.native_params, 1.0)
    twins.step()
    assert not ours.isfinite() and torch.equal(ours.isnan(), native.isnan())
    for a, b in zip(twins.params, twins.native_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert twins.ours.nonfinite_parameter() == "layer.1.weight"


@pytest.mark.parametrize("clip", [True, False], ids=["clip", "step_alone"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_skip_leaves_everything_and_says_where(
    value: float, clip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    twins = Twins(nonfinite="skip")
    for number in range(4):
        twins.grads(number)
        if number == 2:
            before = snapshot(twins.ours, twins.params)
            poison(twins.params, value)
        if clip:
            twins.ours.clip_grad_norm_(0.5)
        twins.ours.step()
        if number == 2:
            after = snapshot(twins.ours, twins.params)
            assert after.steps == before.steps == [2.0] * 3
            for name, tensors in after.values.items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, before.values[name], strict=True))
    with caplog.at_level(logging.WARNING):
        twins.ours.skipped.poll(wait=True)
    assert twins.ours.skipped.count == 1 and "step skipped" in caplog.text and "layer.1.weight" in caplog.text
    assert snapshot(twins.ours, twins.params).steps == [3.0] * 3


@pytest.mark.parametrize("policy", ["raise", "argument"])
def test_raise_names_the_parameter_and_updates_nothing(policy: str) -> None:
    twins = Twins(nonfinite="raise" if policy == "raise" else "propagate")
    twins.grads()
    poison(twins.params, math.nan)
    before = [param.detach().clone() for param in twins.params]
    with pytest.raises(
        RuntimeError, match=r"non-finite \(nan\), first in layer\.1\.weight; nothing was updated"
    ):
        twins.ours.clip_grad_norm_(1.0, error_if_nonfinite=policy == "argument")
    assert all(torch.equal(a, b) for a, b in zip(before, twins.params, strict=True))


def test_an_unnamed_parameter_is_named_by_its_place() -> None:
    params = [nn.Parameter(torch.zeros(n, device=DEVICE)) for n in (2, 3, 4)]
    optimizer = FusedAdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-3)
    for param in params:
        param.grad = torch.full_like(param, math.inf if len(param) == 4 else 1.0)
    optimizer.clip_grad_norm_(1.0)
    assert optimizer.nonfinite_parameter() == "parameter 1 of group 1, shape [4]"


@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler_on_this_device(fused: bool | None) -> None:
    """K12, K23: an overflow skips the step, does not count it, and nothing is unscaled twice."""
    ends = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        param = nn.Parameter(torch.linspace(0.5, 1.5, 64, device=DEVICE))
        optimizer = kind([param], lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=2)
        for number in range(5):
            factor = math.inf if number == 2 else number + 1
            scaler.scale((param * factor).square().mean()).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(
                    [param], 0.1
                ) if kind is not FusedAdamW else optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append((param.detach(), float(optimizer.state[param]["step"]), scaler.get_scale()))
    assert ends[0][1:] == ends[1][1:] and ends[0][1] == 4.0
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-6, atol=1e-7)


def test_clip_before_unscale_as_torch() -> None:
    """A known mistake, and still the same result: the norm is that of the scaled gradients."""
    ends = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        param = nn.Parameter(torch.linspace(0.5, 1.5, 64, device=DEVICE))
        optimizer = kind([param], lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        scaler.scale(param.square().sum()).backward()
        if kind is FusedAdamW:
            norm = optimizer.clip_grad_norm_(1.0)
        else:
            norm = nn.utils.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
        ends.append((norm, param.detach(), optimizer.state[param]["exp_avg"]))
    for ours, native in zip(*ends, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-6, atol=1e-8)


def test_a_compiled_training_step_calls_the_kernels() -> None:
    """Dynamo breaks the graph at clip and step, which stay as they are; on a GPU Inductor is tried, too."""
    ends = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to(DEVICE)
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)

        def train(x: Tensor, model: nn.Module = model, optimizer: FusedAdamW = optimizer) -> Tensor:
            model(x).square().mean().backward()
            norm = optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        run = torch.compile(train, backend="eager") if compiled else train
        before = CALLS["triton"]
        norms = [run(torch.full((3, 8), float(number), device=DEVICE)) for number in range(1, 5)]
        assert CALLS["triton"] == before + 4
        ends.append([*norms, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_no_gradients_at_all() -> None:
    twins = Twins()
    assert twins.ours.clip_grad_norm_(1.0) == 0.0
    twins.ours.step()
    assert not twins.ours.state
