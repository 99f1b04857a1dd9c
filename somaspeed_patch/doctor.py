"""`somaspeed doctor`: what of this environment will be patched, and what keeps the kernels from running.

Every check is one line: `ok`; `note`, something stays native or slower; or `fail`, something is broken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from somaspeed_patch.adapter import adapters
from somaspeed_patch.patching import ENVIRONMENT

OK, NOTE, FAIL = "ok", "note", "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line."""

    check: str
    """what was looked at"""
    verdict: str
    """ok, note or fail"""
    text: str
    """what was found, and what to do"""


def examine() -> list[Finding]:
    """Run every check; a check that raises is a `fail` with the exception's text."""
    found: list[Finding] = []
    for check in (_hosts, _switch, _torch, _compiler, _kernel, _optimizer, _libero):
        found += _guarded(check)
    return found


def exit_code(found: list[Finding]) -> int:
    """1 if something is broken; a note is no failure."""
    return int(any(finding.verdict == FAIL for finding in found))


def to_list(found: list[Finding]) -> list[dict[str, Any]]:
    """Plain data."""
    return [asdict(finding) for finding in found]


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:
        name = check.__name__.strip("_")
        return [Finding(check=name, verdict=FAIL, text=f"{type(error).__name__}: {error}")]


def _hosts() -> Iterator[Finding]:
    for adapter in adapters().values():
        why = adapter.misfit()
        text = f"{', '.join(adapter.requires)} fits" if why is None else f"{why}; it stays native"
        yield Finding(check=f"adapter {adapter.name}", verdict=OK if why is None else NOTE, text=text)


def _switch() -> Iterator[Finding]:
    """Does the .pth file reach a child interpreter?"""
    code = "import sys; print('somaspeed_patch._boot' in sys.modules)"
    environment = {**os.environ, ENVIRONMENT: "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if done.stdout.strip().endswith("True"):
        yield Finding(check=f"{ENVIRONMENT}=1", verdict=OK, text="patches every process of this environment")
    else:
        text = "does not reach child processes: install the package (pip), a path on PYTHONPATH is not enough"
        yield Finding(check=f"{ENVIRONMENT}=1", verdict=NOTE, text=text)


def _torch() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        text = f"{torch.__version__}, no GPU: everything runs in plain PyTorch"
        yield Finding(check="torch", verdict=NOTE, text=text)
        return
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    yield Finding(check="torch", verdict=OK, text=f"{torch.__version__}, {', '.join(sorted(names))}")


def _compiler() -> Iterator[Finding]:
    """Triton builds a small C module at its first launch."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacking = [
        name for name, there in (("a C compiler", compiler), (str(header), header.is_file())) if not there
    ]
    if lacking:
        text = (
            f"{' and '.join(lacking)} missing: Triton cannot build, attention and AdamW run in plain PyTorch"
        )
        yield Finding(check="C compiler", verdict=NOTE, text=text)
    else:
        yield Finding(check="C compiler", verdict=OK, text=str(compiler))


def _kernel() -> Iterator[Finding]:
    """One small attention, forward and backward, on the device the kernel is for."""
    import torch

    from somaspeed_patch.kernels import split_attention as module

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = (torch.randn(2, 1, n, 64, device=device, requires_grad=n == 16) for n in (16, 9))
    out = module.split_attention(q, k, k)
    out.sum().backward()  # type: ignore[no-untyped-call]
    error = float((out - module.split_attention_ref(q, k, k)).detach().abs().max())
    if module.KERNEL_ERROR is not None:
        yield Finding(check="split_attention", verdict=FAIL, text=f"the kernel failed: {module.KERNEL_ERROR}")
    elif error > 1e-4:
        yield Finding(check="split_attention", verdict=FAIL, text=f"off by {error:.2g} from its reference")
    else:
        served = module.refusal(q, k, k)
        text = "the Triton kernel serves" if served is None else f"plain PyTorch: {served}"
        yield Finding(check="split_attention", verdict=OK if served is None else NOTE, text=text)


def _optimizer() -> Iterator[Finding]:
    """One clipped step of a small FusedAdamW against torch.optim.AdamW, on the device the kernels are for."""
    import torch

    from somaspeed_patch.optim import FusedAdamW

    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 100, device=device)) for _ in range(2)]
    ours, native = FusedAdamW(params[:1], lr=0.1), torch.optim.AdamW(params[1:], lr=0.1)
    for param in params:
        param.grad = param.detach() + 3
    ours.clip_grad_norm_(1.0)
    torch.nn.utils.clip_grad_norm_(params[1:], 1.0)
    ours.step()
    native.step()
    error, reason = float((params[0] - params[1]).detach().abs().max()), ours.native_reason()
    if reason is not None and reason.startswith("the kernels failed"):
        yield Finding(check="FusedAdamW", verdict=FAIL, text=reason)
    elif error > 1e-6:
        yield Finding(check="FusedAdamW", verdict=FAIL, text=f"off by {error:.2g} from torch.optim.AdamW")
    else:
        text = "the Triton kernels serve" if reason is None else f"torch's step: {reason}"
        yield Finding(check="FusedAdamW", verdict=OK if reason is None else NOTE, text=text)


def _libero() -> Iterator[Finding]:
    """The simulator's release, and one rendered frame from each GPU, where LIBERO is installed."""
    from somaspeed_patch.libero import check

    if not check.installed():
        return
    import torch

    complaints = list(check.mujoco_complaints())
    for text in complaints or ["mujoco 3.3.2 or alike: LIBERO's published physics and images"]:
        yield Finding(check="mujoco", verdict=NOTE if complaints else OK, text=text)
    for gl, device in check.renderers(torch.cuda.device_count()):
        where = gl if device is None else f"{gl} on GPU {device}"
        why = check.complaint(gl, device)
        text = f"{where} gives a frame" if why is None else f"{where}: {why}; LIBERO cannot render there"
        yield Finding(check="renderer", verdict=OK if why is None else FAIL, text=text)


def table(found: list[Finding]) -> str:
    """One line a finding."""
    width = max(len(finding.check) for finding in found)
    return "\n".join(f"{finding.verdict:4}  {finding.check:{width}}  {finding.text}" for finding in found)
