"""The step recorder on two ranks of gloo: whole gradients of rank 0, and the seconds of communication."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from somaspeed_patch import testing_distributed as ranks

pytest.importorskip("accelerate")
pytest.importorskip("lerobot.utils.logging_utils")

UPDATES = 3


def as_launched() -> None:
    """What a launcher tells accelerate of the group that exists already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)


def ddp() -> dict[str, dict[str, torch.Tensor]]:
    """Train under DDP; the gradients that this rank's optimizer got at the second update."""
    from somaspeed_patch.testing_recorder import recorded

    as_launched()
    features = {"record_gradients": "2", "record_profile": "2"}
    loop, _ = recorded(Path(sys.argv[1]) / "ddp", UPDATES, features=features)
    return loop.gradients[1]


def fsdp2() -> dict[str, torch.Tensor]:
    """Save sharded gradients; the whole ones, gathered by hand."""
    from types import SimpleNamespace

    from accelerate import DistributedType
    from torch.distributed.device_mesh import init_device_mesh

    from somaspeed_patch.ab import recorder_gradients

    net = ranks.shard(ranks.Net(), init_device_mesh("cpu", (dist.get_world_size(),)))
    ranks.backward(net, 0, dist.get_rank(), dist.get_world_size())
    named = [(name, one.grad) for name, one in net.named_parameters() if one.grad is not None]
    prepared = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True, _models=[net])
    recorder_gradients.save(prepared, Path(sys.argv[1]) / "fsdp2")
    return {name: ranks.full(gradient) for name, gradient in named}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    return ranks.run_ranks(__file__, folder)


def lines(folder):
    files = [folder / "ddp" / f"steps.jsonl.rank{rank}" for rank in range(2)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_rank_0_saves_whole_gradients_of_all_ranks(found, folder, layout):
    from safetensors.torch import load_file

    saved, expected = load_file(folder / layout / "gradients.safetensors"), found[layout]
    for rank in expected:
        assert saved.keys() == rank.keys()
        assert all(torch.equal(saved[name], rank[name]) for name in saved)


def test_a_rank_has_the_seconds_of_gloo_in_its_line(found, folder):
    for recorded in lines(folder):
        assert ["profile" in line for line in recorded] == [False, True, False]
        profile, seconds = recorded[1]["profile"], recorded[1]["seconds"]["total"]
        assert 0 < profile["communication_seconds"] < 2 * seconds  # gloo has two threads
        assert profile["busy_seconds"] is None and profile["exposed_communication_seconds"] is None


def test_every_rank_writes_its_own_steps_and_rank_0_the_gradients(found, folder):
    names = {file.name for file in (folder / "ddp").iterdir()} - {"somaspeed_report.json"}
    assert names == {"steps.jsonl.rank0", "steps.jsonl.rank1", "gradients.safetensors"}


if __name__ == "__main__":
    ranks.serve({2: {"ddp": ddp, "fsdp2": fsdp2}})
