"""The three Triton kernels of `split_attention`; `split_attention_launch` launches them.

Shapes: B = samples, H = key/value heads, R = query rows of one head, D = head size (BLOCK_D: the next power
of two), NA and NB = keys of stream A and of stream B, N = keys of either. One program owns one tile of
BLOCK_R rows or of BLOCK_N keys of one (sample, head) and walks the other axis in a fixed order: no atomics,
so two runs give the same bits.
Numerics: base-2 online softmax with log2(e) folded into the scale; statistics and sums in ACC (fp32; fp64 for
fp64); probabilities rounded to the inputs' dtype before the second product; "ieee" products, so fp32 never
becomes tf32.
Every loop checks its bounds in every tile. Two loops, whole tiles unchecked and then the ragged one, were
slower on an H200: 333 against 390 TF/s for pi0.5's prefix (B 64, 576 keys, D 256), and a second copy of the
tile spilled in the backward.
"""

import triton
import triton.language as tl

# lengths differ from call to call, and no code depends on their divisibility
_LENGTHS = ["R", "NA", "NB", "N"]


@triton.jit
def _dot(x, y, acc, DT: tl.constexpr, ACC: tl.constexpr):
    # DT is the storage dtype, so a no-op for loaded tiles; the CPU interpreter multiplies bf16 as raw uint16,
    # so there it is fp32
    return tl.dot(x.to(DT), y.to(DT), acc, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _load_tile(x, stride, num_rows, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    # x points at the tile's first row; in-tile offsets fit int32 because refusal() bounds the row stride
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    pointers = x + rows * stride + cols
    if D == BLOCK_D:
        return tl.load(pointers, mask=rows < num_rows, other=0.0)
    return tl.load(pointers, mask=(rows < num_rows) & (cols < D), other=0.0)


@triton.jit
def _store_tile(x, stride, num_rows, b_x, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < num_rows) & (cols < D)
    tl.store(x + rows * stride + cols, b_x.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _valid_keys(mask, start, num_keys, HAS_MASK: tl.constexpr, BLOCK_N: tl.constexpr):
    keys = start + tl.arange(0, BLOCK_N)
    valid = keys < num_keys
    if HAS_MASK:
        valid = tl.load(mask + keys, mask=valid, other=0) != 0
    return valid


@triton.jit
def _fwd_tile(
    b_q, k, v, k_sn, v_sn, mask, start, num_keys, b_o, b_max, b_sum, scale,
    HAS_MASK: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, left = tl.cast(start, tl.int64), num_keys - start
    valid = _valid_keys(mask, start, num_keys, HAS_MASK, BLOCK_N)
    b_k = _load_tile(k + first * k_sn, k_sn, left, D, BLOCK_N, BLOCK_D)
    b_s = _dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_R, BLOCK_N], ACC), DT, ACC)
    b_s = tl.where(valid[None, :], b_s, float("-inf"))
    # the scale is positive, so it commutes with max, and scale and shift become one multiply-add per score
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # no valid key so far: exp2(-inf - 0) = 0, not NaN
    b_p = tl.exp2(b_s * scale - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_v = _load_tile(v + first * v_sn, v_sn, left, D, BLOCK_N, BLOCK_D)
    b_o = _dot(b_p, b_v, b_o * b_decay[:, None], DT, ACC)
    return b_o, b_new, b_sum


@triton.jit(do_not_specialize=_LENGTHS)
def _split_attention_fwd_kernel(
    q, k_a, v_a, len_a, mask_a, k_b, v_b, o, lse,
    q_sb, q_sh, q_sr, ka_sb, ka_sh, ka_sn, va_sb, va_sh, va_sn, mask_sb,
    kb_sb, kb_sh, kb_sn, vb_sb, vb_sh, vb_sn, o_sb, o_sh, o_sr,
    scale: tl.float64, H, R, NA, NB,
    HAS_LEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(R, BLOCK_R)
    head, row = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * BLOCK_R
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row_64, left = row.to(tl.int64), R - row
    scale = tl.full([], scale, ACC)  # passed in fp64: an fp32 scale would leave fp64 only 8 digits
    b_q = _load_tile(q + b * q_sb + h * q_sh + row_64 * q_sr, q_sr, left, D, BLOCK_R, BLOCK_D)
    b_o = tl.zeros([BLOCK_R, BLOCK_D], ACC)
    b_max, b_sum = tl.full([BLOCK_R], float("-inf"), ACC), tl.zeros([BLOCK_R], ACC)

    k_a, v_a, mask_a = k_a + b * ka_sb + h * ka_sh, v_a + b * va_sb + h * va_sh, mask_a + b * mask_sb
    n_a = NA
    if HAS_LEN:
        n_a = tl.minimum(tl.load(len_a + b), NA)
    for start in tl.range(0, n_a, BLOCK_N):
        b_o, b_max, b_sum = _fwd_tile(
            b_q, k_a, v_a, ka_sn, va_sn, mask_a, start, n_a, b_o, b_max, b_sum, scale,
            HAS_MASK, D, BLOCK_R, BLOCK_N, BLOCK_D, DT, ACC,
        )  # fmt: skip
    if HAS_B:
        k_b, v_b = k_b + b * kb_sb + h * kb_sh, v_b + b * vb_sb + h * vb_sh
        for start in tl.range(0, NB, BLOCK_N):
            b_o, b_max, b_sum = _fwd_tile(
                b_q, k_b, v_b, kb_sn, vb_sn, mask_a, start, NB, b_o, b_max, b_sum, scale,
                False, D, BLOCK_R, BLOCK_N, BLOCK_D, DT, ACC,
            )  # fmt: skip

    # a row with no valid key: o = 0, and lse = +inf makes every backward probability exp2(s - inf) = 0
    dead = b_sum == 0.0
    b_sum = tl.where(dead, 1.0, b_sum)
    b_lse = tl.where(dead, float("inf"), b_max + tl.log2(b_sum))
    rows = tl.arange(0, BLOCK_R)
    tl.store(lse + head.to(tl.int64) * R + row + rows, b_lse, mask=rows < left)
    _store_tile(
        o + b * o_sb + h * o_sh + row_64 * o_sr, o_sr, left, b_o / b_sum[:, None], D, BLOCK_R, BLOCK_D
    )


@triton.jit
def _dq_tile(
    b_q, b_do, b_lse, b_delta, k, v, k_sn, v_sn, mask, start, num_keys, b_dq, scale,
    HAS_MASK: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, left = tl.cast(start, tl.int64), num_keys - start
    valid = _valid_keys(mask, start, num_keys, HAS_MASK, BLOCK_N)
    b_k = _load_tile(k + first * k_sn, k_sn, left, D, BLOCK_N, BLOCK_D)
    b_v = _load_tile(v + first * v_sn, v_sn, left, D, BLOCK_N, BLOCK_D)
    b_s = _dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_R, BLOCK_N], ACC), DT, ACC)
    b_p = tl.where(valid[None, :], tl.exp2(b_s * scale - b_lse[:, None]), 0.0)
    b_dp = _dot(b_do, tl.trans(b_v), tl.zeros([BLOCK_R, BLOCK_N], ACC), DT, ACC)
    return _dot(b_p * (b_dp - b_delta[:, None]), b_k, b_dq, DT, ACC)


@triton.jit(do_not_specialize=_LENGTHS)
def _split_attention_dq_kernel(
    q, k_a, v_a, len_a, mask_a, k_b, v_b, o, do, lse, delta, dq,
    q_sb, q_sh, q_sr, ka_sb, ka_sh, ka_sn, va_sb, va_sh, va_sn, mask_sb,
    kb_sb, kb_sh, kb_sn, vb_sb, vb_sh, vb_sn, o_sb, o_sh, o_sr, do_sb, do_sh, do_sr, dq_sb, dq_sh, dq_sr,
    scale: tl.float64, scale_dq: tl.float64, H, R, NA, NB,
    HAS_LEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_B: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(R, BLOCK_R)
    head, row = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * BLOCK_R
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row_64, left = row.to(tl.int64), R - row
    scale = tl.full([], scale, ACC)
    rows = tl.arange(0, BLOCK_R)
    b_q = _load_tile(q + b * q_sb + h * q_sh + row_64 * q_sr, q_sr, left, D, BLOCK_R, BLOCK_D)
    b_do = _load_tile(do + b * do_sb + h * do_sh + row_64 * do_sr, do_sr, left, D, BLOCK_R, BLOCK_D)
    b_o = _load_tile(o + b * o_sb + h * o_sh + row_64 * o_sr, o_sr, left, D, BLOCK_R, BLOCK_D)
    # delta is needed here and by the key/value kernel: stored once, instead of a launch of its own
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)
    statistics = head.to(tl.int64) * R + row + rows
    tl.store(delta + statistics, b_delta, mask=rows < left)
    b_lse = tl.load(lse + statistics, mask=rows < left, other=float("inf"))
    b_dq = tl.zeros([BLOCK_R, BLOCK_D], ACC)

    k_a, v_a, mask_a = k_a + b * ka_sb + h * ka_sh, v_a + b * va_sb + h * va_sh, mask_a + b * mask_sb
    n_a = NA
    if HAS_LEN:
        n_a = tl.minimum(tl.load(len_a + b), NA)
    for start in tl.range(0, n_a, BLOCK_N):
        b_dq = _dq_tile(
            b_q, b_do, b_lse, b_delta, k_a, v_a, ka_sn, va_sn, mask_a, start, n_a, b_dq, scale,
            HAS_MASK, D, BLOCK_R, BLOCK_N, BLOCK_D, DT, ACC,
        )  # fmt: skip
    if HAS_B:
        k_b, v_b = k_b + b * kb_sb + h * kb_sh, v_b + b * vb_sb + h * vb_sh
        for start in tl.range(0, NB, BLOCK_N):
            b_dq = _dq_tile(
                b_q, b_do, b_lse, b_delta, k_b, v_b, kb_sn, vb_sn, mask_a, start, NB, b_dq, scale,
                False, D, BLOCK_R, BLOCK_N, BLOCK_D, DT, ACC,
            )  # fmt: skip
    b_dq *= tl.full([], scale_dq, ACC)
    _store_tile(dq + b * dq_sb + h * dq_sh + row_64 * dq_sr, dq_sr, left, b_dq, D, BLOCK_R, BLOCK_D)


@triton.jit
def _dkv_tile(
    b_k, b_v, q, do, lse, delta, q_sr, do_sr, start, R, b_dk, b_dv, scale, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, left, rows = tl.cast(start, tl.int64), R - start, start + tl.arange(0, BLOCK_R)
    b_q = _load_tile(q + first * q_sr, q_sr, left, D, BLOCK_R, BLOCK_D)
    b_do = _load_tile(do + first * do_sr, do_sr, left, D, BLOCK_R, BLOCK_D)
    b_lse = tl.load(lse + rows, mask=rows < R, other=float("inf"))
    b_delta = tl.load(delta + rows, mask=rows < R, other=0.0)
    b_st = _dot(b_k, tl.trans(b_q), tl.zeros([BLOCK_N, BLOCK_R], ACC), DT, ACC)  # scores, transposed
    b_pt = tl.exp2(b_st * scale - b_lse[None, :])
    b_dv = _dot(b_pt, b_do, b_dv, DT, ACC)
    b_dpt = _dot(b_v, tl.trans(b_do), tl.zeros([BLOCK_N, BLOCK_R], ACC), DT, ACC)
    b_dk = _dot(b_pt * (b_dpt - b_delta[None, :]), b_q, b_dk, DT, ACC)
    return b_dk, b_dv


@triton.jit(do_not_specialize=_LENGTHS)
def _split_attention_dkv_kernel(
    q, k, v, length, mask, do, lse, delta, dk, dv,
    q_sb, q_sh, q_sr, k_sb, k_sh, k_sn, v_sb, v_sh, v_sn, mask_sb, do_sb, do_sh, do_sr,
    dk_sb, dk_sh, dk_sn, dv_sb, dv_sh, dv_sn,
    scale: tl.float64, scale_dk: tl.float64, H, R, N,
    HAS_LEN: tl.constexpr, HAS_MASK: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(N, BLOCK_N)
    head, key = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * BLOCK_N
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    key_64 = key.to(tl.int64)
    scale = tl.full([], scale, ACC)
    n = N
    if HAS_LEN:
        n = tl.minimum(tl.load(length + b), N)
    b_k = _load_tile(k + b * k_sb + h * k_sh + key_64 * k_sn, k_sn, n - key, D, BLOCK_N, BLOCK_D)
    b_v = _load_tile(v + b * v_sb + h * v_sh + key_64 * v_sn, v_sn, n - key, D, BLOCK_N, BLOCK_D)
    b_dk, b_dv = tl.zeros([BLOCK_N, BLOCK_D], ACC), tl.zeros([BLOCK_N, BLOCK_D], ACC)

    q, do = q + b * q_sb + h * q_sh, do + b * do_sb + h * do_sh
    lse, delta = lse + head.to(tl.int64) * R, delta + head.to(tl.int64) * R
    num_rows = R
    if HAS_LEN:  # a tile with no valid key walks no rows
        num_rows = tl.where(key < n, R, 0)
    for start in tl.range(0, num_rows, BLOCK_R):
        b_dk, b_dv = _dkv_tile(
            b_k, b_v, q, do, lse, delta, q_sr, do_sr, start, R, b_dk, b_dv, scale,
            D, BLOCK_R, BLOCK_N, BLOCK_D, DT, ACC,
        )  # fmt: skip
    # a key adds to its own row only, so rows of keys that are not valid, be they inf or NaN, are cleared once
    # here: the loop is spared a select and the registers of `valid`
    valid = _valid_keys(mask + b * mask_sb, key, n, HAS_MASK, BLOCK_N)
    b_dk = tl.where(valid[:, None], b_dk * tl.full([], scale_dk, ACC), 0.0)
    b_dv = tl.where(valid[:, None], b_dv, 0.0)
    _store_tile(dk + b * dk_sb + h * dk_sh + key_64 * dk_sn, dk_sn, N - key, b_dk, D, BLOCK_N, BLOCK_D)
    _store_tile(dv + b * dv_sb + h * dv_sh + key_64 * dv_sn, dv_sn, N - key, b_dv, D, BLOCK_N, BLOCK_D)
