"""Where a result comes from: versions, processor, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from somaspeed_patch.versions import table

# Variables that change speed, so they belong to a figure.
_VARIABLES = (
    "CUDA_SCALE_LAUNCH_QUEUES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_PACKAGES = ("torch", "triton", "lerobot", "transformers", "accelerate", "somaspeed-patch")


def versions() -> dict[str, str]:
    """Python and the packages that decide the result."""
    return table(_PACKAGES)


def processor() -> dict[str, Any]:
    """The CPU's name, the cores this process may use, the system, and variables that change speed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {"cpu": _cpu_name(), "cores": cores, "system": platform.platform(), "variables": found}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str | None:
    """The commit of this package's checkout, with `+changes` when files differ; None outside one.

    A copy without its git directory, as on a GPU machine, is told by the variable SOMASPEED_COMMIT.
    """
    if os.environ.get("SOMASPEED_COMMIT"):
        return os.environ["SOMASPEED_COMMIT"]
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None  # installed, perhaps inside somebody else's checkout
    head = _git(here.parent, "rev-parse", "HEAD")
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if changed else head


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line() -> list[str]:
    """How this process was started, without the paths of this machine: interpreter, folder and `--out`."""
    spec = sys.modules["__main__"].__spec__
    module = None if spec is None else spec.name.removesuffix(".__main__")
    program = ["python", "-m", module] if module else [Path(sys.argv[0]).name]
    words = iter(sys.argv[1:])
    kept = [word for word in words if not (word == "--out" and next(words, None))]
    return [*program, *(word for word in kept if not word.startswith("--out="))]


def accelerators() -> dict[str, Any]:
    """The GPUs this process may use by nvidia-smi, their driver and links; empty lists without an answer.

    Returns: `gpus`, each with name, memory_gib and driver; `links`, the matrix of `nvidia-smi topo -m`: X on
        the diagonal, NV18, NODE, SYS and so on elsewhere.
    """
    listed = _smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines()]
    gpus = [
        {"name": name, "memory_gib": float(mib) / 1024, "driver": driver}
        for name, mib, driver in (row for row in rows if len(row) == 3)
    ]
    links = _links(_smi("topo", "-m"), len(gpus))
    mine = _visible(len(gpus))
    return {
        "gpus": [gpus[index] for index in mine],
        "links": [[links[row][column] for column in mine] for row in mine if links],
    }


def _visible(count: int) -> list[int]:
    """The places of CUDA_VISIBLE_DEVICES; all where it is not set or names GPUs otherwise."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [word.strip() for word in (listed or "").split(",") if word.strip()]
    if listed is None or not all(word.isdigit() and int(word) < count for word in words):
        return list(range(count))
    return [int(word) for word in words]


def _links(matrix: str, count: int) -> list[list[str]]:
    """The first `count` columns of the lines that begin with GPU0, GPU1, ..."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0])]
    return [words[1 : count + 1] for words in rows if len(words) > count and not words[1].startswith("GPU")]


def _smi(*words: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
