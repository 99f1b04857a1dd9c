"""NVIDIA's own gr00t package, where the environment has it: see real_gr00t/check.py, which is run as it is.

SOMASPEED_GR00T_CHECKOUT: folder of the package's repository.
SOMASPEED_GR00T_PYTHON: an interpreter with the package's pins.
"""

import os
import runpy
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from somaspeed_patch.testing_nvidia_groot import Updates

ROOT = Path(__file__).parents[1]
CHECK = ROOT / "tests" / "real_gr00t" / "check.py"
CHECKOUT, PYTHON = map(os.environ.get, ("SOMASPEED_GR00T_CHECKOUT", "SOMASPEED_GR00T_PYTHON"))


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (CHECKOUT and PYTHON), reason="needs SOMASPEED_GR00T_CHECKOUT and SOMASPEED_GR00T_PYTHON"
)
def test_the_package_trains_patched_as_it_does_unpatched():
    paths = os.pathsep.join([str(ROOT), CHECKOUT])
    done = subprocess.run(
        [PYTHON, CHECK, CHECKOUT],
        env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert " of 32 checks passed" in done.stdout


@pytest.fixture(scope="module")
def check():
    """The script's names."""
    return SimpleNamespace(**runpy.run_path(str(CHECK)))


@pytest.fixture
def native():
    """Two updates of two weights, the second with a gradient that is zero but for rounding."""
    gradients = [{"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([3e-9])} for _ in range(2)]
    weights = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}
    return Updates(losses=[2.0, 1.0], grad_norms=[3.0, 2.0], gradients=gradients, weights=weights)


def test_rounding_is_no_difference(check, native):
    ours = replace(
        native,
        losses=[2.0, 1.0 + 1e-6],
        gradients=[
            native.gradients[0],
            {"w": native.gradients[1]["w"] * (1 + 1e-6), "b": -torch.ones(1) * 5e-9},
        ],
    )
    problem, seen = check.compared(native, ours)
    assert problem == ""
    assert seen.startswith("losses 1.0e-06  norms 0.0e+00  gradients 9.5e-07")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"losses": [2.0, 1.00003]}, "losses differ by more than 1e-05"),
        ({"grad_norms": [3.0001, 2.0]}, "norms differ by more than 1e-05"),
        ({"gradients": "b"}, "gradients differ by more than 1e-05"),
        ({"gradients": "gone"}, "gradients differ by more than 1e-05"),
        ({"weights": {"w": torch.tensor([1.0, 2.001]), "b": torch.tensor([0.5])}}, "weights differ by more"),
        ({"weights": {"w": torch.tensor([1.0, float("nan")]), "b": torch.tensor([0.5])}}, "weights differ"),
        ({"losses": [float("nan"), 1.0]}, "losses differ"),
        ({"losses": [2.0]}, "1 losses of 2 updates, expected 2 of 2"),
        ({"losses": [], "grad_norms": [], "gradients": []}, "0 losses of 0 updates, expected 2 of 2"),
    ],
)
def test_a_difference_is_found(check, native, changed, problem):
    if changed.get("gradients") == "b":
        changed = {"gradients": [native.gradients[0], {**native.gradients[1], "b": torch.tensor([1e-3])}]}
    elif changed.get("gradients") == "gone":
        changed = {"gradients": [native.gradients[0], {"w": native.gradients[1]["w"]}]}
    assert check.compared(native, replace(native, **changed))[0].startswith(problem)
