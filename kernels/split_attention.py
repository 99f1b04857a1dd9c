"""Attention of query rows that share a key/value head, over a frozen and a trainable stream of keys.

`o[r] = sum_n p[r, n] v[n]` with `p[r] = softmax(scale * q[r] . k)` over the valid keys of stream A, then B.
Queries that share a head are rows of one problem: pi0.5 has H = 1 and R = tokens * 8 (row = token * 8 + head,
a view of q_proj's output), MolmoAct2's context attention R = chunk steps * flow timesteps. Nothing is
repeated, concatenated or transposed in memory, and nothing of size R x N is stored.

Shapes: B = samples, H = key/value heads, R = query rows of one head, D = head size, NA = keys of stream A
(frozen; a sample's first `len_a`, or those where `mask_a`), NB = keys of stream B (trainable, all valid).
Numerics: products in the inputs' dtype with fp32 sums, fp32 softmax (fp64 for fp64), no atomics: two runs
give the same bits. A row with no valid key gives o = 0 and zero gradients (native attention: an average, or
NaN).
Cost: forward 4 B H R (NA + NB) D FLOPs, backward 6 B H R (NA + NB) D, and 4 B H R N D for a stream of N keys
that needs gradients: the frozen stream's two products are never done. Saves the inputs, o, and lse (B H R
numbers, base 2).
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from somaspeed_patch.kernels.split_attention_reference import (
    reference_bwd,
    reference_fwd,
    split_attention_ref,
    statistics_dtype,
)
from somaspeed_patch.kernels.split_attention_table import select

try:
    from somaspeed_patch.kernels import split_attention_launch as _launch
except ImportError as error:  # torch for CPU or Windows comes without triton
    _launch = None  # type: ignore[assignment]
    _NO_TRITON = f"triton cannot be imported ({error})"

__all__ = ["CALLS", "KERNEL_ERROR", "last_refusal", "refusal", "split_attention", "split_attention_ref"]

CALLS = {
    "triton": 0,
    "reference": 0,
}  # forward calls that ran, for the report; compiled regions count as they run
KERNEL_ERROR: str | None = (
    None  # set once when a kernel does not compile or launch; the reference serves from then on
)
last_refusal: str | None = None  # why the last eager call that took the reference did so

_MAX_ROW_STRIDE = 2**23  # in-tile offsets are int32: 128 rows * 2**23 elements stay below 2**31
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INPUTS = "Tensor q, Tensor k_a, Tensor v_a, Tensor? k_b, Tensor? v_b, Tensor? len_a, Tensor? mask_a"
_launched: set[tuple[Any, ...]] = set()
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def _forward(q, k_a, v_a, k_b, v_b, len_a, mask_a, scale) -> tuple[Tensor, Tensor]:
    """q [B, H, R, D], keys and values [B, H, N, D] -> o [B, H, R, D] laid out like q, lse [B, H, R]."""
    args = (q, k_a, v_a, k_b, v_b, len_a, mask_a, scale)
    if _kernel_serves(q):
        result = _or_none(_key("fwd", args), lambda: _launch.split_attention_fwd(*args))
        if result is not None:
            CALLS["triton"] += 1
            return result
    CALLS["reference"] += 1
    return reference_fwd(*args)


def _backward(do, q, k_a, v_a, k_b, v_b, len_a, mask_a, o, lse, scale, need_a, need_b) -> list[Tensor]:
    """do, o [B, H, R, D], lse [B, H, R] -> [dq, dk_a, dv_a if need_a, dk_b, dv_b if need_b]."""
    args = (do, q, k_a, v_a, k_b, v_b, len_a, mask_a, o, lse, scale, need_a, need_b)
    if _kernel_serves(q):
        key = (*_key("dq", args[1:8]), need_a, need_b)
        result = _or_none(key, lambda: _launch.split_attention_bwd(*args))
        if result is not None:
            return result
    return reference_bwd(*args)


def _kernel_serves(q: Tensor) -> bool:
    """Inside the op: refusal() said yes before, so only what may have changed since is asked."""
    return _launch is not None and KERNEL_ERROR is None and (q.is_cuda or _launch.INTERPRETED)


def _key(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """Stands for one compiled kernel."""
    q, given = args[0], tuple(x is not None for x in args[3:7])
    return (name, q.device, q.dtype, q.shape[-1], given, select(name, q, given[-1]))


def _or_none(key: tuple[Any, ...], launch: Callable[[], _T]) -> _T | None:
    """`launch()`, or None where the kernel of this key does not compile or start.

    Compiling may raise nearly anything: Triton's CompilationError, OutOfResources and PTXASError,
    RuntimeError (MLIR passes, no C compiler, no driver), CalledProcessError (gcc without Python.h), OSError
    (the cache directory), TypeError and AttributeError (another Triton's API). Only a key's first launch is
    guarded; errors of the device (out of memory, an earlier kernel's assert) are not the kernel's to hide.
    """
    global KERNEL_ERROR
    if key in _launched:
        return launch()
    try:
        result = launch()
    except Exception as error:
        if _is_device_failure(error):
            raise
        KERNEL_ERROR = f"{type(error).__name__}: {error}"
        _log.warning("split_attention: the reference serves from now on, the kernel failed: %s", KERNEL_ERROR)
        return None
    _launched.add(key)
    return result


def _is_device_failure(error: Exception) -> bool:
    """True for errors that the reference would meet, too."""
    if isinstance(
        error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    ):
        return True
    text = str(error)
    return any(
        s in text for s in ("out of memory", "device-side assert", "illegal memory access", "launch failure")
    )


split_attn_fwd = torch.library.custom_op(
    "somaspeed::split_attn_fwd",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}, float scale) -> (Tensor, Tensor)",
)
split_attn_bwd = torch.library.custom_op(
    "somaspeed::split_attn_bwd",
    _backward,
    mutates_args=(),
    schema=f"(Tensor do, {_INPUTS}, Tensor o, Tensor lse, float scale, bool need_a, bool need_b) -> Tensor[]",
)


@split_attn_fwd.register_fake
def _(q, k_a, v_a, k_b, v_b, len_a, mask_a, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=statistics_dtype(q.dtype))


@split_attn_bwd.register_fake
def _(do, q, k_a, v_a, k_b, v_b, len_a, mask_a, o, lse, scale, need_a, need_b):
    streams = ((k_a, v_a) if need_a else ()) + ((k_b, v_b) if need_b else ())
    return [torch.empty_like(x) for x in (q, *streams)]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, run: Callable[..., list[Tensor]], do: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of the forward op; `run` is the op or what it calls."""
    if do is None:
        return (None,) * 8
    *inputs, o, lse = ctx.saved_tensors
    need_a, need_b = any(ctx.needs_input_grad[1:3]), any(ctx.needs_input_grad[3:5])
    grads = iter(run(do, *inputs, o, lse, ctx.scale, need_a, need_b))
    dq, streams = next(grads), [next(grads) if need else None for need in (need_a, need_a, need_b, need_b)]
    return (dq, *streams, None, None, None)


def _op_backward(ctx, do, dlse):
    return _gradients(ctx, torch.ops.somaspeed.split_attn_bwd.default, do)


split_attn_fwd.register_autograd(_op_backward, setup_context=_save)


@register_flop_formula(torch.ops.somaspeed.split_attn_fwd)
def _fwd_flops(q, k_a, v_a, k_b, *_, out_shape=None, **__) -> int:
    """Two products; lengths and masks are data, so their keys count."""
    (B, H, R, D), N = q, k_a[2] + (0 if k_b is None else k_b[2])
    return 4 * B * H * R * N * D


@register_flop_formula(torch.ops.somaspeed.split_attn_bwd)
def _bwd_flops(do, q, k_a, v_a, k_b, v_b, len_a, mask_a, o, lse, scale, need_a, need_b, **_) -> int:
    """Scores, dp, dq over all keys, dk, dv where needed; the dkv kernel's own scores and dp do not count."""
    (B, H, R, D), NA, NB = q, k_a[2], 0 if k_b is None else k_b[2]
    return 6 * B * H * R * (NA + NB) * D + 4 * B * H * R * (need_a * NA + need_b * NB) * D


class SplitAttentionFunction(torch.autograd.Function):
    """The eager path: a custom op's Python took 230 us more, twice the kernels' time at pi0.5's B = 32."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        return _gradients(ctx, _backward, do)


def split_attention(
    q: Tensor,
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None = None,
    v_b: Tensor | None = None,
    len_a: Tensor | None = None,
    mask_a: Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of R query rows a head over two streams of keys and values.

    The Triton kernel runs where `refusal` of the same arguments is None, else the reference. The kernel's
    gradient cannot be differentiated again.

    Args:
        q: [B, H, R, D], D in 16..256 for the kernel; bf16, fp16, fp32 or fp64, and all five tensors alike.
        k_a, v_a: [B, H, NA, D], gradients only where they require them.
        k_b, v_b: [B, H, NB, D], both or neither.
        len_a: [B] int32 on q's device, each sample's number of valid keys in stream A; None for all.
        mask_a: [B, NA] bool, True = attend; None for all. Keys that are not valid must be finite, too.
        scale: of q . k, D ** -0.5 if None.
        impl: "triton" (an error where it cannot; under TRITON_INTERPRET=1 it takes CPU tensors), "reference",
            or None to choose.

    Returns:
        [B, H, R, D] in q's dtype with the strides of empty_like(q), 0 in rows with no valid key.

    Raises:
        ValueError: shapes do not fit together, mask_a is not bool, impl is unknown or "triton" is refused.

    Source: Dao 2023, arXiv:2307.08691 (online softmax, recomputation in the backward).
    """
    _check(q, k_a, v_a, k_b, v_b, len_a, mask_a, impl)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    args = (q, k_a, v_a, k_b, v_b, len_a, mask_a, scale)
    reason = "impl='reference'" if impl == "reference" else _refusal(*args, interpret=impl == "triton")
    if reason is not None and impl == "triton":
        raise ValueError(
            f"split_attention: impl='triton' cannot serve: {reason}; leave impl=None to fall back"
        )
    if reason is not None:
        return _reference(args, reason)
    # compilers, FLOP counters and selective checkpointing see ops, not an autograd.Function
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return torch.ops.somaspeed.split_attn_fwd.default(*args)[0]
    if not torch.is_grad_enabled():
        return _forward(*args)[0]
    return SplitAttentionFunction.apply(*args)[0]


def refusal(
    q: Tensor,
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None = None,
    v_b: Tensor | None = None,
    len_a: Tensor | None = None,
    mask_a: Tensor | None = None,
    scale: float | None = None,
) -> str | None:
    """Why the kernel cannot serve these arguments, or None; looks at static properties, so never syncs."""
    return _refusal(q, k_a, v_a, k_b, v_b, len_a, mask_a, scale, interpret=False)


def _refusal(q, k_a, v_a, k_b, v_b, len_a, mask_a, scale, interpret: bool) -> str | None:
    named = [("k_a", k_a), ("v_a", v_a), ("k_b", k_b), ("v_b", v_b)]
    data = [("q", q), *((name, x) for name, x in named if x is not None)]
    selectors = [(name, x) for name, x in (("len_a", len_a), ("mask_a", mask_a)) if x is not None]
    return (
        _refuse_process(q, interpret)
        or _refuse_numbers(q, scale, len_a, mask_a)
        or next((r for name, x in data if (r := _refuse_data(name, x, q)) is not None), None)
        or next(
            (f"{n} is on {x.device}, q on {q.device}" for n, x in selectors if x.device != q.device), None
        )
    )


def _refuse_process(q: Tensor, interpret: bool) -> str | None:
    if _launch is None:
        return _NO_TRITON
    if KERNEL_ERROR is not None:
        return f"a kernel failed earlier in this process ({KERNEL_ERROR})"
    if not q.is_cuda and not (interpret and _launch.INTERPRETED):
        return f"q is on {q.device}, the kernel runs on cuda"
    return None


def _refuse_numbers(
    q: Tensor, scale: float | None, len_a: Tensor | None, mask_a: Tensor | None
) -> str | None:
    if q.dtype not in _DTYPES:
        return f"q is {q.dtype}, the kernel takes bf16, fp16, fp32 and fp64"
    if not 16 <= q.shape[-1] <= 256:
        return f"D is {q.shape[-1]}, the kernel takes 16..256"
    if q.dtype == torch.float64 and q.shape[-1] > 128:
        return f"D is {q.shape[-1]} in fp64, more than 99 KB of shared memory hold"
    if q.numel() == 0:
        return f"q is empty, {list(q.shape)}"
    if scale is not None and not 0.0 < scale < math.inf:
        return f"scale is {scale}, the kernel takes positive numbers"
    if len_a is not None and (len_a.dtype != torch.int32 or not len_a.is_contiguous()):
        return f"len_a is {len_a.dtype} with stride {len_a.stride(0)}, the kernel reads contiguous int32"
    if mask_a is not None and mask_a.shape[1] > 1 and mask_a.stride(1) != 1:
        return f"mask_a's last stride is {mask_a.stride(1)}, the kernel takes 1"
    return None


def _refuse_data(name: str, x: Tensor, q: Tensor) -> str | None:
    if type(x) not in (Tensor, torch.nn.Parameter):
        return f"{name} is a {type(x).__name__}, the kernel takes plain tensors"
    if x.dtype != q.dtype:
        return f"{name} is {x.dtype}, q {q.dtype}; cast to one dtype first, autocast does not reach this op"
    if x.device != q.device:
        return f"{name} is on {x.device}, q on {q.device}"
    if x.stride(-1) != 1:
        return f"{name}'s last stride is {x.stride(-1)}, the kernel takes 1"
    if x.stride(2) >= _MAX_ROW_STRIDE:
        return f"{name}'s rows are {x.stride(2)} elements apart, the kernel takes up to {_MAX_ROW_STRIDE - 1}"
    return None


def _reference(args: tuple[Any, ...], reason: str) -> Tensor:
    """The reference's output, laid out like the kernel's; counted unless a compiler traces it."""
    global last_refusal
    if not torch.compiler.is_compiling():
        CALLS["reference"] += 1
        last_refusal = reason
    out, like = split_attention_ref(*args), torch.empty_like(args[0])
    return out if out.stride() == like.stride() else like.copy_(out)


def _check(q, k_a, v_a, k_b, v_b, len_a, mask_a, impl: str | None) -> None:
    """Shapes, and what no implementation could read."""
    if impl not in (None, "triton", "reference"):
        raise ValueError(f"split_attention: impl must be 'triton', 'reference' or None, but is {impl!r}")
    if q.ndim != 4:
        raise ValueError(
            f"split_attention: q must be [B, H, R, D], but is {list(q.shape)}; add the missing axes"
        )
    if (k_b is None) != (v_b is None):
        raise ValueError("split_attention: k_b and v_b come together, but one is None; pass both or neither")
    B, H, _, D = q.shape
    _check_stream("k_a", k_a, "v_a", v_a, (B, H, D))
    if k_b is not None:
        _check_stream("k_b", k_b, "v_b", v_b, (B, H, D))
    if len_a is not None and len_a.shape != (B,):
        raise ValueError(f"split_attention: len_a must be [{B}], one a sample, but is {list(len_a.shape)}")
    if mask_a is not None and (mask_a.shape != (B, k_a.shape[2]) or mask_a.dtype != torch.bool):
        raise ValueError(
            f"split_attention: mask_a must be bool [{B}, {k_a.shape[2]}], a flag for each key of k_a, "
            f"but is {mask_a.dtype} {list(mask_a.shape)}"
        )


def _check_stream(k_name: str, k: Tensor, v_name: str, v: Tensor, like_q: tuple[int, int, int]) -> None:
    B, H, D = like_q
    if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != like_q:
        raise ValueError(
            f"split_attention: {k_name} must be [{B}, {H}, N, {D}] to fit q, but is {list(k.shape)}; "
            "fold query heads that share a key/value head into q's rows"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"split_attention: {v_name} must be {list(k.shape)} like {k_name}, but is {list(v.shape)}"
        )
