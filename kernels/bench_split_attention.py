"""Benchmark of `split_attention` against SDPA at the sizes of pi0.5.

    python -m somaspeed_patch.kernels.bench_split_attention --out FILE.json [--sweep] [--tiny]

Shapes: B = samples, R = query rows (tokens * 8 heads), NA = prefix keys, NB = suffix keys, D = head size; one
key/value head. "suffix" trains q, k_b and v_b over a frozen prefix; "prefix" is the frozen prefix itself,
forward only, its output in the layout that o_proj reads.
Method: errors against the fp64 reference come first, and an arm that is off by more than twice what SDPA is
gets no time. Then the arms run in ABBA order; medians and p20/p80 by triton.testing.do_bench, which clears
the L2 cache. Each arm is timed twice: `device`, its kernels alone, replayed from a CUDA graph; and `eager`,
as called from Python, where the host is the slower one at small B. TF/s and ratios are the device's, and
count the necessary FLOPs, whatever an arm does.
--sweep also times tile sizes around the table's, some 2 minutes; --tiny tries the script on a CPU (it needs
TRITON_INTERPRET=1), and its figures mean nothing.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from somaspeed_patch.ab import machine
from somaspeed_patch.kernels import split_attention as module
from somaspeed_patch.kernels.split_attention import split_attention, split_attention_ref
from somaspeed_patch.kernels.split_attention_launch import split_attention_bwd, split_attention_fwd
from somaspeed_patch.kernels.split_attention_table import Config, override, select

SWEEP_SECONDS = 140
CANDIDATES = {
    "fwd": [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3)],
    "dq": [(128, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2)],
    "dkv": [(32, 64, 8, 2), (32, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2), (64, 16, 4, 2)],
}


@dataclass(kw_only=True)
class Case:
    """One problem: sizes, dtype and device, and the seed its random data come from."""

    name: str
    B: int
    R: int
    NA: int
    NB: int
    D: int
    device: str
    dtype: torch.dtype
    seed: int = 0

    def flops(self, backward: bool) -> int:
        """The necessary ones: two products forward; three over all keys and two over stream B backward."""
        forward = 4 * self.B * self.R * (self.NA + self.NB) * self.D
        return forward + backward * (6 * (self.NA + self.NB) + 4 * self.NB) * self.B * self.R * self.D


@dataclass(kw_only=True)
class Data:
    """A case's tensors; `mask` is all true, so that every arm computes the same thing."""

    q: Tensor
    k_a: Tensor
    v_a: Tensor
    k_b: Tensor | None
    v_b: Tensor | None
    length: Tensor
    mask: Tensor
    do: Tensor

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k_b, self.v_b) if x is not None and x.requires_grad]


@dataclass(kw_only=True)
class Row:
    """One arm's figures in one case; times in ms, over both rounds, of the kernels alone or eager."""

    case: str
    B: int
    arm: str
    what: str
    error: float
    error_allowed: float
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    medians_ms: list[float] = field(default_factory=list)
    eager_ms: float | None = None
    eager_medians_ms: list[float] = field(default_factory=list)


def make_data(case: Case) -> Data:
    """Fresh normal data; the suffix case's q, k_b and v_b require gradients."""
    generator = torch.Generator(case.device).manual_seed(case.seed)

    def normal(n: int, grad: bool = False) -> Tensor:
        x = torch.randn(case.B, 1, n, case.D, generator=generator, device=case.device, dtype=torch.float32)
        return x.to(case.dtype).requires_grad_(grad)

    trains = case.NB > 0
    return Data(
        q=normal(case.R, trains),
        k_a=normal(case.NA),
        v_a=normal(case.NA),
        k_b=normal(case.NB, True) if trains else None,
        v_b=normal(case.NB, True) if trains else None,
        length=torch.full((case.B,), case.NA, dtype=torch.int32, device=case.device),
        mask=torch.ones(case.B, case.NA, dtype=torch.bool, device=case.device),
        do=normal(case.R),
    )


def ours(d: Data, **keys: Any) -> Tensor:
    """[B, 1, R, D] by the kernels, whatever refusal() would prefer."""
    return split_attention(d.q, d.k_a, d.v_a, d.k_b, d.v_b, **keys, impl="triton")


def folded_sdpa(d: Data, masked: bool) -> Tensor:
    """[B, 1, R, D] by SDPA on the same rows and both streams concatenated; the cat is part of its cost."""
    k, v = (torch.cat([x for x in pair if x is not None], 2) for pair in ((d.k_a, d.k_b), (d.v_a, d.v_b)))
    mask = torch.ones(k.shape[0], 1, 1, k.shape[2], dtype=torch.bool, device=k.device) if masked else None
    return sdpa(d.q, k, v, attn_mask=mask)


def headed_sdpa(d: Data, masked: bool) -> Tensor:
    """[B, 1, R, D] by SDPA with eight query heads: grouped where masked, expanded where not."""
    B, _, R, D = d.q.shape
    q = d.q.view(B, R // 8, 8, D).transpose(1, 2)
    if masked:
        out = sdpa(q, d.k_a, d.v_a, attn_mask=d.mask[:, None, None], enable_gqa=True)
    else:
        out = sdpa(q, d.k_a.expand(-1, 8, -1, -1), d.v_a.expand(-1, 8, -1, -1))
    return out.transpose(1, 2).reshape(B, 1, R, D)


def arms_of(case: Case) -> dict[str, Callable[[Data], Tensor]]:
    native = folded_sdpa if case.NB else headed_sdpa
    return {
        "ours": lambda d: ours(d),
        "ours, length": lambda d: ours(d, len_a=d.length),
        "ours, mask": lambda d: ours(d, mask_a=d.mask),
        "sdpa": lambda d: native(d, False),
        "sdpa, mask": lambda d: native(d, True),
    }


def run_once(arm: Callable[[Data], Tensor], d: Data, backward: bool) -> list[Tensor]:
    """The output, and with `backward` the gradients of everything that trains."""
    if not backward:
        with torch.no_grad():
            return [arm(d)]
    out = arm(d)
    return [out, *torch.autograd.grad(out, d.leaves(), d.do)]


def truth_of(d: Data, backward: bool) -> list[Tensor]:
    """What run_once should give for the first two samples, in fp64."""
    tensors: dict[str, Any] = {k: None if x is None else _wide(x) for k, x in vars(d).items()}
    wide = Data(**tensors)
    return run_once(lambda w: split_attention_ref(w.q, w.k_a, w.v_a, w.k_b, w.v_b), wide, backward)


def _wide(x: Tensor) -> Tensor:
    x_2 = x[:2].detach()
    return x_2.double().requires_grad_(x.requires_grad) if x.is_floating_point() else x_2


def worst_error(results: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative error in norm, over output and gradients, of the first two samples."""
    errors = [
        (r[:2].detach().double() - t.detach()).norm() / t.detach().norm()
        for r, t in zip(results, truth, strict=True)
    ]
    return max(float(e) if bool(torch.isfinite(e)) else float("inf") for e in errors)


def timed(fn: Callable[[], Any]) -> tuple[float, float, float]:
    """Median, p20 and p80 in ms."""
    if torch.cuda.is_available():
        median, p20, p80 = triton.testing.do_bench(fn, warmup=25, rep=100, quantiles=[0.5, 0.2, 0.8])
        return median, p20, p80
    start = time.perf_counter()
    fn()
    return (1e3 * (time.perf_counter() - start),) * 3


def replayed(fn: Callable[[], Any]) -> Callable[[], Any]:
    """`fn`'s kernels without its Python: captured once into a CUDA graph; off CUDA `fn` itself."""
    if not torch.cuda.is_available():
        return fn
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def measure(case: Case, backward: bool) -> list[Row]:
    """Every arm of a case: errors first, then times of the arms that may have one."""
    d, arms = make_data(case), arms_of(case)
    truth = truth_of(d, backward)
    errors = {name: worst_error(run_once(arm, d, backward), truth) for name, arm in arms.items()}
    allowed = 2 * errors["sdpa"]
    what = "fwd+bwd" if backward else "fwd"
    rows = [
        Row(case=case.name, B=case.B, arm=name, what=what, error=error, error_allowed=allowed)
        for name, error in errors.items()
    ]
    green = [row for row in rows if row.error <= allowed]
    calls = {row.arm: partial(run_once, arms[row.arm], d, backward) for row in green}
    replays = {name: replayed(call) for name, call in calls.items()}
    device: dict[str, list[tuple[float, float, float]]] = {row.arm: [] for row in green}
    for row in [*green, *reversed(green)]:
        device[row.arm].append(timed(replays[row.arm]))
        row.eager_medians_ms.append(timed(calls[row.arm])[0])
    for row in green:
        medians, lows, highs = (list(x) for x in zip(*device[row.arm], strict=True))
        row.median_ms, row.p20_ms, row.p80_ms = sum(medians) / len(medians), min(lows), max(highs)
        row.medians_ms, row.tflops = medians, case.flops(backward) / row.median_ms / 1e9
        row.eager_ms = sum(row.eager_medians_ms) / len(row.eager_medians_ms)
    return rows


def sweep(case: Case, kernel: str, masked: bool, deadline: float) -> dict[str, Any] | None:
    """Median ms of one kernel at each candidate tile, fastest first; None once the time is up."""
    d = make_data(case)
    inputs: list[Any] = [x if x is None else x.detach() for x in (d.q, d.k_a, d.v_a, d.k_b, d.v_b)]
    inputs += (None, d.mask) if masked else (d.length, None)
    inputs.append(case.D**-0.5)
    o, lse = split_attention_fwd(*inputs)
    saved: list[Any] = [d.do, *inputs[:-1], o, lse, inputs[-1], False, kernel == "dkv"]

    def launch() -> None:
        if kernel == "fwd":
            split_attention_fwd(*inputs)
        else:  # "dkv" is dq and dkv together: there is no dkv without dq's delta
            split_attention_bwd(*saved)

    figures: dict[str, float | str] = {}
    for candidate in CANDIDATES[kernel]:
        if time.monotonic() > deadline:
            return None
        try:
            with override(**{kernel: Config(*candidate)}):
                figures[str(candidate)] = timed(launch)[0]
        except Exception as error:  # a candidate may not fit this GPU: its line says so
            figures[str(candidate)] = f"{type(error).__name__}: {str(error)[:80]}"
    ordered = dict(sorted(figures.items(), key=lambda item: (isinstance(item[1], str), item[1])))
    table = str(tuple(select(kernel, d.q, masked)))
    return {"case": case.name, "B": case.B, "kernel": kernel, "masked": masked, "table": table, "ms": ordered}


def run_sweep(tiny: bool) -> list[dict[str, Any]]:
    deadline = time.monotonic() + SWEEP_SECONDS
    suffix, prefix = suffix_cases(tiny), prefix_cases(tiny)
    plan = [
        *[(case, kernel, False) for kernel in ("fwd", "dq", "dkv") for case in reversed(suffix)],
        (prefix[1], "fwd", False),
        (suffix[-1], "fwd", True),
        (suffix[-1], "dq", True),
        (prefix[1], "fwd", True),
    ]
    found = []
    for case, kernel, masked in plan:
        result = sweep(case, kernel, masked, deadline)
        if result is None:
            print(f"sweep: {SWEEP_SECONDS} s are over, the rest of the plan was not run")
            break
        found.append(result)
    return found


def suffix_cases(tiny: bool) -> list[Case]:
    if tiny:
        common: dict[str, Any] = {
            "R": 16,
            "NA": 20,
            "NB": 3,
            "D": 16,
            "device": "cpu",
            "dtype": torch.float32,
        }
        return [Case(name="suffix", B=B, **common) for B in (1, 2)]
    common = {"R": 400, "NA": 576, "NB": 50, "D": 256, "device": "cuda", "dtype": torch.bfloat16}
    return [Case(name="suffix", B=B, **common) for B in (8, 32, 128)]


def prefix_cases(tiny: bool) -> list[Case]:
    if tiny:
        common: dict[str, Any] = {"R": 32, "NA": 4, "NB": 0, "D": 16, "device": "cpu", "dtype": torch.float32}
        return [Case(name="prefix", B=B, **common) for B in (1, 2)]
    common = {"R": 576 * 8, "NA": 576, "NB": 0, "D": 256, "device": "cuda", "dtype": torch.bfloat16}
    return [Case(name="prefix", B=B, **common) for B in (32, 64, 128)]


def environment() -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": machine.versions(),
        "cudnn": torch.backends.cudnn.version(),
        "commit": machine.commit(),
        "command": machine.command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def table_of(rows: list[Row]) -> str:
    """One line an arm: time, TF/s, error, and how many times faster than each SDPA arm of the same case."""
    lines = [
        f"{'case':8}{'B':>4} {'what':8} {'arm':13}{'ms':>8}{'TF/s':>7}{'error':>9}"
        f"{'/sdpa':>7}{'/masked':>9}{'eager ms':>10}"
    ]
    peers = {(r.case, r.B, r.what, r.arm): r.median_ms for r in rows}
    for r in rows:
        head = f"{r.case:8}{r.B:4} {r.what:8} {r.arm:13}"
        if r.median_ms is None:
            lines.append(f"{head} no figure: error {r.error:.2e}, allowed {r.error_allowed:.2e}")
            continue
        ratios = [peers[r.case, r.B, r.what, arm] for arm in ("sdpa", "sdpa, mask")]
        shown = ["-" if ms is None else f"{ms / r.median_ms:.2f}" for ms in ratios]
        lines.append(
            f"{head}{r.median_ms:8.3f}{r.tflops:7.0f}{r.error:9.1e}"
            f"{shown[0]:>7}{shown[1]:>9}{r.eager_ms:10.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of split_attention against SDPA.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    plan = [(c, backward) for c in suffix_cases(options.tiny) for backward in (False, True)]
    plan += [(c, False) for c in prefix_cases(options.tiny)]
    rows = [row for case, backward in plan for row in measure(case, backward)]
    found = run_sweep(options.tiny) if options.sweep else []
    result = {
        "environment": environment(),
        "kernel_error": module.KERNEL_ERROR,
        "rows": [asdict(row) for row in rows],
        "sweep": found,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for entry in found:
        figures = ", ".join(f"{k} {v if isinstance(v, str) else round(v, 4)}" for k, v in entry["ms"].items())
        print(f"{entry['case']} B {entry['B']} {entry['kernel']} masked={entry['masked']}: {figures}")
    print(table_of(rows))


if __name__ == "__main__":
    main()
