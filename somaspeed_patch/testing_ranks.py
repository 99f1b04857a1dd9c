"""What tests on several ranks of a host share: a script that imports it once, and forks of it as ranks.

The test file is the script; `run_script` starts it, `serve` in it runs one training after the other.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes


class Run(Protocol):
    """One training."""

    @property
    def ranks(self) -> int:
        """Processes."""

    @property
    def layout(self) -> str | None:
        """None: the host's own."""


_DEVICE = "SOMASPEED_TEST_DEVICE"


def device() -> str:
    """Where this script's ranks compute: `cpu` (gloo) or `cuda` (NCCL, a GPU each)."""
    return os.environ.get(_DEVICE, "cpu")


def run_script(script: str, folder: Path, *names: str, timeout: float, device: str = "cpu") -> dict[str, int]:
    """Run the script's trainings (or the named ones); how many ranks each had, by name.

    FusedAdamW's steps are torch's on a CPU: the interpreter takes its kernels 25 ms a parameter and update.
    On GPUs matrix products of fp32 are fp32: LeRobot's TF32 would hide what a layout changes.

    Raises: RuntimeError: the script itself failed; a training that failed left NAME.error.
    """
    environment = {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0",
        _DEVICE: device,
    }  # fmt: skip
    # Imports look for a GPU; torch's plain way to look cannot be repeated in a fork, NVML's can.
    gpu = {"NVIDIA_TF32_OVERRIDE": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else gpu
    log = folder / "log"
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, script, str(folder), *names],
            env={**os.environ, **environment},
            stdout=stream,
            stderr=stream,
            timeout=timeout,
        )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{log.read_text()[-6000:]}")
    ranks: dict[str, int] = json.loads((folder / "runs.json").read_text())
    return ranks


def import_once(*modules: str) -> None:
    """Import in the script what its forks would import each; what fails here fails there, if it is used."""
    for module in modules:
        with suppress(ImportError, OSError, RuntimeError):  # torchcodec without FFmpeg: any of these
            importlib.import_module(module)


def serve(
    runs: Mapping[str, Any], one_rank: Callable[..., None], before: Callable[..., None], *, limit: float
) -> None:
    """In the script: fork the ranks of each training that was asked for.

    Args:
        runs: `Run`s by name.
        one_rank: called as one_rank(rank, run, folder, name) in each rank.
        before: called as before(run, folder) ahead of each training.
        limit: seconds after which a rank that hangs ends, with a traceback of its threads.
    """
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(runs)
    torch.set_num_threads(1)
    gc.freeze()  # hosts collect garbage, which takes 0.3 to 1 s for what was imported, several times a fork
    for name in names:
        print(f"run {name}", flush=True)
        before(runs[name], folder)
        arguments = (one_rank, limit, runs[name], folder, name, str(_free_port()))
        try:
            start_processes(_rank, arguments, runs[name].ranks, start_method="fork")  # type: ignore[no-untyped-call]
        except Exception as error:
            (folder / f"{name}.error").write_text(str(error))
            traceback.print_exc()
    (folder / "runs.json").write_text(json.dumps({name: runs[name].ranks for name in names}))


def _rank(
    rank: int, one_rank: Callable[..., None], limit: float, run: Run, folder: Path, name: str, port: str
) -> None:
    """One rank, with what torchrun would tell it; a single native process is started without a launcher."""
    faulthandler.dump_traceback_later(limit, exit=True)
    if run.ranks > 1 or run.layout is not None:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks}
        os.environ.update({key: str(value) for key, value in ranks.items()})
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    one_rank(rank, run, folder, name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


class TorchBut:
    """torch, but for the randn of a noise's shape; that of a weight's, given by numbers, is torch's."""

    def __init__(self, noise: Callable[..., Tensor]) -> None:
        """Take `noise(shape, **options)`."""
        self._noise = noise

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *shape: Any, **options: Any) -> Tensor:
        """torch.randn."""
        if not isinstance(shape[0], torch.Size):
            return torch.randn(*shape, **options)
        return self._noise(shape[0], **options)
