"""FusedAdamW where ranks differ: a gradient that is a sum still to be made, a rank without any gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from somaspeed_patch import testing_distributed as ranks
from somaspeed_patch.optim import FusedAdamW

MAX_NORM = 0.5
HALVES = [torch.linspace(-2, 1, 12).reshape(3, 4), torch.linspace(3, 4, 12).reshape(3, 4)]


def partial_gradient() -> dict[str, Tensor]:
    """Tensor parallel leaves it: a whole parameter whose gradient is the sum of the ranks' parts."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh, [Replicate()]))
    optimizer = FusedAdamW([param], lr=0.1)
    norms = []
    for _ in range(3):
        param.grad = DTensor.from_local(HALVES[dist.get_rank()].clone(), mesh, [Partial()])
        norms.append(optimizer.clip_grad_norm_(MAX_NORM))
        optimizer.step()
    return {"norms": torch.stack(norms), "weights": param.detach().to_local().clone()}


def one_rank_without_gradients(policy: str, clip: bool) -> dict[str, Any]:
    """A pipeline stage that is frozen: its rank has to answer the others all the same."""
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([param], lr=0.1, nonfinite=policy)
    failure = None
    for number in range(2):
        if dist.get_rank() == 1:
            param.grad = torch.full((4,), float("nan") if number else 1.0)
        try:
            if clip:
                optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
        except RuntimeError as error:
            failure = str(error)
    optimizer.skipped.poll(wait=True)
    return {"weights": param.detach().clone(), "skipped": optimizer.skipped.count, "failure": failure}


CASES = [(policy, clip) for policy in ("skip", "raise") for clip in (True, False)]


def scenarios() -> dict[str, Any]:
    found: dict[str, Any] = {"partial": partial_gradient}
    for policy, clip in CASES:
        found[f"{policy} {clip}"] = partial(one_rank_without_gradients, policy, clip)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return ranks.run_ranks(str(Path(__file__)), tmp_path_factory.mktemp("ranks"))


def test_a_partial_gradient_is_summed_before_it_is_measured_and_clipped(
    results: dict[str, list[Any]],
) -> None:
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    for step in range(3):
        param.grad = HALVES[0] + HALVES[1]
        norm = nn.utils.clip_grad_norm_([param], MAX_NORM)
        optimizer.step()
        assert all(
            float(rank["norms"][step]) == pytest.approx(float(norm), rel=1e-6) for rank in results["partial"]
        )
    for rank in results["partial"]:
        torch.testing.assert_close(rank["weights"], param.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clip", [True, False], ids=["clip", "step_alone"])
def test_every_rank_skips(results: dict[str, list[Any]], clip: bool) -> None:
    idle, busy = results[f"skip {clip}"]
    assert idle["skipped"] == busy["skipped"] == 1 and idle["failure"] is busy["failure"] is None
    assert torch.equal(idle["weights"], torch.ones(4))
    torch.testing.assert_close(busy["weights"], torch.full((4,), 1 - 0.1 * 0.01 - 0.1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", [True, False], ids=["clip", "step_alone"])
def test_every_rank_raises(results: dict[str, list[Any]], clip: bool) -> None:
    idle, busy = results[f"raise {clip}"]
    assert "first in a parameter of another rank" in idle["failure"]
    assert "first in parameter 0 of group 0, shape [4]" in busy["failure"]


if __name__ == "__main__":
    ranks.serve({2: scenarios()})
