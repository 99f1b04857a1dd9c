import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from somaspeed_patch.kernels import split_attention as module
from somaspeed_patch.kernels.split_attention import refusal, split_attention, split_attention_ref
from somaspeed_patch.kernels.split_attention_table import Config, override
from somaspeed_patch.testing import assert_no_worse_than_native, grads_of

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on cpu the kernels run in Triton's interpreter

# the interpreter multiplies bf16 as raw uint16, so bf16 is for the GPU
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16

# B, H, R, D, NA, NB, len_a, keys masked
CASES = {
    "pi05 suffix": (2, 1, 3 * 8, 32, 35, 7, [19, 35], False),
    "pi05 suffix, mask": (2, 1, 3 * 8, 32, 37, 5, None, True),
    "pi05 suffix, mask and length": (2, 1, 2 * 8, 32, 33, 16, [33, 18], True),
    "prefix only, whole tiles": (1, 1, 4 * 8, 16, 32, 0, None, False),
    "molmoact2 context": (1, 2, 4 * 4, 96, 41, 0, [37], False),
    "groot": (1, 2, 21, 48, 40, 0, None, True),
    "odd head size": (1, 1, 17, 72, 19, 3, None, False),
    "a sample without context": (2, 1, 9, 16, 20, 3, [0, 20], False),
    "primes": (3, 2, 13, 16, 11, 7, [1, 5, 11], False),
}
# of a few numbers only, whose largest rounding error is chance: compared in fp64
SMALL = {
    "one row": (1, 1, 1, 16, 5, 2, None, False),
    "one key": (2, 1, 3, 16, 1, 0, None, False),
    "no stream A at all": (2, 1, 5, 16, 0, 3, None, False),
}


def _inputs(case, dtype=torch.float64):
    B, H, R, D, NA, NB, lengths, masked = {**CASES, **SMALL}[case]
    generator = torch.Generator().manual_seed(0)
    sizes = [R, NA, NA] + [NB, NB] * (NB > 0)
    data = [torch.randn(B, H, n, D, generator=generator).to(DEVICE, dtype) for n in sizes]
    select_keys = {
        "len_a": None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        "mask_a": (torch.rand(B, NA, generator=generator) < 0.6).to(DEVICE) if masked else None,
    }
    return data, select_keys


def _ours(**keywords):
    return lambda q, k_a, v_a, k_b=None, v_b=None: split_attention(
        q, k_a, v_a, k_b, v_b, **keywords, impl="triton"
    )


def _native(**keywords):
    return lambda q, k_a, v_a, k_b=None, v_b=None: split_attention_ref(q, k_a, v_a, k_b, v_b, **keywords)


def _frozen(fn, k_a, v_a):
    """`fn` of q and stream B alone; stream A follows q's dtype."""
    return lambda q, *b: fn(q, k_a.to(q.dtype), v_a.to(q.dtype), *b)


def _leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, HALF) for case in ("pi05 suffix", "pi05 suffix, mask", "molmoact2 context", "primes")),
    ],
    ids=str,
)
def test_values_and_every_gradient(case, dtype):
    data, keys = _inputs(case, dtype)
    assert_no_worse_than_native(_ours(**keys), _native(**keys), data)


@pytest.mark.parametrize("case", ["pi05 suffix", "pi05 suffix, mask", "prefix only, whole tiles"])
def test_with_stream_a_frozen(case):
    (q, k_a, v_a, *b), keys = _inputs(case, torch.float32)
    ours, native = _frozen(_ours(**keys), k_a, v_a), _frozen(_native(**keys), k_a, v_a)
    assert_no_worse_than_native(ours, native, [q, *b])


@pytest.mark.parametrize("case", ["pi05 suffix", "groot", "a sample without context", *SMALL])
def test_fp64_agrees_with_the_reference_to_rounding(case):
    data, keys = _inputs(case)
    for ours, native in zip(grads_of(_ours(**keys), data), grads_of(_native(**keys), data), strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-12, atol=1e-13)


def test_gradcheck():
    torch.manual_seed(0)
    q, k_a, v_a, k_b, v_b = (
        torch.randn(1, 1, n, 16, dtype=torch.float64, device=DEVICE) for n in (3, 19, 19, 2, 2)
    )
    keys = {"len_a": torch.tensor([17], dtype=torch.int32, device=DEVICE)}
    assert torch.autograd.gradcheck(_frozen(_ours(**keys), k_a, v_a), _leaves([q, k_b, v_b]), fast_mode=True)


def test_a_row_with_no_key_is_zero_and_has_no_gradient():
    (q, k_a, v_a), _ = _inputs("molmoact2 context", torch.float32)
    k_a, v_a = k_a.expand(2, -1, -1, -1), v_a.expand(2, -1, -1, -1)  # a batch stride of zero, too
    keys = {"len_a": torch.tensor([0, 41], dtype=torch.int32, device=DEVICE)}
    for fn in (_ours(**keys), _native(**keys)):
        out, dq, dk, dv = grads_of(fn, [q.expand(2, -1, -1, -1), k_a, v_a])
        assert not out[0].any() and not dq[0].any() and not dk[0].any() and not dv[0].any()
        assert out[1].any() and all(torch.isfinite(g).all() for g in (out, dq, dk, dv))
    nothing = {"mask_a": torch.zeros(1, 41, dtype=torch.bool, device=DEVICE)}
    assert not any(g.any() for g in grads_of(_ours(**nothing), [q, k_a[:1], v_a[:1]]))


def test_keys_past_the_length_are_never_read():
    (q, k_a, v_a, *b), keys = _inputs("pi05 suffix", torch.float32)
    out = _ours(**keys)(q, k_a, v_a, *b)
    for x in (k_a, v_a):
        x[0, :, 19:] = float("nan")
    assert torch.equal(out, _ours(**keys)(q, k_a, v_a, *b))


@pytest.mark.parametrize("case", ["pi05 suffix", "groot"])
def test_two_runs_give_the_same_bits(case):
    data, keys = _inputs(case, torch.float16)
    for one, two in zip(grads_of(_ours(**keys), data), grads_of(_ours(**keys), data), strict=True):
        assert torch.equal(one, two)


def test_uninitialised_memory_never_shows():
    data, keys = _inputs("a sample without context", torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills every torch.empty with NaN
    try:
        assert all(torch.isfinite(g).all() for g in grads_of(_ours(**keys), data))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_views_are_taken_as_they_are_and_the_output_is_laid_out_like_q(impl):
    B, S, D, P = 2, 3, 16, 21
    torch.manual_seed(0)
    projected, keys = torch.randn(B, S, 8, D, device=DEVICE), torch.randn(B, P, D, device=DEVICE)
    q, k_a = projected.view(B, S * 8, D)[:, None], keys[:, None]
    out = split_attention(q, k_a, k_a, impl=impl)
    assert out.stride() == torch.empty_like(q).stride()
    assert out.reshape(B, S, 8 * D).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, split_attention_ref(q.contiguous(), k_a, k_a))
    heads_last = torch.randn(B, S, 2, D, device=DEVICE).transpose(1, 2)  # [B, 2, S, D]
    wide = torch.randn(B, 2, P, 2 * D, device=DEVICE)[..., :D]
    out = split_attention(heads_last, wide, wide, impl=impl)
    assert out.stride() == heads_last.stride()
    torch.testing.assert_close(out, split_attention_ref(heads_last, wide, wide))


def test_an_upstream_gradient_of_any_layout():
    data, keys = _inputs("molmoact2 context", torch.float32)
    summed, permuted = _leaves(data), _leaves(data)
    _ours(**keys)(*summed).sum().backward()  # arrives expanded, every stride zero
    out = _ours(**keys)(*permuted)
    out.backward(torch.ones(*out.shape[:2], out.shape[3], out.shape[2], device=DEVICE).transpose(2, 3))
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(summed, permuted, strict=True))


def test_only_the_gradients_asked_for(monkeypatch):
    (q, k_a, v_a, k_b, v_b), keys = _inputs("pi05 suffix", torch.float32)
    asked = []

    def backward(do, q, k_a, v_a, k_b, v_b, *rest):
        asked.append(rest[-2:])
        return [q, *[k_a, v_a] * rest[-2], *[k_b, v_b] * rest[-1]]

    monkeypatch.setattr(module, "_backward", backward)
    for leaves in ([q], [q, k_b], [q, v_a], [k_b, v_b]):
        for x in (q, k_a, v_a, k_b, v_b):
            x.requires_grad_(any(x is leaf for leaf in leaves))
        _ours(**keys)(q, k_a, v_a, k_b, v_b).sum().backward()
    assert asked == [(False, False), (False, True), (True, False), (False, True)]


def test_every_tile_size_gives_the_same_answer():
    data, keys = _inputs("pi05 suffix")
    truth = grads_of(_native(**keys), data)
    with override(fwd=Config(32, 16, 4, 1), dq=Config(16, 64, 4, 1), dkv=Config(64, 16, 4, 1)):
        for ours, expected in zip(grads_of(_ours(**keys), data), truth, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)


def test_opcheck():
    data, keys = _inputs("a sample without context", torch.float32)
    args = (*_leaves(data), keys["len_a"], None, 0.25)
    forward = torch.library.opcheck(torch.ops.somaspeed.split_attn_fwd.default, args)
    o, lse = (x.detach() for x in torch.ops.somaspeed.split_attn_fwd(*args))
    backward_args = (o, *(x.detach() for x in args[:5]), keys["len_a"], None, o, lse, 0.25, True, True)
    backward = torch.library.opcheck(torch.ops.somaspeed.split_attn_bwd.default, backward_args)
    assert set(forward.values()) == set(backward.values()) == {"SUCCESS"}


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_compiled_without_graph_breaks(impl):
    data, keys = _inputs("a sample without context", torch.float32)

    def layer(q, k_a, v_a, k_b, v_b):
        return split_attention(q * 2, k_a, v_a, k_b, v_b, **keys, impl=impl).sin()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for eager, ours in zip(grads_of(layer, data), grads_of(compiled, data), strict=True):
        assert torch.equal(eager, ours)


def test_checkpointed():
    data, keys = _inputs("a sample without context", torch.float32)
    ours = _ours(**keys)
    again = grads_of(lambda *x: checkpoint(ours, *x, use_reentrant=False), data)
    assert all(torch.equal(one, two) for one, two in zip(grads_of(ours, data), again, strict=True))


def test_a_second_derivative_is_refused_aloud():
    (q, k_a, v_a, *_), _ = _inputs("primes", torch.float32)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(_ours()(q, k_a, v_a).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_flops_are_the_necessary_ones():
    (q, k_a, v_a, k_b, v_b), keys = _inputs("pi05 suffix", torch.float32)
    leaves = _leaves([q, k_b, v_b])
    with FlopCounterMode(display=False) as counter:
        _frozen(_ours(**keys), k_a, v_a)(*leaves).sum().backward()
    B, H, R, D, NA, NB = CASES["pi05 suffix"][:6]
    assert counter.get_total_flops() == B * H * R * D * (4 * (NA + NB) + 6 * (NA + NB) + 4 * NB)


def test_flops_of_a_model_on_meta_are_counted_through_the_reference():
    q, k, v = (torch.empty(2, 1, n, 16, device="meta") for n in (8, 5, 5))
    with FlopCounterMode(display=False) as counter:
        assert split_attention(q, k, v).shape == q.shape
    assert counter.get_total_flops() == 4 * 2 * 8 * 5 * 16


def test_autocast_changes_nothing_and_mixed_dtypes_are_refused():
    (q, k_a, v_a, *b), keys = _inputs("a sample without context", torch.float32)
    for fn in (_ours(**keys), _native(**keys)):
        with_autocast = torch.autocast(DEVICE, dtype=torch.bfloat16)(fn)
        same = grads_of(fn, [q, k_a, v_a, *b]), grads_of(with_autocast, [q, k_a, v_a, *b])
        assert all(map(torch.equal, *same))
    with pytest.raises(ValueError, match=r"k_a is torch.float32, q torch.bfloat16; cast to one dtype first"):
        _ours(**keys)(q.bfloat16(), k_a, v_a)


# pi0.5 at its own sizes, then the others; more rows than one wave, fewer than one, ragged
REAL = {
    "pi05 suffix": (32, 1, 400, 256, 576, 50, True, False),
    "pi05 suffix, mask": (8, 1, 400, 256, 576, 50, False, True),
    "pi05 prefix": (4, 1, 576 * 8, 256, 576, 0, True, False),
    "pi05 prefix, mask": (4, 1, 712 * 8, 256, 712, 0, False, True),
    "molmoact2 context": (4, 8, 80, 96, 487, 0, True, False),
    "groot": (8, 32, 41, 48, 128, 0, False, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.bfloat16) for case in REAL), ("groot", torch.float16)], ids=str
)
def test_real_sizes(case, dtype):
    B, H, R, D, NA, NB, lengths, masked = REAL[case]
    torch.manual_seed(0)
    q, *streams = (torch.randn(B, H, n, D, device="cuda", dtype=dtype) for n in (R, NA, NA, NB, NB) if n)
    keys = {
        "len_a": torch.randint(1, NA + 1, (B,), dtype=torch.int32, device="cuda") if lengths else None,
        "mask_a": torch.rand(B, NA, device="cuda") < 0.6 if masked else None,
    }
    ours = _ours(**keys)
    assert_no_worse_than_native(ours, _native(**keys), [q, *streams])
    for one, two in zip(grads_of(ours, [q, *streams]), grads_of(ours, [q, *streams]), strict=True):
        assert torch.equal(one, two)
    assert module.KERNEL_ERROR is None


@pytest.mark.gpu
def test_the_table_needs_no_fallback_on_this_gpu():
    x = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    assert refusal(x, x, x) is None
    before = module.CALLS["triton"]
    split_attention(x, x, x)
    assert module.CALLS["triton"] == before + 1


@pytest.mark.gpu
def test_compiled_by_inductor():
    data, keys = _inputs("pi05 suffix", torch.bfloat16)

    def layer(q, k_a, v_a, k_b, v_b):
        return split_attention(q * 2, k_a, v_a, k_b, v_b, **keys)

    compiled = torch.compile(layer, fullgraph=True)
    for eager, ours in zip(grads_of(layer, data), grads_of(compiled, data), strict=True):
        torch.testing.assert_close(eager, ours)
