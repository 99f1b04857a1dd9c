"""Benchmark of `FusedAdamW`, clip and step, against torch's AdamW at the parameter lists of three models.

    python -m somaspeed_patch.kernels.bench_adamw --out FILE.json [--only NAME ...] [--tiny]

Lists: see `bench_adamw_models`; pi05, molmoact2 and groot are what those models train. Every arm of torch and
DeepSpeed stands behind torch.nn.utils.clip_grad_norm_(foreach=True); all arms update the same tensors.
Method: `bench_adamw_gate` comes first: three clipped updates against fp64; an arm of ours that is off by more
than twice torch's fused AdamW, writes a gradient, gives other bits in a second run, or whose state does not
go through torch.optim.AdamW and back gets no time. Then the arms run in ABBA order.
ms: between CUDA events around one call, as called from Python or replayed from a CUDA graph; median, and
p20/p80 over both rounds; a list is many times the L2 cache, so none is cleared. GB/s counts the bytes that
our method moves, whatever an arm does; "of copy" is their share of what a device copy reaches in this run.
cpu ms: time on the host of one call, not waiting for the device, which is idle before; "moved": with all
gradients at other addresses than the step before, as zero_grad(set_to_none) leaves them.
torch.compile may take 60 s a list and --compile-seconds in all. Without --only the script also measures
`bench_adamw_bf16`. --tiny tries it on a CPU, two lists by default; it needs TRITON_INTERPRET=1, and its
figures mean nothing.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch.kernels import bench_adamw_gate as gate
from somaspeed_patch.kernels import bench_adamw_models as models
from somaspeed_patch.kernels.adamw import INTERPRETED
from somaspeed_patch.kernels.bench_adamw_arms import (
    ARMS,
    COMPILE_SECONDS,
    HYPER,
    MAX_NORM,
    WIDE,
    Arm,
    Missing,
    Problem,
    build,
    sync,
)
from somaspeed_patch.kernels.bench_adamw_bf16 import bf16_updates
from somaspeed_patch.kernels.bench_adamw_host import host_profile
from somaspeed_patch.kernels.bench_split_attention import environment

BF16 = "bf16_updates"
TINY = ("pi05", "small", BF16)
COMPILE_BUDGET = 90.0  # seconds for all lists: the whole run is to stay below 240
DEVICE_MS = 120.0  # of calls a round, but 5 to 50 of them
HOST_CALLS, HOST_SECONDS = 30, 4.0  # a slower arm gets fewer calls, at least 5
GIB = float(1 << 30)


@dataclass(kw_only=True)
class Row:
    """One arm's figures on one list."""

    list_name: str
    arm: str
    status: str = "not run"
    """"timed", or why there is no time."""
    errors: dict[str, float] = field(default_factory=dict)
    """By quantity and dtype, against fp64; see `bench_adamw_gate`."""
    errors_allowed: dict[str, float] = field(default_factory=dict)
    """For an arm of ours; what it is for others is for comparison only."""
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    medians_ms: list[float] = field(default_factory=list)
    gb_s: float | None = None
    of_copy: float | None = None
    cpu_ms: float | None = None
    cpu_calls: int = 0
    cpu_moved_ms: float | None = None
    held_gib: float = 0.0
    """Parameters, gradients and moments."""
    peak_gib: float | None = None
    """Those and what one call adds for its duration; None for a graph, whose memory is in a pool."""
    compile_s: float | None = None


def timed(call: Callable[[], Any], device: torch.device) -> list[float]:
    """ms of one call each, 5 to 50 calls; off CUDA one call by the clock."""
    if device.type != "cuda":
        return [1e3 * _seconds(call)]
    sync(device)
    call()
    estimate = max(_between_events(call, 2)) or 1e-3
    return _between_events(call, min(50, max(5, int(DEVICE_MS / estimate))))


def _between_events(call: Callable[[], Any], count: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def host_times(arm: Arm, before: Callable[[], Any], calls: int) -> list[float]:
    """ms on the host of up to `calls` calls; `before` and waiting for the device are not counted."""
    times: list[float] = []
    deadline = time.monotonic() + HOST_SECONDS
    while len(times) < calls and (len(times) < 5 or time.monotonic() < deadline):
        before()
        sync(arm.problem.device)
        times.append(1e3 * _seconds(arm.call))
    sync(arm.problem.device)
    return times


def peak_gib(arm: Arm) -> float | None:
    """What the arm's tensors and one call take at most; None off CUDA and for a graph."""
    if arm.problem.device.type != "cuda" or arm.name.endswith("graph"):
        return None
    sync(arm.problem.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    arm.call()
    sync(arm.problem.device)
    added = torch.cuda.max_memory_allocated() - before
    return (arm.problem.held_bytes(arm.moments_dtype) + added) / GIB


def copy_gb_s(device: torch.device) -> float:
    """Bytes read and written by a large fp32 copy, GB/s."""
    source = torch.zeros(1 << (29 if device.type == "cuda" else 16), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source), device)) / 1e6


class Measurement:
    """Runs lists on one device, within one budget of compile time."""

    def __init__(self, device: torch.device, compile_s: float) -> None:
        self.device = device
        self.copy_gb_s = copy_gb_s(device)
        self._compile_s = compile_s
        self._calls = HOST_CALLS if device.type == "cuda" else 1

    def measure(self, name: str, entries: Sequence[models.Entry]) -> dict[str, Any]:
        """All arms of one list: the gate first, then times, host times and memory of what passed it."""
        problem = Problem(entries, self.device)
        truth = gate.truth_of(problem)
        round_trip = gate.round_trip(problem, truth.places)
        rows = {arm: Row(list_name=name, arm=arm) for arm in ARMS if arm != WIDE or problem.low}
        arms = [arm for row in rows.values() if (arm := self._build(row, problem)) is not None]
        green = self._gated(arms, rows, truth, round_trip["passed"])
        self._time(green, rows)
        for arm in green:
            _attempt(rows[arm.name], self._host_and_memory, arm, rows[arm.name])
        return {
            "name": name,
            "tensors": len(entries),
            "elements": problem.elements,
            "checked_elements": sum(problem.params[place].numel() for place in truth.places),
            "gradient_norms": truth.norms,
            "round_trip": round_trip,
            "rows": [asdict(row) for row in rows.values()],
        }

    def _build(self, row: Row, problem: Problem) -> Arm | None:
        limit = min(COMPILE_SECONDS, self._compile_s)
        start = time.monotonic()
        arm: Arm | None = _attempt(row, build, row.arm, problem, limit)
        if row.arm == "compiled":
            self._compile_s -= time.monotonic() - start
        if arm is not None:
            row.compile_s, row.held_gib = arm.compile_s, problem.held_bytes(arm.moments_dtype) / GIB
        return arm

    def _gated(
        self, arms: Sequence[Arm], rows: dict[str, Row], truth: gate.Truth, state_travels: bool
    ) -> list[Arm]:
        fused = next((arm for arm in arms if arm.name == "fused"), None)
        if fused is None:
            why = rows["fused"].status if "fused" in rows else "it is not in ARMS"
            raise RuntimeError(f"bench_adamw: there is no gate without torch's fused AdamW, and {why}")
        native = gate.errors(gate.run(fused, truth), truth)
        green = []
        for arm in arms:
            row = rows[arm.name]
            found = _attempt(row, gate.verdict, arm, truth, native)
            if found is None:
                continue
            row.errors, row.errors_allowed, wrong = found
            if arm.ours and not state_travels:
                wrong.append("its state does not come through torch.optim.AdamW")
            row.status = f"no time: {'; '.join(wrong)}" if wrong else "timed"
            if not wrong:
                green.append(arm)
        return green

    def _time(self, arms: Sequence[Arm], rows: dict[str, Row]) -> None:
        rounds: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
        for arm in [*arms, *reversed(arms)]:
            times = _attempt(rows[arm.name], timed, arm.call, self.device)
            if times is not None:
                rounds[arm.name].append(times)
        for arm in arms:
            if len(rounds[arm.name]) == 2:
                self._summarize(rows[arm.name], arm, rounds[arm.name])

    def _summarize(self, row: Row, arm: Arm, rounds: list[list[float]]) -> None:
        lows, medians, highs = zip(*map(quantiles, rounds), strict=True)
        row.p20_ms, row.median_ms, row.p80_ms = min(lows), statistics.mean(medians), max(highs)
        row.medians_ms = list(medians)
        row.gb_s = arm.problem.method_bytes(arm.moments_dtype) / row.median_ms / 1e6
        row.of_copy = row.gb_s / self.copy_gb_s

    def _host_and_memory(self, arm: Arm, row: Row) -> None:
        times = host_times(arm, lambda: None, self._calls)
        row.cpu_ms, row.cpu_calls = statistics.median(times), len(times)
        row.peak_gib = peak_gib(arm)
        if arm.ours and not arm.name.endswith("graph"):
            row.cpu_moved_ms = statistics.median(host_times(arm, arm.problem.move_gradients, self._calls))
            arm.problem.use_own_gradients()


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """p20, median, p80."""
    low, median, high = torch.tensor(times, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return float(low), float(median), float(high)


def _attempt(row: Row, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; None, with the reason in the row, if it fails: the others go on."""
    try:
        return function(*arguments)
    except Missing as missing:
        row.status = str(missing)
    except Exception as error:  # compilers, builders and drivers share no base class
        row.status = f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _clean(device: torch.device) -> None:
    """Free what the last list took; its optimizers hold each other in cycles."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table_of(lists: Sequence[dict[str, Any]]) -> str:
    """One line a list and arm."""
    lines = [
        f"{'list':15}{'arm':19}{'ms':>9}{'p20':>9}{'p80':>9}{'/ours':>7}{'GB/s':>6}{'of copy':>8}"
        f"{'cpu ms':>9}{'moved':>9}{'peak GiB':>9}"
    ]
    for entry in lists:
        ours = next(row["median_ms"] for row in entry["rows"] if row["arm"] == "ours")
        for row in entry["rows"]:
            lines.append(f"{row['list_name']:15}{row['arm']:19}{_figures(row, ours)}")
    return "\n".join(lines)


def _figures(row: dict[str, Any], ours: float | None) -> str:
    if row["median_ms"] is None:
        return f"- {row['status']}"

    def shown(value: float | None, width: int, digits: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"

    ratio = None if ours is None else row["median_ms"] / ours
    return (
        "".join(shown(row[key], 9, 3) for key in ("median_ms", "p20_ms", "p80_ms"))
        + shown(ratio, 7, 2) + shown(row["gb_s"], 6, 0) + shown(row["of_copy"], 8, 2)
        + shown(row["cpu_ms"], 9, 3) + shown(row["cpu_moved_ms"], 9, 3) + shown(row["peak_gib"], 9, 2)
    )  # fmt: skip


def run(chosen: Sequence[str], compile_s: float, tiny: bool) -> dict[str, Any]:
    """The result of these lists, and of the bf16 section if `chosen` names it.

    Args:
        compile_s: seconds that torch.compile may take for all lists together.
    """
    device = torch.device("cpu" if tiny else "cuda")
    start = time.monotonic()
    measurement = Measurement(device, compile_s)
    lists = []
    for name in chosen:
        if name == BF16:
            continue
        entries = models.shrunk(models.load(name)) if tiny else models.load(name)
        lists.append(measurement.measure(name, entries))
        _clean(device)
        print(f"{name}: done after {time.monotonic() - start:.0f} s", flush=True)
    updates = bf16_updates(device, tiny) if BF16 in chosen else None
    host = host_profile(device, num_params=2, repeats=1) if tiny else host_profile(device)
    return {
        "environment": environment(),
        "seconds": time.monotonic() - start,
        "copy_gb_s": measurement.copy_gb_s,
        "hyperparameters": {**HYPER, "max_norm": MAX_NORM},
        "gate_updates": gate.STEPS,
        "lists": lists,
        BF16: updates,
        "host": host,
    }


def main(arguments: list[str] | None = None) -> None:
    names = [*models.names(), BF16]
    parser = argparse.ArgumentParser(description="Benchmark of FusedAdamW against torch's AdamW.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--compile-seconds", type=float, default=COMPILE_BUDGET, help="for torch.compile, of all lists"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny and not INTERPRETED:
        parser.error("--tiny runs on a CPU: set TRITON_INTERPRET=1")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible; --tiny tries the script on a CPU")
    chosen = options.only or (TINY if options.tiny else names)
    result = run(chosen, options.compile_seconds, options.tiny)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for arm in (result[BF16] or {}).get("arms", []):
        print(f"bf16 at lr 2.5e-5, {arm['arm']}: {arm['fraction']:.3f} of the movement of fp32 weights")
    print(table_of(result["lists"]))


if __name__ == "__main__":
    main()
