"""What the multi-process tests share: ranks on gloo, and a small model to spread over them."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import FusedAdamW

LIMIT = 240.0  # seconds for all scenarios of one world; they need 10 to 40
MAX_NORM = 0.05  # the norms of Net are 0.29 to 1.02
ROWS = 16
OPTIONS = {"betas": (0.9, 0.99), "eps": 1e-3}  # an eps that small gradients feel: a wrong clip shows
Scenarios = Mapping[str, Callable[[], Any]]


def run_ranks(script: str, folder: Path) -> dict[str, list[Any]]:
    """Run `script`, which calls `serve`, on the CPU.

    Args:
        folder: for the results; empty.

    Returns: of each scenario: what each rank found.

    Raises: RuntimeError: a rank failed or hung; with the end of stderr.
    """
    environment = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    gloo = {"GLOO_SOCKET_IFNAME": "lo"}  # else it looks the machine's name up, which a sandbox may not know
    done = subprocess.run(
        [sys.executable, script, str(folder)],
        env={**os.environ, **environment, **gloo},
        stderr=subprocess.PIPE,
        text=True,
        timeout=2 * LIMIT + 60,
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    found: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("*.rank*")):
        for name, result in torch.load(file).items():
            found.setdefault(name, []).append(result)
    return found


def serve(worlds: Mapping[int, Scenarios]) -> None:
    """In the script of `run_ranks`: run the scenarios of each world size, in order, in that many processes.

    The processes are forks of this one, which has imported torch, but started neither threads nor gloo.
    """
    for world, scenarios in worlds.items():
        arguments = (world, Path(sys.argv[1]), scenarios)
        start_processes(_rank, arguments, world, start_method="fork")  # type: ignore[no-untyped-call]


def _rank(rank: int, world: int, folder: Path, scenarios: Scenarios) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    adamw.BLOCK, adamw.ITER, adamw.TILE = 32, 1, 32  # embed.weight (54) has a whole tile and a part of one
    store = dist.FileStore(str(folder / f"store{world}"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found = {name: scenario() for name, scenario in scenarios.items()}
    torch.save(found, folder / f"{world}.rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


class Net(nn.Module):
    """Sizes that 2 and 4 do not divide, some smaller; a branch, a frozen and an unused parameter.

    Args of forward: x [B, 6]; branch: whether that part takes part. Returns: [B, 1].
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(6, 9), nn.LayerNorm(9)
        self.mid, self.branch = nn.Linear(9, 3, bias=False), nn.Linear(9, 3, bias=False)
        self.head = nn.Linear(3, 1, bias=False)
        self.frozen = nn.Parameter(torch.rand(9) + 0.5, requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = self.norm(torch.tanh(self.embed(x))) * self.frozen
        out = self.mid(hidden)
        if branch:
            out = out + torch.tanh(self.branch(hidden))
        return self.head(torch.tanh(out))  # type: ignore[no-any-return]


def shard(net: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """FSDP2 in three units; with a mesh of two axes HSDP."""
    for module in (net.embed, net.mid, net):
        fully_shard(module, mesh=mesh, **options)
    return net


def param_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, and the rest with another learning rate; named."""
    named = list(net.named_parameters())
    return [
        {"params": [one for one in named if one[1].ndim > 1], "lr": 0.02, "weight_decay": 0.1},
        {"params": [one for one in named if one[1].ndim <= 1], "lr": 0.01, "weight_decay": 0.0},
    ]


def backward(model: nn.Module, step: int, rank: int, world: int, microbatch: int = 0, of: int = 1) -> None:
    """The gradients of one rank's part of step's batch of ROWS rows, or of one microbatch of that part.

    The branch takes no part in the third step.
    """
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, width, generator=generator).to(dtype) for width in (6, 1))
    mine = slice(rank * of + microbatch, None, world * of)
    error = model(x[mine], branch=step != 2) - (1 + step % 3) * y[mine]
    (error.square().mean() / of).backward()


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def clip(optimizer: torch.optim.Optimizer, max_norm: float = MAX_NORM) -> Tensor:
    """Clip as the optimizer does, or torch's; the norm before, [] ."""
    if isinstance(optimizer, FusedAdamW):
        return optimizer.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]
    return full(nn.utils.clip_grad_norm_(parameters(optimizer), max_norm))


def update(optimizer: torch.optim.Optimizer, max_norm: float = MAX_NORM) -> Tensor:
    """Clip, step, zero_grad; the norm."""
    norm = clip(optimizer, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def weights(net: nn.Module) -> dict[str, Tensor]:
    """Copies of all whole parameters, by name."""
    return {name: full(param) for name, param in net.named_parameters()}


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All of them as one fp64 vector."""
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def train_alone(dtype: torch.dtype, steps: Iterable[int], max_norm: float = MAX_NORM) -> dict[str, Any]:
    """Plain torch in one process on whole batches; the truth, in fp64.

    Returns: norms [steps] and weights.
    """
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(param_groups(net), **OPTIONS)  # type: ignore[arg-type]
    norms = []
    for step in steps:
        backward(net, step, 0, 1)
        norms.append(update(optimizer, max_norm))
    return {"norms": torch.stack(norms), "weights": weights(net)}


def budget(native: Mapping[str, Tensor], truth: Mapping[str, Tensor], slack: float = 2.0) -> float:
    """The error that weights may have: `slack` times that of torch's AdamW, and the truth's own rounding."""
    native_error = (flat(native) - flat(truth)).abs().max()
    return float(slack * native_error + torch.finfo(torch.float32).eps * flat(truth).abs().max())
