"""Residual add and layer norm in one pass, forward only: sum = x + delta, normed = norm(sum) * weight + bias.

A row is read once and stays in registers for mean, variance and output, so the traffic is that of two inputs
and two outputs. Inductor walks the row with Welford updates instead, because the 1,152 columns of
SigLIP are above its limit for rows held whole.

Shapes: N = rows, W = columns, BLOCK_W the next power of two; one program owns BLOCK_N rows.
Numerics: the sum is rounded to x's dtype and normed as rounded, as two separate operations do; statistics in
fp32 (fp64 for fp64), the variance from centred values; one rounding at the store.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from somaspeed_patch.kernels.device import INTERPRETED, current

WIDEST = 16384  # columns; more would not stay in registers


def add_layer_norm_ref(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` by PyTorch's own operations."""
    total = x if delta is None else x + delta
    exact = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(total.to(exact), weight.shape, weight.to(exact), bias.to(exact), eps)
    return total, normed.to(x.dtype)


@triton.jit
def _add_layer_norm_kernel(
    x, delta, weight, bias, total, normed, N, eps: tl.float64,
    HAS_DELTA: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    mask = (rows < N)[:, None] & (cols < W)[None, :]
    at = rows.to(tl.int64)[:, None] * W + cols[None, :]
    b_x = tl.load(x + at, mask=mask, other=0.0)
    if HAS_DELTA:
        b_x = (b_x.to(ACC) + tl.load(delta + at, mask=mask, other=0.0).to(ACC)).to(x.dtype.element_ty)
        tl.store(total + at, b_x, mask=mask)
    b_x = b_x.to(ACC)
    b_centred = tl.where(mask, b_x - (tl.sum(b_x, 1) / W)[:, None], 0.0)
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_centred * b_centred, 1) / W + tl.full([], eps, ACC))
    b_weight = tl.load(weight + cols, mask=cols < W, other=0.0).to(ACC)
    b_bias = tl.load(bias + cols, mask=cols < W, other=0.0).to(ACC)
    b_out = b_centred * b_rstd[:, None] * b_weight[None, :] + b_bias[None, :]
    tl.store(normed + at, b_out.to(normed.dtype.element_ty), mask=mask)


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add a residual branch and norm the sum, without gradient.

    Args:
        x: [..., W], fp16, bf16, fp32 or fp64.
        delta: like x; None adds nothing.
        weight, bias: [W].
        eps: added to the variance.
    Returns: the sum (x itself without delta) and its layer norm, both like x.
    Raises: ValueError: delta is not like x, or weight and bias do not have its last axis.
    """
    _check(x, delta, weight, bias)
    if refusal(x, delta):
        return add_layer_norm_ref(x, delta, weight, bias, eps)
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    normed, block_w = torch.empty_like(x), triton.next_power_of_2(width)
    block_n = max(1, 2048 // block_w)
    with current(x.device):
        _add_layer_norm_kernel[(triton.cdiv(rows, block_n),)](
            x, x if delta is None else delta, weight, bias, total, normed, rows, eps,
            HAS_DELTA=delta is not None, W=width, BLOCK_N=block_n, BLOCK_W=block_w,
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=4 if block_w <= 2048 else 8,
        )  # fmt: skip
    return total, normed


def refusal(x: Tensor, delta: Tensor | None) -> str | None:
    """Why PyTorch's own operations have to run, or None."""
    if not (x.is_cuda or INTERPRETED):
        return "not on a GPU"
    if x.shape[-1] > WIDEST:
        return f"rows of more than {WIDEST} columns"
    if x.numel() == 0 or not x.is_contiguous() or (delta is not None and not delta.is_contiguous()):
        return "empty or not contiguous"
    return None


def _check(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor) -> None:
    if delta is not None and (delta.shape, delta.dtype, delta.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"add_layer_norm: delta must be {x.dtype} {list(x.shape)}, as x, but is {delta.dtype} "
            f"{list(delta.shape)} on {delta.device}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector.shape != x.shape[-1:]:
            raise ValueError(
                f"add_layer_norm: {name} must be [{x.shape[-1]}], x's last axis, but is {list(vector.shape)}"
            )
