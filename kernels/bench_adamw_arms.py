"""What `bench_adamw` compares: one list's tensors, and the optimizers that update them.

All arms of a list work on the same parameters, gradients and moments (those with moments of another dtype on
moments of their own), so that a list needs its memory once and arms can alternate. Only the step counts are
each arm's own: `Arm.reset` brings everything back to the start of training.
"""

import importlib
import importlib.util
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from somaspeed_patch.kernels.bench_adamw_models import Entry
from somaspeed_patch.optim import FusedAdamW

HYPER: dict[str, Any] = {"lr": 2.5e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}  # of pi0.5
MAX_NORM = 1.0
GRAD_NORM = 4.0  # of every list's gradients, so that clipping is active
WEIGHT_STD = 0.02
COMPILE_SECONDS = 60.0
WIDE = "ours, fp32 moments"
ARMS = (
    "for-loop", "foreach", "fused", "fused, graph", "compiled", "deepspeed", "ours", "ours, graph", WIDE,
)  # fmt: skip


class Missing(Exception):
    """An arm that cannot run here, and why."""


class _Late(BaseException):
    """Time is up; no Exception, because the compiler catches those and goes on."""


class Problem:
    """The tensors of one list on `device`, filled from fixed seeds."""

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
        self.device = device
        self.params = [
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape, dtype in entries
        ]
        self.grads = [torch.empty_like(param) for param in self.params]
        self.elements = sum(param.numel() for param in self.params)
        self.low = any(param.dtype != torch.float32 for param in self.params)
        self._moments: dict[torch.dtype | None, tuple[list[Tensor], list[Tensor]]] = {}
        self.use_own_gradients()

    def moments(self, dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor]]:
        """exp_avg and exp_avg_sq of every parameter, in `dtype` or the parameter's."""
        if dtype not in self._moments:
            first, second = (
                [torch.zeros_like(param, dtype=dtype, requires_grad=False) for param in self.params]
                for _ in range(2)
            )
            self._moments[dtype] = (first, second)
        return self._moments[dtype]

    def method_bytes(self, moments_dtype: torch.dtype | None) -> int:
        """Bytes that one clip and step of ours move: g twice; p, m and v read and written."""
        return sum(
            param.numel() * (4 * param.element_size() + 4 * (moments_dtype or param.dtype).itemsize)
            for param in self.params
        )

    def held_bytes(self, moments_dtype: torch.dtype | None) -> int:
        """Bytes of parameters, gradients and moments."""
        return self.method_bytes(moments_dtype) // 2

    @torch.no_grad()
    def fill_params(self) -> None:
        """The weights before training: N(0, WEIGHT_STD)."""
        generator = torch.Generator(self.device).manual_seed(0)
        for param in self.params:
            param.normal_(0, WEIGHT_STD, generator=generator)

    def fill_gradients(self, step: int) -> None:
        """The gradients of update `step`, in place: normal, of global norm GRAD_NORM."""
        generator = self._of_step(step)
        for grad in self.grads:
            grad.normal_(0, self._grad_std, generator=generator)

    def gradients_are(self, step: int) -> bool:
        """Whether every bit is still what `fill_gradients` wrote."""
        generator = self._of_step(step)
        return all(
            torch.equal(grad, torch.empty_like(grad).normal_(0, self._grad_std, generator=generator))
            for grad in self.grads
        )

    def use_own_gradients(self) -> None:
        """Give the parameters the gradients in `grads`."""
        self._give(self.grads)

    def move_gradients(self) -> None:
        """Give the parameters copies of `grads` at addresses that their last ones do not have."""
        self._give([grad.clone() for grad in self.grads])  # the last copies are freed only after this

    def _give(self, grads: list[Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    @property
    def _grad_std(self) -> float:
        return GRAD_NORM / math.sqrt(self.elements)

    def _of_step(self, step: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 + step)


@dataclass(kw_only=True)
class Arm:
    """One way to clip and update a problem."""

    name: str
    problem: Problem
    optimizer: torch.optim.Optimizer
    call: Callable[[], Tensor]
    """One clip and step; returns the norm."""
    moments_dtype: torch.dtype | None = None
    compile_s: float | None = None

    @property
    def ours(self) -> bool:
        return isinstance(self.optimizer, FusedAdamW)

    def reset(self) -> None:
        """Weights, moments and step counts as before the first update; gradients of update 1."""
        self.problem.fill_params()
        self.problem.fill_gradients(1)
        for group in self.optimizer.param_groups:
            if "step" in group:  # DeepSpeed's
                group["step"] = 0
        for entry in self.optimizer.state.values():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    value.zero_()
                else:
                    entry[name] = 0


def sync(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(name: str, problem: Problem, seconds: float) -> Arm:
    """The arm of this name, its state adopted, ready to be reset.

    Args:
        seconds: that compiling may take.

    Raises: Missing: it cannot run here.
    """
    makers: dict[str, Callable[[], Arm]] = {
        "for-loop": partial(_torch, name, problem, foreach=False, fused=False),
        "foreach": partial(_torch, name, problem, foreach=True),
        "fused": partial(_torch, name, problem, fused=True),
        "fused, graph": lambda: _captured(_torch(name, problem, fused=True, capturable=True)),
        "compiled": partial(_compiled, name, problem, seconds),
        "deepspeed": partial(_deepspeed, name, problem),
        "ours": partial(_ours, name, problem),
        "ours, graph": lambda: _captured(_ours(name, problem)),
        WIDE: partial(_ours, name, problem, torch.float32),
    }
    return makers[name]()


def _torch(name: str, problem: Problem, **options: Any) -> Arm:
    if problem.device.type == "cpu":
        options["capturable"] = False  # torch has it on accelerators only
    optimizer = torch.optim.AdamW(problem.params, **HYPER, **options)
    on_device = options.get("fused", False) or options.get("capturable", False)
    _adopt(optimizer, problem, torch.zeros((), device=problem.device if on_device else "cpu"))
    return Arm(
        name=name,
        problem=problem,
        optimizer=optimizer,
        call=partial(_clip_then, problem, optimizer.step),
    )


def _clip_then(problem: Problem, step: Callable[[], Any]) -> Tensor:
    foreach = True if problem.device.type == "cuda" else None  # torch refuses it on a CPU
    norm = nn.utils.clip_grad_norm_(problem.params, MAX_NORM, foreach=foreach)
    step()
    return norm


def _compiled(name: str, problem: Problem, seconds: float) -> Arm:
    if seconds <= 0:
        raise Missing("not compiled: the other lists used up the time for it")
    arm = _torch(name, problem, foreach=True, capturable=True)
    backend = "inductor" if problem.device.type == "cuda" else "eager"
    arm.call = partial(_clip_then, problem, torch.compile(arm.optimizer.step, backend=backend))
    arm.reset()
    start = time.perf_counter()
    with time_limit(seconds, f"not compiled within {seconds:.0f} s"):
        arm.call()
        arm.call()
        sync(problem.device)
    arm.compile_s = time.perf_counter() - start
    return arm


def _deepspeed(name: str, problem: Problem) -> Arm:
    if importlib.util.find_spec("deepspeed") is None:
        raise Missing("not installed")
    with time_limit(COMPILE_SECONDS, f"its kernels were not built within {COMPILE_SECONDS:.0f} s"):
        optimizer = importlib.import_module("deepspeed.ops.adam").FusedAdam(problem.params, **HYPER)
    _adopt(optimizer, problem, 0)
    call = partial(_clip_then, problem, optimizer.step)
    return Arm(name=name, problem=problem, optimizer=optimizer, call=call)


def _ours(name: str, problem: Problem, moments_dtype: torch.dtype | None = None) -> Arm:
    optimizer = FusedAdamW(problem.params, **HYPER, moments_dtype=moments_dtype)
    _adopt(optimizer, problem, torch.zeros((), device=problem.device), moments_dtype)

    def call() -> Tensor:
        norm = optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        return norm

    arm = Arm(name=name, problem=problem, optimizer=optimizer, call=call, moments_dtype=moments_dtype)
    arm.reset()
    call()
    if reason := optimizer.native_reason():
        raise Missing(f"the kernels do not run: {reason}")
    return arm


def _adopt(
    optimizer: torch.optim.Optimizer, problem: Problem, step: Tensor | int, dtype: torch.dtype | None = None
) -> None:
    """Make the problem's moments the optimizer's state."""
    for param, exp_avg, exp_avg_sq in zip(problem.params, *problem.moments(dtype), strict=True):
        count = step.clone() if isinstance(step, Tensor) else step
        optimizer.state[param] = {"step": count, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _captured(arm: Arm) -> Arm:
    """The arm replayed from a CUDA graph."""
    if arm.problem.device.type != "cuda":
        raise Missing("a CUDA graph needs CUDA")
    arm.reset()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        arm.call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = arm.call()

    def replay() -> Tensor:
        graph.replay()
        return norm

    arm.call = replay
    return arm


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """End the body after `seconds`, on the main thread.

    Raises: Missing: with `message`, the time was up.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Late

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    # again every second: an exception in a callback of C code is printed and forgotten
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    except _Late:
        raise Missing(message) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer:  # pytest's own limit, for one
            left = outer - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01), interval)
