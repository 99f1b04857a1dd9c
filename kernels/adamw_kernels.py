"""The four Triton kernels of `adamw`: norm, clip factor and update of all parameters of an optimizer.

    1  _adamw_tile_squares_kernel    a program a tile    sum of squares of one tile of one gradient, fp32
    2  _adamw_slot_squares_kernel    a program a slot    fp64 sum over the tiles of one parameter
    3  _adamw_scalars_kernel         one program         norm, clip factor, skip; step size and friends a slot
    4  _adamw_update_kernel          a program a tile    reads p, g, m, v once, writes p, m, v; g is only read

A slot is a parameter of the optimizer, N of them; a tile is TILE = BLOCK * ITER of its elements, T of them.
Every slot with a gradient has at least one tile, so that an empty parameter's step is counted as well.
Addresses come from tables of int64. KIND is a slot's dtypes as a number, see `kind` in `adamw`.
Numerics: fp32 inside, one rounding at the store; norm, 1 - beta and beta ** step in fp64 (1 - 0.999f is
1.3e-5 off, and shows in exp_avg_sq). No atomics and fixed orders of addition: two runs give the same bits.
Speed: a mask against a run-time length makes Triton emit 4-byte loads, so whole tiles whose addresses are
multiples of 16 bytes take a loop without masks (16-byte loads), all others a masked one.
"""

import triton
import triton.language as tl

_SIZES = ["N"]  # changes with the optimizer, and no code depends on its divisibility


@triton.jit
def _pointer(address, CODE: tl.constexpr):
    # CODE: 0 fp32, 1 bf16, 2 fp16
    if CODE == 0:
        return address.to(tl.pointer_type(tl.float32))
    elif CODE == 1:
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


@triton.jit
def _round(x, DT: tl.constexpr, noise, STOCHASTIC: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 -> DT; to bf16 by adding noise (16 random bits) below the kept bits, or to nearest even."""
    if tl.bfloat16 == DT and (STOCHASTIC or EMULATED):  # the CPU interpreter truncates to bf16
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + (noise if STOCHASTIC else 0x7FFF + ((bits >> 16) & 1))
        bits = tl.where(x == x, bits, 0x7FC00000)  # a NaN's payload must not carry into the sign
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DT)


@triton.jit
def _sum_of_squares(grad, remaining, MASKED: tl.constexpr, BLOCK: tl.constexpr, ITER: tl.constexpr):
    b_sum = tl.zeros([BLOCK], tl.float32)
    for j in range(ITER):
        offsets = j * BLOCK + tl.arange(0, BLOCK)
        if MASKED:
            b_grad = tl.load(grad + offsets, mask=offsets < remaining, other=0.0).to(tl.float32)
        else:
            b_grad = tl.load(grad + offsets).to(tl.float32)
        b_sum += b_grad * b_grad
    return tl.sum(b_sum, 0)


@triton.jit
def _adamw_tile_squares_kernel(
    tile_slot, tile_offset, slot_numel, slot_kind, grads, partial,
    GRADS: tl.constexpr, BLOCK: tl.constexpr, ITER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(tile_slot + tile)
    offset = tl.load(tile_offset + tile)
    remaining = tl.load(slot_numel + slot) - offset
    address = tl.load(grads + slot)
    code = (tl.load(slot_kind + slot) // 3) % 3
    vector = (remaining >= BLOCK * ITER) & ((address & 15) == 0)
    for GRAD in tl.static_range(3):
        if (GRADS >> GRAD) & 1:  # noqa: SIM102 (a dtype that no gradient has is not compiled)
            if code == GRAD:
                grad = _pointer(address, GRAD) + offset
                if vector:
                    total = _sum_of_squares(tl.multiple_of(grad, 16), remaining, False, BLOCK, ITER)
                    tl.store(partial + tile, total)
                else:
                    total = _sum_of_squares(grad, remaining, True, BLOCK, ITER)
                    tl.store(partial + tile, total)


@triton.jit
def _adamw_slot_squares_kernel(partial, slot_first, squares, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    first, last = tl.load(slot_first + slot), tl.load(slot_first + slot + 1)
    b_sum = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        b_sum += tl.load(partial + tiles, mask=tiles < last, other=0.0).to(tl.float64)
    tl.store(squares + slot, tl.sum(b_sum, 0))


@triton.jit
def _power(b_base, b_exponent, BLOCK: tl.constexpr):
    """fp64 base ** a whole number below 2 ** 31, by squaring: no libdevice, good to 1e-15."""
    b_result = tl.full([BLOCK], 1.0, tl.float64)
    b_bits = b_exponent.to(tl.int32)
    for _ in range(31):
        b_result = tl.where((b_bits & 1) == 1, b_result * b_base, b_result)
        b_base = b_base * b_base
        b_bits = b_bits >> 1
    return b_result


@triton.jit
def _clip_factor(squares, norm_out, max_norm, inv_divisor, N, BLOCK: tl.constexpr):
    """The global norm, stored in fp32, and min(1, max_norm / (norm + 1e-6)); NaN stays NaN, as in torch."""
    b_sum = tl.zeros([BLOCK], tl.float64)
    for start in range(0, N, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        b_sum += tl.load(squares + slots, mask=slots < N, other=0.0)
    norm = (tl.sqrt(tl.sum(b_sum, 0)) * inv_divisor).to(tl.float32)
    tl.store(norm_out, norm)
    factor = (max_norm / (norm + 1e-6)).to(tl.float32)
    return tl.where(factor > 1.0, 1.0, factor)


@triton.jit(do_not_specialize=_SIZES)
def _adamw_scalars_kernel(
    squares, norm_out, slot_group, steps, hyper, scalars, shared, grad_scale, found_inf,
    max_norm, inv_divisor, N,
    FROM_NORM: tl.constexpr, PENDING: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_INF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """shared [3]: clip factor, factor of the gradients, 1 to skip the step; scalars [N, 9]: see below."""
    skip = 0.0
    if HAS_INF:
        skip = tl.load(found_inf).to(tl.float32)
    factor = 1.0
    if FROM_NORM:
        factor = _clip_factor(squares, norm_out, max_norm, inv_divisor, N, BLOCK)
    elif PENDING:
        factor = tl.load(shared)
        skip = tl.maximum(skip, tl.load(shared + 2))
    scale = inv_divisor
    if HAS_SCALE:
        scale = scale / tl.load(grad_scale).to(tl.float32)
    tl.store(shared, factor)
    tl.store(shared + 1, factor * scale)
    tl.store(shared + 2, skip)
    for start in range(0, N, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        mask = slots < N
        group = hyper + tl.load(slot_group + slots, mask=mask, other=0) * 8
        step = tl.load(steps + slots, mask=mask, other=0.0) + 1.0
        lr = tl.load(group, mask=mask, other=0.0)
        beta1 = tl.load(group + 1, mask=mask, other=0.0)
        beta2 = tl.load(group + 2, mask=mask, other=0.0)
        eps = tl.load(group + 3, mask=mask, other=0.0)
        weight_decay = tl.load(group + 4, mask=mask, other=0.0)
        sign = tl.load(group + 5, mask=mask, other=1.0)
        out = scalars + slots * 9
        tl.store(out, (lr / (1.0 - _power(beta1, step, BLOCK))).to(tl.float32), mask=mask)
        tl.store(out + 1, tl.sqrt(1.0 - _power(beta2, step, BLOCK)).to(tl.float32), mask=mask)
        tl.store(out + 2, (1.0 - lr * weight_decay).to(tl.float32), mask=mask)
        tl.store(out + 3, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(out + 4, beta2.to(tl.float32), mask=mask)
        tl.store(out + 5, (1.0 - beta2).to(tl.float32), mask=mask)
        tl.store(out + 6, eps.to(tl.float32), mask=mask)
        tl.store(out + 7, sign.to(tl.float32), mask=mask)
        tl.store(out + 8, step, mask=mask)


@triton.jit
def _load(pointer, offsets, remaining, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < remaining, other=0.0)
    return tl.load(pointer + offsets)


@triton.jit
def _store(pointer, offsets, remaining, b_x, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, b_x, mask=offsets < remaining)
    else:
        tl.store(pointer + offsets, b_x)


@triton.jit
def _weight(b_param, b_master, HAS_MASTER: tl.constexpr, EMULATED: tl.constexpr):
    """The fp32 weight: the master's, unless somebody wrote the parameter since it was rounded from it."""
    if HAS_MASTER:
        b_same = _round(b_master, b_param.dtype, 0, False, EMULATED) == b_param
        return tl.where(b_same, b_master, b_param.to(tl.float32))
    return b_param.to(tl.float32)


@triton.jit
def _update_tile(
    param, grad, exp_avg, exp_avg_sq, master, remaining, scalar, factor, seed, slot, step, first,
    HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, EMULATED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, ITER: tl.constexpr,
):  # fmt: skip
    step_size, root_bias2, decay = tl.load(scalar), tl.load(scalar + 1), tl.load(scalar + 2)
    weight1, beta2, weight2 = tl.load(scalar + 3), tl.load(scalar + 4), tl.load(scalar + 5)
    eps = tl.load(scalar + 6)
    NOISY: tl.constexpr = STOCHASTIC and param.dtype.element_ty == tl.bfloat16 and not HAS_MASTER
    for j in range(ITER):
        offsets = j * BLOCK + tl.arange(0, BLOCK)
        b_param = _load(param, offsets, remaining, MASKED)
        b_grad = _load(grad, offsets, remaining, MASKED).to(tl.float32) * factor
        b_avg = _load(exp_avg, offsets, remaining, MASKED).to(tl.float32)
        b_sq = _load(exp_avg_sq, offsets, remaining, MASKED).to(tl.float32)
        b_master = 0.0
        if HAS_MASTER:
            b_master = _load(master, offsets, remaining, MASKED)
        b_weight = _weight(b_param, b_master, HAS_MASTER, EMULATED)
        b_avg = b_avg + (b_grad - b_avg) * weight1
        b_sq = b_sq * beta2 + b_grad * b_grad * weight2
        denominator = tl.div_rn(tl.sqrt_rn(b_sq), root_bias2) + eps
        b_weight = b_weight * decay - step_size * tl.div_rn(b_avg, denominator)
        noise = 0
        if NOISY:
            # element, parameter and step: the same bits on every replica and after a resume
            element = first + offsets
            low, high = element.to(tl.uint32), (element >> 32).to(tl.uint32)
            n0, n1, n2, n3 = tl.philox(seed, low, high, low * 0 + slot, low * 0 + step)
            noise = n0 & 0xFFFF
        _store(param, offsets, remaining, _round(b_weight, b_param.dtype, noise, NOISY, EMULATED), MASKED)
        if HAS_MASTER:
            _store(master, offsets, remaining, b_weight, MASKED)
        DT: tl.constexpr = exp_avg.dtype.element_ty
        _store(exp_avg, offsets, remaining, _round(b_avg, DT, 0, False, EMULATED), MASKED)
        _store(exp_avg_sq, offsets, remaining, _round(b_sq, DT, 0, False, EMULATED), MASKED)


@triton.jit(do_not_specialize=[*_SIZES, "seed"])
def _adamw_update_kernel(
    tile_slot, tile_offset, slot_numel, slot_kind, slot_start, slot_identity, pointers, grads, steps, scalars,
    shared, seed, N,
    KINDS: tl.constexpr, STOCHASTIC: tl.constexpr, EMULATED: tl.constexpr,
    BLOCK: tl.constexpr, ITER: tl.constexpr,
):  # fmt: skip
    """pointers int64 [4, N]: parameter, exp_avg, exp_avg_sq, master; grads int64 [N]."""
    if tl.load(shared + 2) == 0.0:
        tile = tl.program_id(0)
        slot = tl.load(tile_slot + tile)
        offset = tl.load(tile_offset + tile)
        remaining = tl.load(slot_numel + slot) - offset
        kind = tl.load(slot_kind + slot)
        scalar = scalars + slot * 9
        factor = tl.load(shared + 1) * tl.load(scalar + 7)
        a_param, a_grad = tl.load(pointers + slot), tl.load(grads + slot)
        a_avg, a_sq = tl.load(pointers + N + slot), tl.load(pointers + 2 * N + slot)
        a_master = tl.load(pointers + 3 * N + slot)
        vector = (remaining >= BLOCK * ITER) & (((a_param | a_grad | a_avg | a_sq | a_master) & 15) == 0)
        step = tl.load(scalar + 8)
        if offset == 0:
            tl.store(steps + slot, step)
        identity, first = tl.load(slot_identity + slot).to(tl.uint32), tl.load(slot_start + slot) + offset
        for KIND in tl.static_range(54):
            if (KINDS >> KIND) & 1:  # noqa: SIM102 (dtypes that no slot has are not compiled)
                if kind == KIND:
                    param = _pointer(a_param, KIND % 3) + offset
                    grad = _pointer(a_grad, (KIND // 3) % 3) + offset
                    exp_avg = _pointer(a_avg, (KIND // 9) % 3) + offset
                    exp_avg_sq = _pointer(a_sq, (KIND // 9) % 3) + offset
                    master = _pointer(a_master, 0) + offset
                    if vector:
                        _update_tile(
                            tl.multiple_of(param, 16), tl.multiple_of(grad, 16), tl.multiple_of(exp_avg, 16),
                            tl.multiple_of(exp_avg_sq, 16), tl.multiple_of(master, 16),
                            remaining, scalar, factor, seed, identity, step.to(tl.uint32), first,
                            KIND >= 27, STOCHASTIC, EMULATED, False, BLOCK, ITER,
                        )  # fmt: skip
                    else:
                        _update_tile(
                            param, grad, exp_avg, exp_avg_sq, master,
                            remaining, scalar, factor, seed, identity, step.to(tl.uint32), first,
                            KIND >= 27, STOCHASTIC, EMULATED, True, BLOCK, ITER,
                        )  # fmt: skip
