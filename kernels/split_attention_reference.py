"""`split_attention` in plain PyTorch: the reference, and stand-ins for kernels that do not compile.

Shapes: those of `split_attention`.
Numerics: products in the inputs' dtype, softmax in fp32 (fp64 for fp64); autocast is switched off inside, so
the dtypes are what they are for the kernels. Keys that are not valid weigh zero but are read: they must be
finite.
Cost: three tensors of B H R (NA + NB) scores, and a copy of both streams into one.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634


def split_attention_ref(
    q: Tensor,
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None = None,
    v_b: Tensor | None = None,
    len_a: Tensor | None = None,
    mask_a: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """What `split_attention` computes, differentiable at will; a row with no valid key gives 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with _no_autocast(q):
        k, v = _joined(k_a, k_b), _joined(v_a, v_b)
        valid = valid_keys(k_a, k.shape[2], len_a, mask_a)
        dead = ~valid.any(-1, keepdim=True)
        scores = (q @ k.transpose(-1, -2)).to(statistics_dtype(q.dtype)) * scale
        # a dead row goes through softmax unmasked and is zeroed after: all -inf would make its gradients NaN
        p = scores.masked_fill(~(valid | dead), float("-inf")).softmax(-1).masked_fill(dead, 0.0)
        return p.to(v.dtype) @ v


def reference_fwd(
    q: Tensor,
    k_a: Tensor,
    v_a: Tensor,
    k_b: Tensor | None,
    v_b: Tensor | None,
    len_a: Tensor | None,
    mask_a: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The forward kernel's results: o [B, H, R, D] like q, lse [B, H, R] base 2, +inf in rows with no key."""
    with _no_autocast(q):
        v = _joined(v_a, v_b)
        scores = _scores(q, k_a, k_b, len_a, mask_a, scale)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        o = (scores - lse[..., None]).exp().to(v.dtype) @ v
    return torch.empty_like(q).copy_(o), lse * LOG2_E


def reference_bwd(
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
    """The backward kernels' results: [dq, dk_a, dv_a if need_a, dk_b, dv_b if need_b]."""
    with _no_autocast(q):
        k, v, NA = _joined(k_a, k_b), _joined(v_a, v_b), k_a.shape[2]
        p = (_scores(q, k_a, k_b, len_a, mask_a, scale) - (lse / LOG2_E)[..., None]).exp()
        dp = (do @ v.transpose(-1, -2)).to(p.dtype)
        delta = (o.to(p.dtype) * do.to(p.dtype)).sum(-1, keepdim=True)
        ds = (p * (dp - delta) * scale).to(q.dtype)
        dk, dv = ds.transpose(-1, -2) @ q, p.to(q.dtype).transpose(-1, -2) @ do
        pairs = [(q, ds @ k)]
        if need_a:
            pairs += [(k_a, dk[:, :, :NA]), (v_a, dv[:, :, :NA])]
        if need_b and k_b is not None and v_b is not None:
            pairs += [(k_b, dk[:, :, NA:]), (v_b, dv[:, :, NA:])]
    return [torch.empty_like(like).copy_(grad) for like, grad in pairs]


def valid_keys(k_a: Tensor, num_keys: int, len_a: Tensor | None, mask_a: Tensor | None) -> Tensor:
    """The keys of stream A, then B, that a sample's rows attend to: [B, 1, 1, num_keys] bool."""
    B, NA = k_a.shape[0], k_a.shape[2]
    valid = torch.ones(B, num_keys, dtype=torch.bool, device=k_a.device)
    if len_a is not None:
        keys = torch.arange(num_keys, device=k_a.device)
        valid = valid & ((keys < len_a[:, None]) | (keys >= NA))
    if mask_a is not None:
        valid = valid & torch.nn.functional.pad(mask_a, (0, num_keys - NA), value=True)
    return valid[:, None, None]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, lse and every sum."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_autocast(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off for q's device; meta, where models are counted, has none."""
    if q.is_meta:
        return contextlib.nullcontext()
    return torch.autocast(q.device.type, enabled=False)


def _scores(
    q: Tensor, k_a: Tensor, k_b: Tensor | None, len_a: Tensor | None, mask_a: Tensor | None, scale: float
) -> Tensor:
    """scale * q . k, [B, H, R, NA + NB] in the statistics' dtype, -inf where a key is not valid."""
    k = _joined(k_a, k_b)
    scores = (q @ k.transpose(-1, -2)).to(statistics_dtype(q.dtype)) * scale
    return scores.masked_fill(~valid_keys(k_a, k.shape[2], len_a, mask_a), float("-inf"))


def _joined(x_a: Tensor, x_b: Tensor | None) -> Tensor:
    """[B, H, NA, D] and [B, H, NB, D] -> [B, H, NA + NB, D]."""
    return x_a if x_b is None else torch.cat([x_a, x_b], dim=2)
