"""Training scripts on accelerate's own API, with FusedAdamW built by LeRobot's config, against torch's AdamW.

Checked: every norm and the final weights of each flow, by the kernels and where torch's step has to serve:
accumulation, clipping more or less often than once an update, other norms, generators, subsets, several
optimizers, a skipped step, prepare() after the first steps, LeRobot's scheduler, EMAs. The budget is twice
the error of the unpatched flow against itself in fp64. The report says what was clipped where.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lerobot.optim.optimizers import AdamWConfig
from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import somaspeed_patch
from somaspeed_patch import testing_accelerate
from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.sites import Site, site
from somaspeed_patch.testing_optim import assert_within_budget, error, forget_counts, small_tiles

pytestmark = pytest.mark.skipif(not adamw.INTERPRETED, reason="the kernels reach a CPU in the interpreter")
# An eps that the gradients feel: a wrong clip factor shows.
CONFIG = AdamWConfig(lr=0.02, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.1)
MAX_NORM = 0.3  # the norms are 0.4 to 3
TARGETS = ("lerobot_optimizer", "accelerate_clip")


class Net(nn.Module):
    """A trunk, a head, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(6, 7), nn.Linear(7, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


class Loop:
    """A script: `found` is what is compared."""

    def __init__(self, dtype: torch.dtype, accumulate: int = 1) -> None:
        testing_accelerate.forget()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, step_scheduler_with_optimizer=False
        )
        self.net = Net().to(dtype)
        self.made = CONFIG.build(self.net.parameters())
        self.found: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []
        self.rates: list[float] = []

    def prepare(self) -> None:
        self.model, self.optimizer = self.accelerator.prepare(self.net, self.made)

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(8, width, generator=generator) for width in (6, 1))
        dtype = self.net.unused.dtype
        error = self.model(x.to(dtype)) - (1 + step % 3) * y.to(dtype)
        self.accelerator.backward(error.square().mean())

    def clip(self, parameters: Any = None, *args: Any, **kwargs: Any) -> None:
        parameters = self.model.parameters() if parameters is None else parameters
        norm = self.accelerator.clip_grad_norm_(parameters, MAX_NORM, *args, **kwargs)
        self.norms.append(norm.detach().clone())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def updates(self) -> Iterator[int]:
        """Six steps with their gradients; the update follows what the body does."""
        self.prepare()
        for step in range(6):
            self.backward(step)
            yield step
            self.update()

    def finish(self) -> dict[str, Tensor]:
        norms = {"norms": torch.stack(self.norms)} if self.norms else {}
        weights = {name: value.detach() for name, value in self.net.named_parameters()}
        return {**norms, **weights, **self.found}


@dataclass(frozen=True)
class Flow:
    """A loop's body, and what the report says of its clipping: calls, native calls, why; and of its steps."""

    body: Callable[[Loop], None]
    calls: int
    native: int = 0
    reason: str = ""
    accumulate: int = 1
    steps: int = 6


FLOWS: dict[str, Flow] = {}


def flow(name: str, calls: int, native: int = 0, reason: str = "", **options: int) -> Callable[..., Any]:
    def add(body: Callable[[Loop], None]) -> Callable[[Loop], None]:
        FLOWS[name] = Flow(body, calls, native, reason, **options)
        return body

    return add


@flow("clipped once an update", 6)
def plain_loop(loop: Loop) -> None:
    for _ in loop.updates():
        loop.clip()


@flow("accumulated, clipped where gradients are complete", 4, accumulate=3, steps=4)
def clipped_when_synchronized(loop: Loop) -> None:
    loop.prepare()
    for step in range(12):
        with loop.accelerator.accumulate(loop.model):
            loop.backward(step)
            if loop.accelerator.sync_gradients:
                loop.clip()
            loop.update()


EARLY = "gradients are still being accumulated"


@flow("accumulated, clipped at every backward", 4, 8, EARLY, accumulate=3, steps=4)
def clipped_every_time(loop: Loop) -> None:
    loop.prepare()
    for step in range(12):
        with loop.accelerator.accumulate(loop.model):
            loop.backward(step)
            loop.clip()
            loop.update()


@flow("parameters as a generator, then by keyword", 6)
def generators(loop: Loop) -> None:
    for step in loop.updates():
        if step % 2:
            loop.clip(param for param in loop.model.parameters())
        else:
            norm = loop.accelerator.clip_grad_norm_(parameters=loop.model.parameters(), max_norm=MAX_NORM)
            loop.norms.append(norm.clone())


@flow("a generator that goes to the host", 0, 6, "norm type inf")
def largest_gradient(loop: Loop) -> None:
    for _ in loop.updates():
        loop.clip((param for param in loop.model.parameters()), float("inf"))


@flow("a norm of type 1", 0, 6, "norm type 1")
def absolute_sum(loop: Loop) -> None:
    for _ in loop.updates():
        loop.clip(norm_type=1)


SUBSET = (
    "{} of the clipped parameters with a gradient are not the optimizer's, "
    "{} of the optimizer's are not clipped"
)


@flow("subsets", 2, 4, SUBSET.format(0, 2))
def subsets(loop: Loop) -> None:
    for step in loop.updates():
        loop.clip([loop.model.trunk.parameters(), None, [loop.model.head.weight]][step % 3])


def two_optimizers(loop: Loop, together: bool) -> None:
    other = deepcopy(loop.net)
    second = CONFIG.build(other.parameters())
    loop.prepare()
    prepared, optimizer = loop.accelerator.prepare(other, second)
    for step in range(6):
        loop.backward(step)
        loop.accelerator.backward(prepared(torch.ones(4, 6, dtype=loop.net.unused.dtype)).square().mean())
        if together:
            loop.clip([*loop.model.parameters(), *prepared.parameters()])
        else:
            loop.clip()
            loop.clip(prepared.parameters())
        loop.update()
        optimizer.step()
        optimizer.zero_grad()
    loop.found = {f"second {name}": value.detach() for name, value in other.named_parameters()}


flow("two optimizers, each clipped by itself", 12, steps=12)(lambda loop: two_optimizers(loop, False))
flow("two optimizers, clipped together", 0, 6, SUBSET.format(3, 0), steps=12)(
    lambda loop: two_optimizers(loop, True)
)


@flow("clipped, then dropped", 8)
def dropped(loop: Loop) -> None:
    loop.prepare()
    for step in range(8):
        loop.backward(step)
        loop.clip()
        if step in (2, 5):
            loop.optimizer.zero_grad(set_to_none=step == 2)
        else:
            loop.update()


@flow("clipped, dropped by the model, then not clipped", 6)
def dropped_by_the_model(loop: Loop) -> None:
    loop.prepare()
    for step in range(7):
        loop.backward(step)
        if step != 3:
            loop.clip()
        if step == 2:
            loop.model.zero_grad()
        else:
            loop.update()


@flow("clipped twice", 12)
def twice(loop: Loop) -> None:
    for _ in loop.updates():
        loop.clip()
        loop.clip()


@flow("prepared after the first steps", 3)
def prepared_late(loop: Loop) -> None:
    loop.model, loop.optimizer = loop.net, loop.made
    for step in range(6):
        if step == 3:
            before = deepcopy(loop.made.state_dict()["state"])
            loop.prepare()
            after = loop.made.state_dict()["state"]
            assert all(torch.equal(after[i][name], before[i][name]) for i in before for name in before[i])
        loop.backward(step)
        if step >= 3:
            loop.clip()
        loop.update()


@flow("scheduler and EMAs", 6)
def scheduler_and_ema(loop: Loop) -> None:
    schedule = CosineDecayWithWarmupSchedulerConfig(
        num_warmup_steps=2, num_decay_steps=6, peak_lr=0.02, decay_lr=0.002
    )
    scheduler = schedule.build(loop.made, 6)
    shadow = {name: value.detach().clone() for name, value in loop.net.named_parameters()}

    def follow(*_: Any) -> None:
        for name, value in loop.net.named_parameters():
            shadow[name].lerp_(value.detach(), 0.3)

    loop.made.register_step_post_hook(follow)
    average = AveragedModel(loop.net, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    loop.model, loop.optimizer, scheduler = loop.accelerator.prepare(loop.net, loop.made, scheduler)
    for step in range(6):
        loop.backward(step)
        loop.clip()
        loop.rates.append(loop.optimizer.param_groups[0]["lr"])
        loop.update()
        scheduler.step()
        average.update_parameters(loop.net)
    loop.found = {f"shadow {name}": value for name, value in shadow.items()}
    loop.found |= {f"average {name}": value.detach() for name, value in average.module.named_parameters()}


@dataclass
class Result:
    """What a flow found, and the report's sites of clipping and stepping."""

    found: dict[str, Tensor]
    rates: list[float]
    clip: Site
    step: Site


def run(flow: Flow, dtype: torch.dtype, *targets: str) -> Result:
    forget_counts()
    with small_tiles(64), somaspeed_patch.patched(*targets) if targets else nullcontext():
        loop = Loop(dtype, flow.accumulate)
        flow.body(loop)
        assert type(loop.made) is (FusedAdamW if targets else torch.optim.AdamW)
        somaspeed_patch.report()
        sites = [site(f"accelerate_clip/{name}") for name in ("clip", "optimizer")]
        return Result(loop.finish(), loop.rates, *map(replace, sites))


Natives = dict[str, tuple[Result, Result]]


@pytest.fixture(scope="module")
def natives() -> Natives:
    """Every flow without us: in fp32, and in fp64."""
    return {name: (run(flow, torch.float32), run(flow, torch.float64)) for name, flow in FLOWS.items()}


def assert_same(ours: Result, natives: tuple[Result, Result]) -> None:
    native, truth = natives
    assert ours.rates == native.rates == truth.rates
    assert_within_budget(ours.found, native.found, truth.found)


@pytest.mark.filterwarnings("error:Detected call of")  # of lr_scheduler.step() before optimizer.step()
@pytest.mark.parametrize("name", FLOWS)
def test_the_kernels_do_what_the_host_does(natives: Natives, name: str) -> None:
    flow = FLOWS[name]
    ours = run(flow, torch.float32, *TARGETS)
    assert_same(ours, natives[name])
    assert (ours.clip.calls, ours.clip.native_calls, ours.clip.reason) == (
        flow.calls,
        flow.native,
        flow.reason,
    )
    assert (ours.step.calls, ours.step.native_calls, ours.step.reason) == (flow.steps, 0, "")


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("name", FLOWS)
def test_so_does_torchs_own_step(natives: Natives, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = FLOWS[name]
    monkeypatch.setattr(adamw, "INTERPRETED", False)
    ours = run(flow, torch.float32, *TARGETS)
    assert_same(ours, natives[name])
    assert (ours.clip.calls, ours.clip.native_calls) == (0, flow.calls + flow.native)
    assert (ours.step.calls, ours.step.native_calls) == (0, flow.steps)
    assert ours.step.reason == "torch's step: parameters on cpu"


def test_a_wrong_clip_factor_would_be_seen(natives: Natives) -> None:
    """Each flow differs from another that only clips differently by far more than the budget."""
    native, truth = natives["clipped once an update"]
    for name in ("a norm of type 1", "a generator that goes to the host", "subsets"):
        other = {key: value for key, value in natives[name][0].found.items() if key != "norms"}
        exact = {key: truth.found[key] for key in other}
        assert error(other, exact) > 1000 * error({key: native.found[key] for key in other}, exact)


def test_gradients_written_after_clipping_are_refused_and_nothing_is_updated() -> None:
    with small_tiles(64), somaspeed_patch.patched(*TARGETS):
        loop = Loop(torch.float32)
        loop.prepare()
        before = deepcopy(loop.net.state_dict())
        loop.backward(0)
        loop.clip()
        loop.net.head.weight.grad.add_(1.0)
        with pytest.raises(RuntimeError, match="was written between clip_grad_norm_ and step"):
            loop.optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in loop.net.state_dict().items())


LATER: dict[str, Callable[[Loop], Any]] = {
    "the head alone": lambda loop: loop.clip(loop.model.head.parameters()),
    "by the largest": lambda loop: loop.clip(norm_type=float("inf")),
    "the sum with another backward's": lambda loop: (loop.backward(9), loop.clip()),
    "by value": lambda loop: loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.01),
}


@pytest.mark.parametrize("how", LATER)
def test_what_the_host_clips_again_is_clipped_already(how: str) -> None:
    def body(loop: Loop) -> None:
        for _ in loop.updates():
            loop.clip()
            LATER[how](loop)

    flow = Flow(body, calls=6, native=6)
    natives = run(flow, torch.float32), run(flow, torch.float64)
    assert_same(run(flow, torch.float32, *TARGETS), natives)


def test_one_tensor_is_clipped_as_accelerate_clips_it() -> None:
    """accelerate 1.15 reads a tensor as the list of its rows, which have no gradient: norm 0, no clipping."""

    def norm(*targets: str) -> float:
        with somaspeed_patch.patched(*targets) if targets else nullcontext():
            loop = Loop(torch.float32)
            loop.prepare()
            loop.backward(0)
            loop.clip(loop.model.head.weight)
            return float(loop.norms[0])

    assert norm(*TARGETS) == norm()
