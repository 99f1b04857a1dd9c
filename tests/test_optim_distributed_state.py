"""FusedAdamW's state under FSDP2: where it lives, checkpoints by torch.distributed.checkpoint, random bits.

Checked: moments are sharded as their parameter; a run goes on from a checkpoint on disk as if there had been
none, bit by bit in FusedAdamW, and within twice the error of torch's AdamW where one class loads what the
other saved; the same gradients give the same bits on every mesh, also with stochastic rounding.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from somaspeed_patch import testing_distributed as ranks
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_distributed import Net

BEFORE, AFTER = range(3), range(3, 8)
NATIVE = torch.optim.AdamW
WIDE = {
    "master": {"moments_dtype": torch.float32, "master_weights": True},
    "stochastic": {"moments_dtype": torch.float32, "stochastic_rounding": True},
}
SPREADS: dict[str, dict[str, Any]] = {
    "whole": {"mesh": None},
    "2x1": {"mesh": (2, 1)},
    "1x2": {"mesh": (1, 2)},
    "1x2, one whole": {"mesh": (1, 2), "whole": "mid.weight"},
}
Results = dict[str, Any]


def build(
    kind: type[torch.optim.AdamW],
    dtype: torch.dtype = torch.float32,
    mesh: tuple[int, ...] | None = (2,),
    whole: str | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """A model and its optimizer; `whole` is a parameter that is not sharded."""
    net = Net().to(dtype)
    net.unused.requires_grad_(False)  # a checkpoint wants state for all that could be trained
    if mesh is not None:
        axes = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        ranks.shard(net, axes, ignored_params=set() if whole is None else {net.get_parameter(whole)})
    return net, kind(ranks.param_groups(net), **ranks.OPTIONS, **options)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Results:
    for step in steps:
        ranks.backward(net, step, dist.get_rank(), dist.get_world_size())
        ranks.update(optimizer)
    return {"weights": ranks.weights(net), "state": whole_state(net, optimizer)}


def whole_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": ranks.full(value)
        for name, param in net.named_parameters()
        for key, value in optimizer.state.get(param, {}).items()
    }


def checkpoint(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = dcp_state.get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def save(name: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(checkpoint(net, optimizer), checkpoint_id=Path(sys.argv[1]) / name)


def load(name: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    saved = checkpoint(net, optimizer)
    dcp.load(saved, checkpoint_id=Path(sys.argv[1]) / name)
    dcp_state.set_state_dict(net, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])


def saving(name: str, kind: type[torch.optim.AdamW]) -> Results:
    net, optimizer = build(kind)
    train(net, optimizer, BEFORE)
    save(name, net, optimizer)
    described = {n: describe(p, optimizer.state.get(p, {})) for n, p in net.named_parameters()}
    return {**train(net, optimizer, AFTER), "described": described}


def describe(param: DTensor, entry: Mapping[str, Any]) -> list[Any]:
    """What is the same as the parameter's, of each moment; and of the step what it is."""
    found: list[Any] = [
        isinstance(value, DTensor)
        and (value.device_mesh, value.placements, value.shape, value.dtype, value.to_local().shape)
        == (param.device_mesh, param.placements, param.shape, param.dtype, param.to_local().shape)
        for value in (entry.get("exp_avg"), entry.get("exp_avg_sq"))
    ]
    step = entry.get("step")
    return found if step is None else [*found, type(step), step.shape, step.dtype, step.item()]


def loading(name: str, kind: type[torch.optim.AdamW]) -> Results:
    net, optimizer = build(kind)
    load(name, net, optimizer)
    return train(net, optimizer, AFTER)


def wide(name: str) -> list[Results]:
    """bf16 parameters with fp32 state: two steps, and the second one again from a checkpoint."""
    net, optimizer = build(FusedAdamW, torch.bfloat16, **WIDE[name])
    train(net, optimizer, range(1))
    save(name, net, optimizer)
    straight = train(net, optimizer, range(1, 2))
    net, optimizer = build(FusedAdamW, torch.bfloat16, **WIDE[name])
    load(name, net, optimizer)
    return [straight, train(net, optimizer, range(1, 2))]


def spread(dtype: torch.dtype, **options: Any) -> Results:
    """Two clipped updates with given gradients: eighths, whose squares have the same sum in any order."""
    net, optimizer = build(FusedAdamW, dtype, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for param in net.parameters():
            grad = torch.randint(-8, 9, param.shape, generator=generator).to(dtype) / 8
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad if param.requires_grad else None
        norm = ranks.update(optimizer)
    return {"weights": ranks.weights(net), "state": whole_state(net, optimizer), "norm": norm}


def scenarios() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for saver, kind in (("ours", FusedAdamW), ("native", NATIVE)):
        found[saver] = partial(saving, saver, kind)
        found[f"ours from {saver}"] = partial(loading, saver, FusedAdamW)
    found["native from ours"] = partial(loading, "ours", NATIVE)
    for name in WIDE:
        found[name] = partial(wide, name)
    stochastic = partial(spread, torch.bfloat16, stochastic_rounding=True)
    for name, options in SPREADS.items():
        found[f"{name}, fp32"] = partial(spread, torch.float32, **options)
        found[f"{name}, stochastic"] = partial(stochastic, **options)
    found["whole, nearest"] = partial(spread, torch.bfloat16, mesh=None)
    found["whole, other seed"] = partial(stochastic, mesh=None, rounding_seed=1)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return ranks.run_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    return ranks.train_alone(torch.float64, range(8))["weights"]


def assert_same(a: Results, b: Results) -> None:
    for part in ("weights", "state"):
        assert a[part].keys() == b[part].keys()
        for name, tensor in a[part].items():
            assert tensor.dtype == b[part][name].dtype and torch.equal(tensor, b[part][name]), name


def test_state_is_sharded_as_the_parameters_and_steps_are_scalars(results: dict[str, list[Any]]) -> None:
    for rank in results["ours"]:
        for name, found in rank["described"].items():
            taken = 2.0 if name.startswith("branch") else 3.0  # no gradient in the third step
            like_param_and_step = [True, True, Tensor, torch.Size([]), torch.float32, taken]
            assert found == ([False, False] if name in ("frozen", "unused") else like_param_and_step), name


def test_a_resumed_run_has_the_bits_of_one_that_went_on(results: dict[str, list[Any]]) -> None:
    for straight, resumed in zip(results["ours"], results["ours from ours"], strict=True):
        assert_same(straight, resumed)


@pytest.mark.parametrize("name", ["native from ours", "ours from native"])
def test_torch_and_we_go_on_from_each_others_checkpoints(
    results: dict[str, list[Any]], truth: dict[str, Tensor], name: str
) -> None:
    allowed = ranks.budget(results["native"][0]["weights"], truth)
    for rank in results[name]:
        error = (ranks.flat(rank["weights"]) - ranks.flat(truth)).abs().max()
        assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"
        assert rank["state"].keys() == results["native"][0]["state"].keys()


def test_a_forgotten_moment_would_be_seen(results: dict[str, list[Any]], truth: dict[str, Tensor]) -> None:
    net = Net().double()
    for steps in (BEFORE, AFTER):
        optimizer = NATIVE(ranks.param_groups(net), **ranks.OPTIONS)
        for step in steps:
            ranks.backward(net, step, 0, 1)
            ranks.update(optimizer)
    error = (ranks.flat(ranks.weights(net)) - ranks.flat(truth)).abs().max()
    assert error > 1000 * ranks.budget(results["native"][0]["weights"], truth)


@pytest.mark.parametrize("name", WIDE)
def test_a_checkpoint_keeps_the_fp32_state_of_bf16_parameters(
    results: dict[str, list[Any]], name: str
) -> None:
    for straight, resumed in results[name]:
        assert_same(straight, resumed)
        moment = straight["state"]["embed.weight.exp_avg"]
        assert moment.dtype == torch.float32 and not torch.equal(moment, moment.bfloat16().float())
        assert ("embed.weight.master" in straight["state"]) == (name == "master")


@pytest.mark.parametrize("kind", ["fp32", "stochastic"])
@pytest.mark.parametrize("name", list(SPREADS)[1:])
def test_an_update_does_not_depend_on_the_mesh(results: dict[str, list[Any]], name: str, kind: str) -> None:
    whole = results[f"whole, {kind}"][0]
    assert whole["norm"] > 10 * ranks.MAX_NORM
    for rank in results[f"{name}, {kind}"]:
        assert torch.equal(rank["norm"], whole["norm"])
        assert_same(rank, whole)


def test_rounding_is_stochastic(results: dict[str, list[Any]]) -> None:
    ours = ranks.flat(results["whole, stochastic"][0]["weights"])
    for name in ("whole, nearest", "whole, other seed"):
        differs = (ranks.flat(results[name][0]["weights"]) != ours).double().mean()
        assert differs > 0.2, name


if __name__ == "__main__":
    ranks.serve({2: scenarios()})
