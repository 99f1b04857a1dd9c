"""NVIDIA's gr00t package against itself: its tiny Gr00tN1d7 trained by its own trainer, natively and patched.

    PYTHONPATH=REPOSITORY:CHECKOUT PYTHON tests/real_gr00t/check.py CHECKOUT

PYTHON is one with the package's pins (3.10, torch 2.7.1, transformers 4.57.3; flash-attn and deepspeed are
not needed). Everything runs on the CPU, offline, in about four minutes. Checked, unpatched against patched:
losses, gradient norms, gradients and weights of 20 updates for every case; runs that are interrupted and
resumed by the other side; the names the adapter relies on; and the package's own tests of its model.

Exit status 1: something differs, fell back, or did not run at all.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isnan
from pathlib import Path

import torch
from torch import Tensor

import somaspeed_patch
from somaspeed_patch import testing_groot_contract as contract
from somaspeed_patch.testing_groot_behaviour import misbehaving
from somaspeed_patch.testing_nvidia_groot import Updates, make_model, train

STEPS, SAVED = 20, 10
ALLOWED = 1e-5  # of fp32; a tensor is measured by its largest value
SMALLEST = 1e-2  # of the largest in all tensors, 2e-8 of which is what rounding leaves of a zero gradient
OFFLINE = {"HF_HUB_OFFLINE": "1", "NO_ALBUMENTATIONS_UPDATE": "1", "CUDA_VISIBLE_DEVICES": ""}
OWN_TESTS = ("tests/gr00t/model/test_action_head.py", "tests/gr00t/model/test_model_forward.py")
PATCHED_PYTEST = """
import sys, somaspeed_patch
somaspeed_patch.patch()
import pytest
status = pytest.main(sys.argv[1:])
print(sum(site.calls for site in somaspeed_patch.report().sites), "calls")
sys.exit(status)
"""
reports: list[somaspeed_patch.Report] = []  # of the patched runs; a site's counts go on from run to run


@dataclass(frozen=True)
class Case:
    """Settings of `train`."""

    accumulation: int
    embodiments: int
    images: tuple[int, ...]
    dropout: float

    def __str__(self) -> str:
        images = "-".join(map(str, self.images))
        return f"accumulate {self.accumulation}, {self.embodiments} emb., {images} im., drop {self.dropout}"


MIXED = Case(2, 3, (1, 2, 3), 0.2)
CASES = [*(Case(*settings) for settings in product((1, 2, 4), (1, 3), ((1,), (3,)), (0.0, 0.2))), MIXED]


def main() -> int:
    """Run every check and print a line for each; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the gr00t package's repository")
    checkout = parser.parse_args().checkout.resolve()
    os.environ.update(OFFLINE)  # read when the package's libraries are imported
    torch.set_num_threads(1)  # as tests/conftest.py does, and for its reason
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        good = [line_of(name, *found) for name, found in checks(folder, checkout)]
    print(f"\n{reached(reports[-1])}\n\n{sum(good)} of {len(good)} checks passed")
    return 0 if all(good) else 1


def line_of(name: str, problem: str, seen: str) -> bool:
    """Print one check's line; whether it passed."""
    print(f"{'FAILED' if problem else 'ok':7} {name:50} {seen}{problem and ': ' + problem}", flush=True)
    return not problem


def checks(folder: Path, checkout: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each check's name, its problem or "", and what was seen."""
    for case in CASES:
        yield str(case), same_updates(folder, case)
    yield from resumed_runs(folder)
    yield "names", names(folder)
    yield "the package's own tests, patched", own_tests(checkout)
    yield "what ran", ran()


def run(folder: Path, case: Case, *, patched: bool, save_steps: int = 0, resume: bool = False) -> Updates:
    """`train`, without the package's own lines; a native run must not reach our code."""
    before = counts()
    with redirect_stdout(io.StringIO()):
        found = train(
            folder,
            patched=patched,
            steps=STEPS,
            save_steps=save_steps,
            resume=resume,
            **vars(case),
        )
    if not patched and counts() != before:
        raise RuntimeError("check: a run without patches reached our code, so it is no reference")
    if found.report is not None:
        reports.append(found.report)
    return found


def same_updates(folder: Path, case: Case) -> tuple[str, str]:
    """20 updates, natively and patched: the first patched run is also patched before the package's import."""
    ours = run(folder / "ours", case, patched=True)
    return compared(run(folder / "native", case, patched=False), ours)


def resumed_runs(folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Interrupted after 10 updates and resumed: the last 10 are those of the run without interruption."""
    sides = {"native": False, "patched": True}
    whole = {
        name: run(folder / f"saved by {name}", MIXED, patched=patched, save_steps=SAVED)
        for name, patched in sides.items()
    }
    for saver, (resumer, patched) in product(sides, sides.items()):
        place = folder / f"{saver} to {resumer}"
        checkpoint = f"checkpoint-{SAVED}"
        shutil.copytree(folder / f"saved by {saver}" / checkpoint, place / checkpoint)
        found = run(place, MIXED, patched=patched, resume=True)
        yield f"saved {saver}, resumed {resumer}", compared(rest(whole["native"]), found)


def rest(whole: Updates) -> Updates:
    """What comes after the checkpoint."""
    return replace(
        whole,
        losses=whole.losses[SAVED * MIXED.accumulation :],
        grad_norms=whole.grad_norms[SAVED:],
        gradients=whole.gradients[SAVED:],
    )


def compared(native: Updates, ours: Updates) -> tuple[str, str]:
    """The problem, and the largest relative differences."""
    expected, given = ((len(run.losses), len(run.gradients)) for run in (native, ours))
    if given != expected:
        return "{} losses of {} updates, expected {} of {}".format(*given, *expected), ""
    found = {
        "losses": numbers(native.losses, ours.losses),
        "norms": numbers(native.grad_norms, ours.grad_norms),
        "gradients": largest(tensors(*pair) for pair in zip(native.gradients, ours.gradients, strict=True)),
        "weights": tensors(native.weights, ours.weights),
    }
    wrong = [name for name, worst in found.items() if worst > ALLOWED]
    seen = "  ".join(f"{name} {worst:.1e}" for name, worst in found.items())
    return f"{', '.join(wrong)} differ by more than {ALLOWED}" if wrong else "", seen


def largest(differences: Iterable[float]) -> float:
    """Infinite if one is not a number: `max` would pass over it."""
    return max(inf if isnan(one) else one for one in differences)


def numbers(native: list[float], ours: list[float]) -> float:
    """The largest relative difference."""
    return largest(abs(a - b) / abs(a) for a, b in zip(native, ours, strict=True))


def tensors(native: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> float:
    """The largest difference in a tensor, relative to its largest value; infinite where names differ."""
    if native.keys() != ours.keys():
        return inf
    sizes = {name: value.abs().max().item() for name, value in native.items()}
    least = SMALLEST * max(sizes.values())
    return largest(
        (ours[name] - value).abs().max().item() / max(sizes[name], least) for name, value in native.items()
    )


def names(folder: Path) -> tuple[str, str]:
    """The contract on the package, its model and this version of transformers."""
    symbols = (*contract.NVIDIA, *contract.QWEN3_VL, *contract.TRAINER)
    with redirect_stdout(io.StringIO()):
        model = make_model(folder).train()
    lines = [*contract.broken(symbols), *contract.missing(model, contract.PARTS), *misbehaving(model)]
    seen = f"{len(symbols)} functions, {len(contract.PARTS)} modules"
    return "\n        ".join(lines), seen


def own_tests(checkout: Path) -> tuple[str, str]:
    """The package's tests of its action head and model, in a process that is patched before they begin."""
    words = [sys.executable, "-c", PATCHED_PYTEST, "-q", "-p", "no:cacheprovider", *OWN_TESTS]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
    seen = ", ".join(done.stdout.splitlines()[-2:])
    good = done.returncode == 0 and " passed" in seen and not seen.endswith(" 0 calls")
    return "" if good else f"exit status {done.returncode}\n{done.stdout}{done.stderr}", seen


def counts() -> tuple[int, int, int]:
    """Calls through our code, left to the host, and fallen back, at all sites."""
    found = somaspeed_patch.report().sites
    return (
        sum(site.calls for site in found),
        sum(site.native_calls for site in found),
        sum(site.fallbacks for site in found),
    )


def ran() -> tuple[str, str]:
    """Whether our code ran in the patched runs, did not fall back, and found the package as it knows it."""
    calls, left, fallbacks = counts()
    unlike = [site.site for site in reports[-1].sites if "not as expected" in site.reason]
    problems = {
        "nothing of ours ran": not calls,
        "our code fell back to the host's": fallbacks,
        f"{', '.join(unlike)} left native: the package is not as expected": unlike,
    }
    seen = f"{calls} calls, {left} left to the host, {fallbacks} fallbacks"
    return "; ".join(problem for problem, true in problems.items() if true), seen


def reached(report: somaspeed_patch.Report) -> somaspeed_patch.Report:
    """Its sites that were reached."""
    sites = tuple(one for one in report.sites if one.calls or one.native_calls or one.fallbacks)
    return replace(report, sites=sites)


if __name__ == "__main__":
    sys.exit(main())
