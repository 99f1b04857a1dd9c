"""What a model may do to its parameters under a layout: share them, freeze and unfreeze them, run them early.

Two gloo ranks and a small model against one process. As a script it serves the ranks.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from somaspeed_patch import testing_distributed as ranks
from somaspeed_patch.layouts import launch, units
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.layouts.layout import parse
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_distributed import Net

FAMILY = Family(name="net", needs=(), units=("embed", "mid"))
STEPS = 4


class Tied(Net):
    """The branch is `mid` once more; in one unit, or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.branch.weight = self.mid.weight


def optimized(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def train(net: Net, thaws: bool, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Weights after STEPS updates; `frozen` trains from the third on, if it thaws."""
    optimizer = optimized(net)
    for step in range(STEPS):
        if thaws and step == 2:
            net.frozen.requires_grad_(True)
        ranks.backward(net, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    return ranks.weights(net)


def spread(net: Net, layout: str, family: Family = FAMILY) -> Net:
    launch.spread(net, family, parse(layout).on(2), torch.device("cpu"))
    return net


def trained(net: Net, layout: str, thaws: bool = False) -> dict[str, Tensor]:
    return train(spread(net, layout), thaws, torch.distributed.get_rank(), 2)


def error_of(run: Any, *args: Any) -> str:
    try:
        run(*args)
    except ValueError as error:
        return str(error)
    return ""


def looked_at_first() -> dict[str, Tensor]:
    net = spread(Net(), "dp_shard=2")
    with torch.no_grad():
        net.eval()(torch.ones(3, 6))
    net.train()
    return train(net, False, torch.distributed.get_rank(), 2)


def versions(kind: type[torch.optim.Optimizer]) -> list[bool]:
    """Whether the versions of the shards change: by a forward, by an update."""
    net = spread(Net(), "dp_shard=2")
    optimizer, seen = kind(net.parameters(), lr=0.02), [units.shard_versions(net)]
    with torch.no_grad():
        net(torch.ones(3, 6))
    seen.append(units.shard_versions(net))
    ranks.backward(net, 0, torch.distributed.get_rank(), 2)
    optimizer.step()
    seen.append(units.shard_versions(net))
    return [before != after for before, after in pairwise(seen)]


SCENARIOS = {
    "versions, AdamW": partial(versions, torch.optim.AdamW),
    "versions, FusedAdamW": partial(versions, FusedAdamW),
    "plain": lambda: trained(Net(), "dp_shard=2"),
    "looked at first": looked_at_first,
    "thawed shards": lambda: trained(Net(), "dp_shard=2,frozen=sharded", thaws=True),
    "thawed": lambda: error_of(trained, Net(), "dp_shard=2", True),
    "thawed gathered": lambda: error_of(trained, Net(), "dp_shard=2,frozen=gathered", True),
    "tied": lambda: train(
        spread(Tied(), "dp_shard=2", Family(name="net", needs=(), units=("embed",))),
        False,
        torch.distributed.get_rank(),
        2,
    ),
    "tied in two units": lambda: error_of(spread, Tied(), "dp_shard=2"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return ranks.run_ranks(__file__, tmp_path_factory.mktemp("edges"))


@pytest.mark.parametrize(
    ("name", "net", "thaws"),
    [
        ("plain", Net, False),
        ("looked at first", Net, False),
        ("thawed shards", Net, True),
        ("tied", Tied, False),
    ],
)
def test_the_weights_are_those_of_one_process(
    found: dict[str, list[Any]], name: str, net: type[Net], thaws: bool
) -> None:
    expected = train(net(), thaws)
    for weights in found[name]:
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(weights[key], value, rtol=1e-5, atol=1e-6), key


@pytest.mark.parametrize("name", ["versions, AdamW", "versions, FusedAdamW"])
def test_shards_tell_an_update_from_a_forward(found: dict[str, list[Any]], name: str) -> None:
    assert found[name] == [[False, True], [False, True]]


@pytest.mark.parametrize("name", ["thawed", "thawed gathered"])
def test_what_is_no_shard_may_not_begin_to_train(found: dict[str, list[Any]], name: str) -> None:
    for error in found[name]:
        assert error.startswith("layout: frozen was frozen when the layout was made and trains now")


def test_a_parameter_of_two_units_is_refused(found: dict[str, list[Any]]) -> None:
    for error in found["tied in two units"]:
        assert "mid shares a parameter with branch.weight: they cannot be gathered apart" in error


if __name__ == "__main__":
    ranks.serve({2: SCENARIOS})
