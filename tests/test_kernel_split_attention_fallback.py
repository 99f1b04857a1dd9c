"""What `split_attention` says no to, and what happens when a kernel does not compile."""

import logging

import pytest
import torch

from somaspeed_patch.kernels import split_attention as module
from somaspeed_patch.kernels.split_attention import refusal, split_attention
from somaspeed_patch.kernels.split_attention_table import Config, lookup, override, select
from somaspeed_patch.testing import grads_of

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on cpu the kernels run in Triton's interpreter


def _ours(q, k_a, v_a, k_b, v_b):
    return split_attention(q, k_a, v_a, k_b, v_b, len_a=_lengths(), impl="triton")


def _lengths():
    return torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)


def _problem():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 1, n, 16, generator=generator).to(DEVICE) for n in (9, 20, 20, 3, 3)]


def _shaped(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": (2, 8, 16)}, r"q must be \[B, H, R, D\], but is \[2, 8, 16\]; add the missing axes"),
        ({"k_a": (2, 8, 5, 16)}, r"k_a must be \[2, 1, N, 16\] to fit q, but is \[2, 8, 5, 16\]; fold query"),
        ({"v_a": (2, 1, 4, 16)}, r"v_a must be \[2, 1, 5, 16\] like k_a, but is \[2, 1, 4, 16\]"),
        ({"k_b": (2, 1, 3, 16)}, "k_b and v_b come together, but one is None; pass both or neither"),
        ({"k_b": (2, 1, 3, 8), "v_b": (2, 1, 3, 8)}, r"k_b must be \[2, 1, N, 16\] to fit q"),
        ({"len_a": (3,)}, r"len_a must be \[2\], one a sample, but is \[3\]"),
        (
            {"mask_a": (2, 5)},
            r"mask_a must be bool \[2, 5\], a flag for each key of k_a, but is torch.float32",
        ),
    ],
    ids=str,
)
def test_a_wrong_shape_is_named(changed, message):
    shapes = {"q": (2, 1, 8, 16), "k_a": (2, 1, 5, 16), "v_a": (2, 1, 5, 16), **changed}
    with pytest.raises(ValueError, match=f"^split_attention: {message}"):
        split_attention(**{name: _shaped(*shape) for name, shape in shapes.items()})


def test_a_wrong_impl_is_named():
    x = _shaped(1, 1, 1, 16)
    with pytest.raises(ValueError, match="impl must be 'triton', 'reference' or None, but is 'cuda'"):
        split_attention(x, x, x, impl="cuda")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: {"q": _shaped(1, 1, 4, 8)}, "D is 8, the kernel takes 16..256"),
        (lambda: {"q": _shaped(1, 1, 4, 512)}, "D is 512"),
        (lambda: {"q": _shaped(1, 1, 4, 256, dtype=torch.float64)}, "D is 256 in fp64"),
        (lambda: {"q": _shaped(1, 1, 4, 16).int()}, "q is torch.int32, the kernel takes bf16"),
        (lambda: {"q": _shaped(1, 1, 0, 16)}, r"q is empty, \[1, 1, 0, 16\]"),
        (lambda: {"scale": -1.0}, "scale is -1.0, the kernel takes positive numbers"),
        (lambda: {"k_a": _shaped(1, 1, 3, 16).half()}, "k_a is torch.float16, q torch.float32; cast to one"),
        (
            lambda: {"v_a": _shaped(1, 1, 16, 3).transpose(2, 3)},
            "v_a's last stride is 3, the kernel takes 1",
        ),
        (
            lambda: {"v_a": _shaped(1, 1, 3, 16).as_strided((1, 1, 1, 16), (0, 0, 2**23, 1))},
            "rows are 8388608",
        ),
        (lambda: {"len_a": _shaped(1).long()}, "len_a is torch.int64 with stride 1, the kernel reads cont"),
        (lambda: {"mask_a": _shaped(1, 6).bool()[:, ::2]}, "mask_a's last stride is 2, the kernel takes 1"),
        (lambda: {"k_a": _Sub(_shaped(1, 1, 3, 16))}, "k_a is a _Sub, the kernel takes plain tensors"),
    ],
)
def test_a_refusal_says_why(make, reason, monkeypatch):
    monkeypatch.setattr(module, "_refuse_process", lambda q, interpret: None)
    arguments = {"q": _shaped(1, 1, 4, 16), "k_a": _shaped(1, 1, 3, 16), "v_a": _shaped(1, 1, 3, 16)}
    arguments = {**arguments, **make()}
    assert reason.replace("\\", "") in refusal(**arguments)


class _Sub(torch.Tensor):
    pass


def test_plain_cpu_tensors_take_the_reference_and_it_is_counted():
    x, before = torch.zeros(1, 1, 2, 16), dict(module.CALLS)
    split_attention(x, x, x)
    assert refusal(x, x, x) == module.last_refusal == "q is on cpu, the kernel runs on cuda"
    assert {**before, "reference": before["reference"] + 1} == module.CALLS
    split_attention(*[x.to(DEVICE)] * 3, impl="triton")
    assert module.CALLS["triton"] == before["triton"] + 1


def test_without_triton_only_the_reference_is_left(monkeypatch):
    monkeypatch.setattr(module, "_launch", None)
    monkeypatch.setattr(module, "_NO_TRITON", "triton cannot be imported (no)", raising=False)
    x = _shaped(1, 1, 2, 16)
    assert split_attention(x, x, x).shape == x.shape
    with pytest.raises(ValueError, match=r"impl='triton' cannot serve: triton cannot be imported \(no\)"):
        split_attention(x, x, x, impl="triton")


@pytest.fixture
def fresh(monkeypatch):
    """As at the start of a process: no kernel has run, none has failed."""
    monkeypatch.setattr(module, "KERNEL_ERROR", None)
    monkeypatch.setattr(module, "_launched", set())


@pytest.mark.parametrize("half", ["split_attention_fwd", "split_attention_bwd"])
def test_a_kernel_that_does_not_compile_is_replaced_for_good(half, fresh, monkeypatch, caplog):
    data = _problem()
    expected = grads_of(_ours, data)
    monkeypatch.setattr(module, "_launched", set())

    def broken(*_):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(module._launch, half, broken)
    with caplog.at_level(logging.WARNING):
        for ours, native in zip(grads_of(_ours, data), expected, strict=True):
            torch.testing.assert_close(ours, native)
        split_attention(*data, len_a=_lengths())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert module.KERNEL_ERROR == "RuntimeError: PassManager::run failed"
    assert "a kernel failed earlier in this process (RuntimeError: Pass" in refusal(*data)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: device-side assert triggered")],
    ids=["out of memory", "assert"],
)
def test_errors_of_the_device_are_not_swallowed(error, fresh, monkeypatch):
    def broken(*_):
        raise error

    monkeypatch.setattr(module._launch, "split_attention_fwd", broken)
    data = _problem()
    with pytest.raises(type(error), match=str(error)):
        _ours(*data)
    assert module.KERNEL_ERROR is None


def test_an_error_after_the_first_launch_is_not_swallowed(fresh, monkeypatch):
    data = _problem()
    _ours(*data)

    def broken(*_):
        raise RuntimeError("later")

    monkeypatch.setattr(module._launch, "split_attention_fwd", broken)
    with pytest.raises(RuntimeError, match="later"):
        _ours(*data)


def test_the_table_serves_every_head_size_and_unknown_architectures():
    for D in (16, 48, 64, 72, 96, 128, 200, 256):
        assert lookup(90, D, 2).fwd.block_r == 128
        assert lookup(75, D, 2) == lookup(90, D, 4) == lookup(90, D, 8)
    with (
        pytest.raises(ValueError, match="override takes fwd, dq and dkv, but got"),
        override(bwd=Config(1, 1, 1, 1)),
    ):
        pass
    with override(fwd=Config(1, 2, 3, 4)):
        assert select("fwd", _shaped(1, 1, 1, 16), False) == Config(1, 2, 3, 4)
