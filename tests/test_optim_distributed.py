"""FusedAdamW on several real processes, under DDP, FSDP2 and HSDP, against one process with torch's AdamW.

Checked: the norm at each step, equal on all ranks; final weights within twice the error of torch's AdamW in
the same layout; accumulation; parameters beside the mesh or on another mesh; parameters that accelerate
exchanged; NaN on one rank only.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from somaspeed_patch import testing_distributed as ranks
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.optim.fused_adamw import CALLS
from somaspeed_patch.testing_distributed import Net

STEPS = range(6)
Results = dict[str, Any]


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net, find_unused_parameters=True)


def ddp_with_views(net: Net) -> nn.Module:
    """Gradients are views into one tensor, and share its version counter."""
    return DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)


def fsdp(net: Net) -> nn.Module:
    return ranks.shard(net, mesh_1d())


def hsdp(net: Net) -> nn.Module:
    return ranks.shard(net, mesh_2d())


def beside(net: Net) -> nn.Module:
    """One parameter is no DTensor, and its gradient is averaged by hand."""

    def average(param: Tensor) -> None:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    net.branch.weight.register_post_accumulate_grad_hook(average)
    return ranks.shard(net, mesh_1d(), ignored_params={net.branch.weight})


def two_meshes(net: Net) -> nn.Module:
    fully_shard(net.mid, mesh=mesh_1d())
    fully_shard(net.embed, mesh=mesh_2d())
    return fully_shard(net, mesh=mesh_2d())


@dataclass(frozen=True)
class Layout:
    """A way to spread the model over `world` ranks."""

    world: int
    wrap: Callable[[Net], nn.Module]
    microbatches: int = 1
    exchanged: bool = False
    """The optimizer is made first, and gets the sharded parameters later."""
    native: str | None = None
    """The layout whose native run gives the budget, where torch's clipping does not serve this one."""


LAYOUTS = {
    "ddp": Layout(2, ddp),
    "ddp, accumulated": Layout(2, ddp_with_views, microbatches=2),
    "1x2": Layout(2, fsdp),
    "1x2, accumulated": Layout(2, fsdp, microbatches=2),
    "1x2, plain parameter beside": Layout(2, beside, native="1x2"),
    "1x2, exchanged": Layout(2, fsdp, exchanged=True, native="1x2"),
    "1x4": Layout(4, fsdp),
    "2x2": Layout(4, hsdp),
    "2x2 and 1x4": Layout(4, two_meshes, native="2x2"),
}
POISONED = ("ddp", "1x2", "2x2")


def build(layout: Layout, kind: type[torch.optim.AdamW], **options: Any) -> tuple[nn.Module, Any]:
    net = Net()
    if not layout.exchanged:
        model = layout.wrap(net)
        return model, kind(ranks.param_groups(net), **ranks.OPTIONS, **options)
    optimizer = kind(ranks.param_groups(net), **ranks.OPTIONS, **options)
    names = {param.data_ptr(): name for name, param in net.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [placeholder(param) for param in group["params"]]
    model = layout.wrap(net)
    params = dict(net.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [params[names[one.data_ptr]] for one in group["params"]]
    return model, optimizer


def placeholder(param: Tensor) -> Tensor:
    """What accelerate 1.15 (`Accelerator._prepare_fsdp2`) has in the optimizer while it shards the model."""
    empty = torch.empty(1, dtype=param.dtype)
    empty.data_ptr = param.data_ptr()
    return empty


def train(layout: Layout, kind: type[torch.optim.AdamW]) -> Results:
    model, optimizer = build(layout, kind)
    fused_before, norms = CALLS["triton"], []
    for step in STEPS:
        for microbatch in range(layout.microbatches):
            last = microbatch == layout.microbatches - 1
            deferred = not last and isinstance(model, DistributedDataParallel)
            with model.no_sync() if deferred else nullcontext():
                backward(model, step, microbatch, layout.microbatches)
        norms.append(ranks.update(optimizer))
    return {
        "norms": torch.stack(norms),
        "weights": ranks.weights(inner(model)),
        "without_state": [n for n, p in inner(model).named_parameters() if not optimizer.state.get(p)],
        "fused_steps": CALLS["triton"] - fused_before,
    }


def backward(model: nn.Module, step: int, microbatch: int = 0, of: int = 1) -> None:
    ranks.backward(model, step, dist.get_rank(), dist.get_world_size(), microbatch, of)


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's weights, moments and step counts."""
    held = [*inner(model).parameters()]
    held += [value for entry in optimizer.state.values() for value in entry.values()]
    return [local(tensor).detach().clone() for tensor in held]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def poison(model: nn.Module) -> None:
    """NaN in one element of one gradient, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        local(inner(model).mid.weight.grad)[0, 0] = torch.nan


def skipping(layout: Layout, clipped: bool) -> Results:
    """A good step, one that is skipped, and a good one; and the two good ones alone."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("somaspeed_patch").addHandler(handler)
    max_norm = ranks.MAX_NORM if clipped else None
    model, optimizer = build(layout, FusedAdamW, nonfinite="skip")
    step_once(model, optimizer, 0, max_norm)
    before = snapshot(model, optimizer)
    step_once(model, optimizer, 1, max_norm, prepare=poison)
    after = snapshot(model, optimizer)
    step_once(model, optimizer, 2, max_norm)
    optimizer.skipped.poll(wait=True)
    logging.getLogger("somaspeed_patch").removeHandler(handler)
    clean, other = build(layout, FusedAdamW, nonfinite="skip")
    step_once(clean, other, 0, max_norm)
    step_once(clean, other, 2, max_norm)
    return {
        "untouched": same(before, after),
        "as_if_it_had_not_been": same(snapshot(clean, other), snapshot(model, optimizer)),
        "count": optimizer.skipped.count,
        "messages": messages,
    }


def step_once(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    max_norm: float | None = ranks.MAX_NORM,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> Tensor | None:
    backward(model, step)
    prepare(model)
    norm = None if max_norm is None else ranks.clip(optimizer, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def raising(layout: Layout) -> Results:
    model, optimizer = build(layout, FusedAdamW, nonfinite="raise")
    step_once(model, optimizer, 0)
    before, error = snapshot(model, optimizer), ""
    try:
        step_once(model, optimizer, 1, prepare=poison)
    except RuntimeError as caught:
        error = str(caught)
    return {"error": error, "untouched": same(before, snapshot(model, optimizer))}


def propagating(kind: type[torch.optim.AdamW]) -> Results:
    model, optimizer = build(LAYOUTS["1x2"], kind)
    norm = step_once(model, optimizer, 0, prepare=poison)
    return {"norm": norm, "weights": ranks.weights(model)}


def scenarios(world: int) -> dict[str, Callable[[], Any]]:
    here = {name: layout for name, layout in LAYOUTS.items() if layout.world == world}
    found: dict[str, Callable[[], Any]] = {}
    for name, layout in here.items():
        found[name] = partial(train, layout, FusedAdamW)
        if layout.native is None:
            found[f"{name}, native"] = partial(train, layout, torch.optim.AdamW)
        if name in POISONED:
            # once without clipping: then `step` has to measure the norm itself
            found[f"{name}, skipped"] = partial(skipping, layout, clipped=name != "1x2")
            found[f"{name}, raised"] = partial(raising, layout)
    if world == 2:
        found["propagated"] = partial(propagating, FusedAdamW)
        found["propagated, native"] = partial(propagating, torch.optim.AdamW)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Results]]:
    """Of each scenario: what each rank found."""
    return ranks.run_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def truth() -> Results:
    return ranks.train_alone(torch.float64, STEPS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_are_those_of_one_process(results: dict[str, list[Results]], name: str) -> None:
    alone = ranks.train_alone(torch.float32, STEPS)["norms"]
    norms = results[name][0]["norms"]
    assert norms.dtype == torch.float32 and alone.min() > 5 * ranks.MAX_NORM
    torch.testing.assert_close(norms, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_those_of_one_process(
    results: dict[str, list[Results]], truth: Results, name: str
) -> None:
    native = results[f"{LAYOUTS[name].native or name}, native"][0]["weights"]
    allowed = ranks.budget(native, truth["weights"])
    error = (ranks.flat(results[name][0]["weights"]) - ranks.flat(truth["weights"])).abs().max()
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def test_a_clip_that_is_off_by_a_thousandth_would_be_seen(
    results: dict[str, list[Results]], truth: Results
) -> None:
    wrong = ranks.train_alone(torch.float64, STEPS, max_norm=1.001 * ranks.MAX_NORM)["weights"]
    error = (ranks.flat(wrong) - ranks.flat(truth["weights"])).abs().max()
    for name in ("ddp", "1x2", "1x4", "2x2"):
        assert error > 10 * ranks.budget(results[f"{name}, native"][0]["weights"], truth["weights"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_have_the_same_bits(results: dict[str, list[Results]], name: str) -> None:
    first, *others = results[name]
    assert len(others) == LAYOUTS[name].world - 1
    for other in others:
        assert torch.equal(other["norms"], first["norms"])
        assert same(other["weights"].values(), first["weights"].values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kernels_ran_and_left_parameters_without_gradients_alone(
    results: dict[str, list[Results]], name: str
) -> None:
    start = ranks.weights(Net())
    for rank in results[name]:
        assert rank["fused_steps"] == len(STEPS)
        assert rank["without_state"] == ["frozen", "unused"]
        assert torch.equal(rank["weights"]["frozen"], start["frozen"])
        assert torch.equal(rank["weights"]["unused"], start["unused"])


@pytest.mark.parametrize("name", POISONED)
def test_a_nan_on_one_rank_skips_the_step_on_all(results: dict[str, list[Results]], name: str) -> None:
    for rank in results[f"{name}, skipped"]:
        assert rank["untouched"] and rank["as_if_it_had_not_been"]
        assert rank["count"] == 1


@pytest.mark.parametrize(("name", "knowing"), [("ddp", [1]), ("1x2", [0, 1]), ("2x2", [2, 3])])
def test_ranks_that_share_the_parameter_name_it(
    results: dict[str, list[Results]], name: str, knowing: list[int]
) -> None:
    skipped, raised = results[f"{name}, skipped"], results[f"{name}, raised"]
    for rank in range(LAYOUTS[name].world):
        culprit = "mid.weight" if rank in knowing else "a parameter of another rank"
        message = f"FusedAdamW: step skipped, non-finite gradient, first in {culprit}"
        assert skipped[rank]["messages"] == [message]
        assert f"first in {culprit}; nothing was updated" in raised[rank]["error"]
        assert raised[rank]["untouched"]


def test_a_nan_propagates_to_every_rank_as_in_torch(results: dict[str, list[Results]]) -> None:
    for ours, native in zip(results["propagated"], results["propagated, native"], strict=True):
        assert ours["norm"].isnan() and native["norm"].isnan()
        for name, weight in native["weights"].items():
            assert torch.equal(ours["weights"][name].isnan(), weight.isnan()), name
        assert ours["weights"]["embed.bias"].isnan().all()


if __name__ == "__main__":
    ranks.serve({world: scenarios(world) for world in (2, 4)})
