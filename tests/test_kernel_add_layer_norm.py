"""Residual add and layer norm in one kernel: values, rounding order, edges, errors."""

import pytest
import torch

from somaspeed_patch.kernels import add_layer_norm as module
from somaspeed_patch.kernels.add_layer_norm import add_layer_norm, add_layer_norm_ref, refusal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bf16 where a GPU rounds to nearest.
LOW = [torch.bfloat16] if DEVICE == "cuda" else []
SHAPES = [(1, 1), (3, 7), (2, 5, 72), (4, 1152), (129, 33)]


def inputs(shape, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x, delta = (torch.randn(shape, generator=rng) * 3 + 40 for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=rng) for _ in range(2))
    return [tensor.to(DEVICE, dtype) for tensor in (x, delta, weight, bias)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, *LOW], ids=str)
def test_values_are_within_one_rounding_of_fp64(shape, dtype):
    """The mean is 13 times the spread: a variance from squares instead of centred values would show."""
    x, delta, weight, bias = inputs(shape, dtype)
    total, normed = add_layer_norm(x, delta, weight, bias, 1e-6)
    assert torch.equal(total, x + delta)
    truth = add_layer_norm_ref(total.double(), None, weight.double(), bias.double(), 1e-6)[1]
    native = add_layer_norm_ref(total, None, weight, bias, 1e-6)[1]
    # fp64's native is the truth itself; centring values of 80 with a spread of 4 costs about 20 eps
    eps = torch.finfo(dtype).eps * (50 if dtype == torch.float64 else 1)
    allowed = 2 * (native - truth).abs().max() + eps * truth.abs().max()
    assert normed.dtype == dtype and (normed - truth).abs().max() <= allowed


def test_without_delta_the_sum_is_x_itself():
    x, _, weight, bias = inputs((5, 40), torch.float32)
    total, normed = add_layer_norm(x, None, weight, bias, 1e-5)
    assert total is x
    torch.testing.assert_close(normed, add_layer_norm_ref(x, None, weight, bias, 1e-5)[1])


def test_norm_weights_of_another_dtype():
    x, delta, weight, bias = inputs((6, 24), torch.float16)
    _, normed = add_layer_norm(x, delta, weight.float(), bias.float(), 1e-6)
    expected = add_layer_norm_ref(x, delta, weight, bias, 1e-6)[1]
    assert normed.dtype == torch.float16
    torch.testing.assert_close(normed, expected)


def test_what_the_kernel_does_not_take_goes_to_pytorch():
    x, delta, weight, bias = inputs((8, 12), torch.float32)
    across = x.T.contiguous().T
    assert refusal(across, delta) == "empty or not contiguous"
    torch.testing.assert_close(
        add_layer_norm(across, delta, weight, bias, 1e-6)[1], add_layer_norm(x, delta, weight, bias, 1e-6)[1]
    )
    assert refusal(x[:0], None) == "empty or not contiguous"
    assert add_layer_norm(x[:0], None, weight, bias, 1e-6)[1].shape == (0, 12)
    assert "columns" in refusal(torch.empty(1, module.WIDEST + 1, device=DEVICE), None)


def test_two_runs_give_the_same_bits():
    arguments = inputs((33, 130), torch.float32)
    first, second = (add_layer_norm(*arguments, 1e-6)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_errors_say_what_was_expected():
    x, delta, weight, bias = inputs((4, 6), torch.float32)
    with pytest.raises(ValueError, match=r"delta must be torch.float32 \[4, 6\], as x, but is torch.float64"):
        add_layer_norm(x, delta.double(), weight, bias, 1e-6)
    with pytest.raises(ValueError, match=r"bias must be \[6\], x's last axis, but is \[5\]"):
        add_layer_norm(x, delta, weight, bias[:5], 1e-6)
