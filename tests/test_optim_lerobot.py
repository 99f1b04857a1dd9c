"""The real lerobot-train with FusedAdamW, in Triton's interpreter and by torch's own step, against the host.

Checked: loss, gradient norm and learning rate of every update and the final weights, in fp32 and with bf16
weights beside fp32 ones; what the report counts; the checkpoint's keys, dtypes, shapes and values; runs that
go on from the other's checkpoint. The budget is LeRobot's own distance from the run whose optimizer is in
fp64 (`testing_optim`): policy.dtype=float32 trains without autocast, so that it is a few fp32 roundings.

As a script it trains in a process of its own: without TRITON_INTERPRET torch's own step has to serve.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_lerobot import TARGETS, TRAIN, TRAINED, Run, exact, lerobot_train, tiny
from somaspeed_patch.testing_optim import assert_within_budget, error

pytestmark = pytest.mark.skipif(not adamw.INTERPRETED, reason="the kernels reach a CPU in the interpreter")
CASES = {"fp32": [], "bf16": ["--policy.dtype=bfloat16"]}
KINDS = {
    "native": [], "exact": [], "ours": [], "plain": [], "off": [],
    "unclipped": ["--policy.optimizer_grad_clip_norm=100"],
}  # fmt: skip
STEPS, SAVED = 20, 15
Runs = dict[tuple[str, str], Run]


@pytest.fixture(scope="module", autouse=True)
def tiny_policy() -> Iterator[None]:
    with tiny():
        yield


def train(kind: str, case: str, folder: Path) -> Run:
    """STEPS updates of one kind, with a checkpoint at SAVED."""
    schedule = ["--policy.optimizer_lr=1e-3", f"--steps={STEPS}", f"--save_freq={SAVED}"]
    arguments = [*TRAIN, *schedule, *CASES[case], *KINDS[kind]]
    targets = TARGETS if kind in ("ours", "off", "plain") else ()
    features = {"optimizer": kind != "off"} if targets else {}
    with exact() if kind == "exact" else nullcontext():
        return lerobot_train(arguments, folder / f"{case} {kind}", *targets, **features)


def start(folder: Path, kind: str, *cases: str) -> subprocess.Popen[bytes]:
    """Train in a process of its own; `plain` is ours where the kernels cannot serve."""
    environment = {**os.environ, "TRITON_INTERPRET": "0" if kind == "plain" else "1"}
    command = [sys.executable, __file__, str(folder), kind, *cases]
    log = (folder / f"{kind}.log").open("w")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """By case and kind."""
    folder = tmp_path_factory.mktemp("runs")
    children = {"ours": start(folder, "ours", "bf16"), "plain": start(folder, "plain", *CASES)}
    for case, kind in (*product(CASES, ("native", "exact")), ("fp32", "ours"), ("fp32", "off")):
        train(kind, case, folder)
    train("unclipped", "fp32", folder)
    for kind, child in children.items():
        assert child.wait(400) == 0, (folder / f"{kind}.log").read_text()[-3000:]
    return {(case, kind): Run(folder / f"{case} {kind}") for case, kind in product(CASES, KINDS)}


@pytest.mark.parametrize("kind", ["ours", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_are_the_same(runs: Runs, case: str, kind: str) -> None:
    ours, native, truth = (runs[case, one] for one in (kind, "native", "exact"))
    assert len(ours.updates) == STEPS
    assert [update["lr"] for update in ours.updates] == [update["lr"] for update in native.updates]
    for name in ("loss", "grad_norm"):
        assert_within_budget(ours.logged(name), native.logged(name), truth.logged(name))
    assert_within_budget(ours.weights(STEPS), native.weights(STEPS), truth.weights(STEPS))


def test_an_optimizer_that_does_not_clip_would_be_seen(runs: Runs) -> None:
    unclipped, native, truth = (runs["fp32", kind] for kind in ("unclipped", "native", "exact"))
    pairs = [(run.logged("loss"), run.weights(STEPS)) for run in (unclipped, native, truth)]
    for other, theirs, true in zip(*pairs, strict=True):
        assert error(other, true) > 50 * error(theirs, true)


def test_without_the_feature_the_run_is_the_hosts_own_bit_for_bit(runs: Runs) -> None:
    off, native = runs["fp32", "off"], runs["fp32", "native"]
    for name in ("loss", "grad_norm", "lr"):
        assert [update[name] for update in off.updates] == [update[name] for update in native.updates]
    weights = native.weights(STEPS)
    assert all(torch.equal(value, weights[name]) for name, value in off.weights(STEPS).items())
    assert off.site("lerobot_optimizer/build")["reason"] == "optimizer=False"
    assert off.counts("accelerate_clip/clip") == (0, STEPS, 0)


@pytest.mark.parametrize("case", CASES)
def test_the_report_says_that_the_kernels_ran(runs: Runs, case: str) -> None:
    assert runs[case, "ours"].counts("lerobot_optimizer/build") == (1, 0, 0)
    assert runs[case, "ours"].counts("accelerate_clip/clip") == (STEPS, 0, 0)
    assert runs[case, "ours"].counts("accelerate_clip/optimizer") == (STEPS, 0, 0)


@pytest.mark.parametrize("case", CASES)
def test_the_report_says_why_torch_ran(runs: Runs, case: str) -> None:
    run = runs[case, "plain"]
    assert run.counts("lerobot_optimizer/build") == (1, 0, 0)
    assert run.counts("accelerate_clip/clip") == run.counts("accelerate_clip/optimizer") == (0, STEPS, 0)
    assert run.site("accelerate_clip/clip")["reason"] == "parameters on cpu"
    assert run.site("accelerate_clip/optimizer")["reason"] == "torch's step: parameters on cpu"


@pytest.mark.parametrize("kind", ["ours", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_is_as_the_host_writes_it(runs: Runs, case: str, kind: str) -> None:
    ours, native = runs[case, kind], runs[case, "native"]
    for name in ("optimizer_param_groups.json", "scheduler_state.json", "training_step.json"):
        texts = [(run.checkpoint(SAVED) / "training_state" / name).read_text() for run in (ours, native)]
        assert texts[0] == texts[1], name
    mine, theirs, truth = (run.state(SAVED) for run in (ours, native, runs[case, "exact"]))
    assert {name.rsplit("/")[-1] for name in theirs} == {"step", "exp_avg", "exp_avg_sq"}
    assert len(theirs) == 3 * TRAINED
    assert all(mine[name].dtype == value.dtype for name, value in theirs.items())
    assert_within_budget(mine, theirs, truth)


def loaded(kind: type[torch.optim.AdamW], policy: Any, checkpoint: Path) -> list[Any]:
    """Step, optimizer and scheduler, as lerobot-train --resume=true makes them."""
    from lerobot.common.train_utils import load_training_state

    optimizer = kind(policy.get_optim_params())
    scheduler = policy.config.get_scheduler_preset().build(optimizer, STEPS)
    return list(load_training_state(checkpoint, optimizer, scheduler))


def saved(folder: Path, state: list[Any]) -> dict[str, bytes]:
    """The optimizer's files, as lerobot-train writes them."""
    from lerobot.common.train_utils import save_training_state

    save_training_state(folder, *state)
    return {file.name: file.read_bytes() for file in (folder / "training_state").glob("optimizer*")}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_back_every_bit_to_either_class(runs: Runs, case: str, tmp_path: Path) -> None:
    from lerobot.policies.pi05 import PI05Policy

    checkpoint = runs[case, "ours"].checkpoint(SAVED)
    policy = PI05Policy.from_pretrained(checkpoint / "pretrained_model")
    state = loaded(FusedAdamW, policy, checkpoint)
    ours = state[1]
    for param in ours.state:
        param.grad = torch.randn_like(param)
    ours.clip_grad_norm_(1.0)
    ours.step()
    files = saved(tmp_path / "ours", state)
    assert len(files) == 2
    for kind in (torch.optim.AdamW, FusedAdamW):
        again = loaded(kind, policy, tmp_path / "ours")
        assert saved(tmp_path / kind.__name__, again) == files
        assert_same_state(again[1], ours)


def assert_same_state(theirs: torch.optim.AdamW, live: FusedAdamW) -> None:
    assert theirs.state.keys() == live.state.keys() and len(live.state) == TRAINED
    for param, entry in live.state.items():
        assert entry.keys() == theirs.state[param].keys()
        assert all(torch.equal(theirs.state[param][name], value) for name, value in entry.items())
        assert entry["step"].shape == () and entry["step"].dtype == torch.float32
        assert entry["step"] == SAVED + 1


@pytest.fixture(scope="module")
def resumed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Five updates by lerobot-train --resume=true: whose checkpoint, and who goes on. `native` is stock."""
    folder = tmp_path_factory.mktemp("resumed")

    def go_on(source: str, kind: str) -> Run:
        config = runs["fp32", source].config(SAVED)
        with exact() if kind == "exact" else nullcontext():
            return lerobot_train(
                [f"--config_path={config}", "--resume=true"],
                folder / f"{source} to {kind}",
                *TARGETS if kind == "ours" else (),
            )

    kinds = ("native", "exact", "ours")
    return {f"{source} to {kind}": go_on(source, kind) for source in ("native", "ours") for kind in kinds}


@pytest.mark.parametrize("source", ["native", "ours"])
def test_a_run_goes_on_from_either_checkpoint(resumed: dict[str, Run], source: str) -> None:
    ours, native, truth = (resumed[f"{source} to {kind}"] for kind in ("ours", "native", "exact"))
    assert [update["step"] for update in ours.updates] == [16, 17, 18, 19, 20]
    assert [update["lr"] for update in ours.updates] == [update["lr"] for update in native.updates]
    for name in ("loss", "grad_norm"):
        assert_within_budget(ours.logged(name), native.logged(name), truth.logged(name))
    assert_within_budget(ours.weights(STEPS), native.weights(STEPS), truth.weights(STEPS))
    assert_within_budget(ours.state(STEPS), native.state(STEPS), truth.state(STEPS))


def test_a_resumed_run_is_served_by_the_kernels(resumed: dict[str, Run]) -> None:
    for source in ("native", "ours"):
        assert resumed[f"{source} to ours"].counts("accelerate_clip/clip") == (5, 0, 0)
        assert resumed[f"{source} to ours"].counts("accelerate_clip/optimizer") == (5, 0, 0)


if __name__ == "__main__":
    with tiny():
        for case in sys.argv[3:]:
            train(sys.argv[2], case, Path(sys.argv[1]))
