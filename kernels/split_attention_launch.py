"""Launchers of the split-attention kernels: allocate, choose the tiles, launch.

Shapes: those of `split_attention`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from somaspeed_patch.kernels.device import INTERPRETED as INTERPRETED
from somaspeed_patch.kernels.device import current
from somaspeed_patch.kernels.split_attention_kernels import (
    _split_attention_dkv_kernel,
    _split_attention_dq_kernel,
    _split_attention_fwd_kernel,
)
from somaspeed_patch.kernels.split_attention_reference import LOG2_E, statistics_dtype
from somaspeed_patch.kernels.split_attention_table import Config, select

_TRITON_DTYPE = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def split_attention_fwd(
    q: Tensor,
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None,
    v_b: Tensor | None,
    len_a: Tensor | None,
    mask_a: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q [B, H, R, D], k_a, v_a [B, H, NA, D], k_b, v_b [B, H, NB, D] -> o like q, lse [B, H, R] base 2."""
    B, H, R, D = q.shape
    o, lse = torch.empty_like(q), q.new_empty((B, H, R), dtype=statistics_dtype(q.dtype))
    q = _unit_last_stride(q)
    pointers, strides, sizes = _streams(k_a, v_a, k_b, v_b, len_a, mask_a, stand_in=lse)
    config = select("fwd", q, mask_a is not None)
    with current(q.device):
        _split_attention_fwd_kernel[(triton.cdiv(R, config.block_r) * B * H,)](
            q, *pointers, o, lse, *_strides(q), *strides, *_strides(o),
            scale=scale * LOG2_E, H=H, R=R, **sizes, **_meta(config, q.dtype, D),
        )  # fmt: skip
    return o, lse


def split_attention_bwd(
    do: Tensor,
    q: Tensor,
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None,
    v_b: Tensor | None,
    len_a: Tensor | None,
    mask_a: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    need_a: bool,
    need_b: bool,
) -> list[Tensor]:
    """do, o [B, H, R, D], lse [B, H, R] -> [dq, dk_a, dv_a if need_a, dk_b, dv_b if need_b]."""
    B, H, R, D = q.shape
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    q, do, o = _unit_last_stride(q), _unit_last_stride(do), _unit_last_stride(o)
    pointers, strides, sizes = _streams(k_a, v_a, k_b, v_b, len_a, mask_a, stand_in=lse)
    config = select("dq", q, mask_a is not None)
    with current(q.device):
        _split_attention_dq_kernel[(triton.cdiv(R, config.block_r) * B * H,)](
            q, *pointers, o, do, lse, delta, dq,
            *_strides(q), *strides, *_strides(o), *_strides(do), *_strides(dq),
            scale=scale * LOG2_E, scale_dq=scale, H=H, R=R, **sizes, **_meta(config, q.dtype, D),
        )  # fmt: skip
        grads = [dq]
        if need_a:
            grads += _dkv(q, k_a, v_a, len_a, mask_a, do, lse, delta, scale)
        if need_b and k_b is not None and v_b is not None:
            grads += _dkv(q, k_b, v_b, None, None, do, lse, delta, scale)
    return grads


def _dkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
) -> list[Tensor]:
    """q, do [B, H, R, D], k, v [B, H, N, D], length [B], mask [B, N], lse, delta [B, H, R] -> [dk, dv]."""
    (B, H, R, D), N = q.shape, k.shape[2]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    k, v = _unit_last_stride(k), _unit_last_stride(v)
    config = select("dkv", q, mask is not None)
    if N > 0:  # a grid of no programs is a launch error
        _split_attention_dkv_kernel[(triton.cdiv(N, config.block_n) * B * H,)](
            q, k, v, _or(length, lse), _bytes(mask, lse), do, lse, delta, dk, dv,
            *_strides(q), *_strides(k), *_strides(v), 0 if mask is None else mask.stride(0), *_strides(do),
            *_strides(dk), *_strides(dv),
            scale=scale * LOG2_E, scale_dk=scale, H=H, R=R, N=N,
            HAS_LEN=length is not None, HAS_MASK=mask is not None, **_meta(config, q.dtype, D),
        )  # fmt: skip
    return [dk, dv]


def _streams(
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None,
    v_b: Tensor | None,
    len_a: Tensor | None,
    mask_a: Tensor | None,
    stand_in: Tensor,
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """What the row kernels are told of both streams: pointers, strides, sizes and switches."""
    sizes = {"NA": k_a.shape[2], "NB": 0 if k_b is None else k_b.shape[2]}
    switches = {"HAS_LEN": len_a is not None, "HAS_MASK": mask_a is not None, "HAS_B": k_b is not None}
    k_a, v_a = _unit_last_stride(k_a), _unit_last_stride(v_a)
    k_b, v_b = _unit_last_stride(_or(k_b, k_a)), _unit_last_stride(_or(v_b, v_a))
    pointers = (k_a, v_a, _or(len_a, stand_in), _bytes(mask_a, stand_in), k_b, v_b)
    mask_stride = 0 if mask_a is None else mask_a.stride(0)
    strides = (*_strides(k_a), *_strides(v_a), mask_stride, *_strides(k_b), *_strides(v_b))
    return pointers, strides, {**sizes, **switches}


def _meta(config: Config, dtype: torch.dtype, D: int) -> dict[str, Any]:
    """The compile-time arguments that all three kernels share."""
    emulated = INTERPRETED and dtype == torch.bfloat16
    return {
        "D": D,
        "BLOCK_R": config.block_r,
        "BLOCK_N": config.block_n,
        "BLOCK_D": triton.next_power_of_2(D),
        "DT": tl.float32 if emulated else _TRITON_DTYPE[dtype],
        "ACC": _TRITON_DTYPE[statistics_dtype(dtype)],
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of a [B, H, N, D] tensor, without the last, which is one."""
    return x.stride()[:3]


def _unit_last_stride(x: Tensor) -> Tensor:
    """Upstream gradients come expanded from a sum, or permuted; for the inputs refusal() makes it a no-op."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _or(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel argument that is switched off still needs a pointer."""
    return stand_in if x is None else x


def _bytes(mask: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if mask is None else mask.view(torch.uint8)
