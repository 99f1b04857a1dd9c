"""LeRobot's own `--parallelism` flags over our units, on gloo ranks, against one process.

As a script it serves the runs: see testing_layouts. LeRobot 0.6.2 is its main branch: to run this, put a
checkout with its metadata before the installed one on PYTHONPATH.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

import somaspeed_patch
from somaspeed_patch.testing_layouts import STEPS, Found, LayoutRun, difference, run_all, serve_runs

if find_spec("lerobot.distributed") is None:
    pytest.skip("needs LeRobot 0.6.2, whose trainer has --parallelism", allow_module_level=True)

FAMILIES = ("pi05", "groot")  # main's MolmoAct2 has other options
MORE = STEPS + 3
SHARDED = {
    family: LayoutRun(
        policy=family,
        ranks=2,
        arguments=("--parallelism.dp_shard=2",),
        adapters=("lerobot_parallelism",),
    )
    for family in FAMILIES
}
RUNS = {
    **{f"{family} alone": LayoutRun(policy=family, patched=False) for family in FAMILIES},
    **SHARDED,
    "hybrid": replace(
        SHARDED["pi05"], ranks=4, arguments=("--parallelism.dp_shard=2", "--parallelism.dp_replicate=2")
    ),
    "resumed": replace(SHARDED["pi05"], resumes="pi05", steps=MORE),
    "alone resumed": LayoutRun(policy="pi05", patched=False, resumes="pi05 alone", steps=MORE),
    "ignoring": replace(
        SHARDED["pi05"],
        arguments=("--parallelism.dp_shard=2", "--accelerator.fsdp.ignored_modules=vision.*"),
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run_all(__file__, tmp_path_factory.mktemp("main"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pi05", "pi05 alone"),
        ("groot", "groot alone"),
        ("hybrid", "pi05 alone"),
        ("resumed", "alone resumed"),
    ],
)
def test_updates_are_those_of_one_process(runs: dict[str, Found], name: str, expected: str) -> None:
    updates = MORE - STEPS if name == "resumed" else STEPS
    assert not difference(runs[name], runs[expected], updates)


def test_the_units_are_ours_and_our_forward_serves(runs: dict[str, Found]) -> None:
    assert runs["pi05"].site("lerobot_parallelism/units")["reason"].startswith("pi05, 1 x 2 ranks, 3 units")
    assert runs["pi05"].site("pi05/frozen_prefix")["calls"] == STEPS


def test_what_our_units_do_not_serve_is_refused(runs: dict[str, Found]) -> None:
    assert "--accelerator.fsdp.ignored_modules is not for the units" in runs["ignoring"].error


def test_what_is_declared_goes_again() -> None:
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    with somaspeed_patch.patched("lerobot_parallelism"):
        assert PI05Policy._fsdp_wrap_modules == ["SiglipEncoderLayer", "_PiGemmaDecoderLayerBase"]
    assert PI05Policy._fsdp_wrap_modules is None and "_fsdp_wrap_modules" not in vars(PI05Policy)


if __name__ == "__main__":
    serve_runs(RUNS)
