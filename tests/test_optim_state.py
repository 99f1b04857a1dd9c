"""FusedAdamW's state: torch's own, in checkpoints both ways, and followed when somebody else changes it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.optim.fused_adamw import CALLS
from somaspeed_patch.testing_adamw import HYPER, Record, parameters, run, same_bits, torch_clip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(33,), (40, 31), (), (0,), (7, 5)]
FP32, BF16 = torch.float32, torch.bfloat16


def make(kind: Any, dtypes: Any = (FP32, BF16), **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = parameters(dtypes, DEVICE, shapes=SHAPES)
    return params, kind(params, **{**HYPER, **options})


def go(params: list[nn.Parameter], optimizer: Any, num_steps: int, first: int = 0) -> Record:
    ours = isinstance(optimizer, FusedAdamW)
    clip = optimizer.clip_grad_norm_ if ours else torch_clip(params)
    return run(optimizer, clip, params, num_steps=num_steps, first=first)


def layout(saved: dict[str, Any]) -> Any:
    state = {
        key: {n: (v.dtype, v.shape, v.device, v.untyped_storage().nbytes()) for n, v in entry.items()}
        for key, entry in saved["state"].items()
    }
    return state, [sorted(group) for group in saved["param_groups"]]


@pytest.mark.parametrize("fused", [None, True])
def test_the_state_dict_is_torchs(fused: bool | None) -> None:
    saved = []
    for kind in (torch.optim.AdamW, FusedAdamW):
        params, optimizer = make(kind, fused=fused)
        go(params, optimizer, 2, first=1)  # steps whose gradients torch's fused kernel takes
        saved.append(optimizer.state_dict())
    assert layout(saved[0]) == layout(saved[1])
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    buffer = io.BytesIO()
    torch.save(saved[1], buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True, map_location="cpu")
    assert float(loaded["state"][0]["step"]) == 2.0 and loaded["state"][0]["step"].shape == ()


@pytest.mark.parametrize("map_location", ["cpu", DEVICE])
@pytest.mark.parametrize("writer", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("reader", [torch.optim.AdamW, FusedAdamW])
def test_resume_in_either_class_gives_the_next_five_updates(
    writer: Any, reader: Any, map_location: str
) -> None:
    params, optimizer = make(writer)
    go(params, optimizer, 3)
    weights = [param.detach().clone() for param in params]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)

    def resumed(kind: Any, saved: Any) -> Record:
        fresh, other = make(kind)
        with torch.no_grad():
            for param, value in zip(fresh, weights, strict=True):
                param.copy_(value)
        other.load_state_dict(saved)
        return go(fresh, other, 5, first=3)

    buffer.seek(0)
    loaded = resumed(reader, torch.load(buffer, weights_only=True, map_location=map_location))
    # the reader's own continuation of the very same state, never written to a file
    direct = resumed(reader, copy.deepcopy(optimizer.state_dict()))
    assert same_bits(loaded, direct) and loaded.steps == [8.0, 7.0, 8.0, 8.0, 6.0]


def test_a_resumed_run_equals_the_uninterrupted_one() -> None:
    params, optimizer = make(FusedAdamW)
    twins, other = make(FusedAdamW)
    go(params, optimizer, 4), go(twins, other, 4)
    fresh, resumed = make(FusedAdamW)
    for param, value in zip(fresh, twins, strict=True):
        param.data.copy_(value)
    resumed.load_state_dict(other.state_dict())
    assert same_bits(go(params, optimizer, 4, first=4), go(fresh, resumed, 4, first=4))


def test_wide_moments_and_master_weights_keep_their_bits() -> None:
    options = {"moments_dtype": FP32, "master_weights": True}
    params, optimizer = make(FusedAdamW, [BF16], **options)
    go(params, optimizer, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {entry["master"].dtype for entry in saved["state"].values()} == {FP32}
    fresh, resumed = make(FusedAdamW, [BF16], **options)
    for param, value in zip(fresh, params, strict=True):
        param.data.copy_(value)
    resumed.load_state_dict(saved)
    assert same_bits(go(params, optimizer, 4, first=4), go(fresh, resumed, 4, first=4))
    native_params, native = make(torch.optim.AdamW, [BF16])
    native.load_state_dict(saved)  # stock torch rounds the moments and ignores the master
    assert native.state[native_params[0]]["exp_avg"].dtype == BF16
    go(native_params, native, 1, first=4)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike(how: str) -> None:
    params, optimizer = make(FusedAdamW, stochastic_rounding=True)
    go(params, optimizer, 3)
    both = {"params": params, "optimizer": optimizer}
    twin = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert twin["optimizer"].options == optimizer.options
    first = go(params, optimizer, 3, first=3)
    assert same_bits(first, go(twin["params"], twin["optimizer"], 3, first=3))


def replace_a_moment(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[1]]["exp_avg"] = torch.zeros_like(params[1])


def zero_a_moment(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[1]]["exp_avg_sq"].zero_()


def reset_a_step(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(0.0)
    optimizer.state[params[1]]["step"].fill_(7)


def forget_a_parameter(params: list[nn.Parameter], optimizer: Any) -> None:
    del optimizer.state[params[1]]


def forget_all(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state.clear()


def replace_an_entry(params: list[nn.Parameter], optimizer: Any) -> None:
    entry = optimizer.state[params[1]]
    optimizer.state[params[1]] = {name: value.clone() for name, value in entry.items()}


def move_the_weights(params: list[nn.Parameter], optimizer: Any) -> None:
    for param in params:
        param.data = param.data.clone()


def swap_all_moments_data(params: list[nn.Parameter], optimizer: Any) -> None:
    for entry in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name].data = entry[name].data.clone()


def exchange_parameters(params: list[nn.Parameter], optimizer: Any) -> None:
    """A7: what accelerate does at prepare()."""
    fresh = [nn.Parameter(param.detach().clone()) for param in params]
    states = [optimizer.state.pop(param) for param in params]
    optimizer.param_groups[0]["params"][:] = fresh
    optimizer.state.update(zip(fresh, states, strict=True))
    params[:] = fresh


def add_a_group(params: list[nn.Parameter], optimizer: Any) -> None:
    torch.manual_seed(5)
    new = nn.Parameter(torch.randn(12, device=DEVICE))
    optimizer.add_param_group({"params": [new], "lr": 1e-2, "betas": (0.5, 0.6)})
    params.append(new)


def other_layout(params: list[nn.Parameter], optimizer: Any) -> None:
    """A checkpoint through safetensors comes back contiguous, whatever order the parameter has."""
    params[1].data = params[1].data.t().contiguous().t()


@pytest.mark.parametrize(
    "change",
    [
        replace_a_moment,
        zero_a_moment,
        reset_a_step,
        forget_a_parameter,
        forget_all,
        replace_an_entry,
        move_the_weights,
        swap_all_moments_data,
        exchange_parameters,
        add_a_group,
        other_layout,
    ],
)
def test_changes_from_outside_are_followed(change: Any) -> None:
    """`change(params, optimizer)` after three steps means the same to both classes, whatever it moved."""
    ends = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        params, optimizer = make(kind, [FP32])
        go(params, optimizer, 3)
        before = CALLS["triton"]
        change(params, optimizer)
        ends.append(go(params, optimizer, 3, first=3))
        assert CALLS["triton"] == before + (3 if kind is FusedAdamW else 0)
    assert ends[0].steps == ends[1].steps
    for name, tensors in ends[0].values.items():
        for ours, native in zip(tensors, ends[1].values[name], strict=True):
            torch.testing.assert_close(ours, native, rtol=3e-6, atol=1e-7)


def test_weights_written_in_place_raise_in_a_later_backward() -> None:
    """The kernels' writes count as in-place writes: autograd notices a graph that needs the old weights."""
    param = nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = FusedAdamW([param], lr=0.1)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


REFUSED = {
    "amsgrad": ({"amsgrad": True}, FP32),
    "fp64": ({}, torch.float64),
    "complex": ({}, torch.complex64),
    "tensor betas": ({"betas": (torch.tensor(0.9), torch.tensor(0.95)), "capturable": True}, FP32),
}


@pytest.mark.parametrize("options, dtype", REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_cannot_do_torch_does(options: dict[str, Any], dtype: torch.dtype) -> None:
    if options.get("capturable") and DEVICE == "cpu":
        options = {**options, "capturable": False, "foreach": False}
    ends = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        params = [nn.Parameter(torch.linspace(-1, 1, 12, device=DEVICE).to(dtype)) for _ in range(2)]
        optimizer = kind(params, **{"lr": 1e-2, **options})
        for number in range(3):
            for param in params:
                param.grad = param.detach() * (number + 1)
            norm = optimizer.clip_grad_norm_(0.5) if kind is FusedAdamW else torch_clip(params)(0.5)
            optimizer.step()
        ends.append((norm, *params))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(*ends, strict=True))
    params = [nn.Parameter(torch.ones(2, device=DEVICE).to(dtype))]
    assert FusedAdamW(params, **{"lr": 1e-2, **options}).native_reason() is not None


def test_differentiable_is_left_to_torch() -> None:
    optimizer = FusedAdamW([nn.Parameter(torch.ones(2, device=DEVICE))], differentiable=True)
    assert optimizer.native_reason() == "group 0 has differentiable=True"


def test_the_cpu_path_reads_gradients_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused CPU kernel does not: the gradients here are transposed in memory every third step."""
    from somaspeed_patch.kernels import adamw

    monkeypatch.setattr(adamw, "INTERPRETED", False)
    ends = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        params = parameters([FP32], "cpu", shapes=[*SHAPES, (8, 3, 4, 4)])
        ends.append(go(params, kind(params, **HYPER), 8))
    assert CALLS["parameters on cpu"] >= 8
    for name, tensors in ends[0].values.items():
        for ours, native in zip(tensors, ends[1].values[name], strict=True):
            torch.testing.assert_close(ours, native, rtol=3e-6, atol=1e-7)


def test_options_that_need_the_kernels_are_refused_where_there_are_none() -> None:
    param = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = FusedAdamW([param], amsgrad=True, master_weights=True)
    param.grad = torch.ones_like(param)
    with pytest.raises(
        RuntimeError, match=r"master_weights need the kernels, which cannot serve group 0 has amsgrad"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"nonfinite": "ignore"}, "nonfinite must be one of"),
        ({"moments_dtype": torch.float64}, "moments_dtype must be None or one of"),
        ({"master_weights": True, "stochastic_rounding": True}, "choose one"),
        ({"grad_divisor": 0.0}, "grad_divisor must be positive"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FusedAdamW([nn.Parameter(torch.ones(2))], **options)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 3, sparse=True, device=DEVICE)
    optimizer = FusedAdamW(table.parameters())
    table(torch.tensor([1, 2], device=DEVICE)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        optimizer.step()


def test_a_kernel_that_cannot_be_built_leaves_the_step_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """K19: no C compiler, for example; also when only the last of the four kernels fails, after a clip."""
    from somaspeed_patch.kernels import adamw

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("no C compiler")

    for name in ("tile_squares", "scalars", "update"):
        params, optimizer = make(FusedAdamW, [FP32])
        native_params, native = make(torch.optim.AdamW, [FP32])
        with monkeypatch.context() as patch:
            patch.setattr(adamw, name, broken)
            ours = go(params, optimizer, 3)
        expected = go(native_params, native, 3)
        assert "no C compiler" in str(optimizer.native_reason())
        assert ours.steps == expected.steps and ours.norms == pytest.approx(expected.norms, rel=1e-6)
        for a, b in zip(ours.values["param"], expected.values["param"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
