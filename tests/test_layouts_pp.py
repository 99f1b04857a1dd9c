"""The real lerobot-train through pipelines, on gloo ranks, against one process on the same samples and noise.

As a script it serves the runs: see testing_layouts.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import pytest
import torch
import torch.distributed as dist
from torch import nn

from somaspeed_patch import features
from somaspeed_patch.layouts import pipeline_refusals, stages
from somaspeed_patch.layouts.partition import split
from somaspeed_patch.layouts.transfer import Line
from somaspeed_patch.optim import shards
from somaspeed_patch.testing_layouts import STEPS, Found, LayoutRun, difference, run_all, serve_runs

FAMILIES = ("pi05 deep", "molmoact2", "groot")
LAYOUTS = {"pp 2": (2, "pp=2"), "pp 2 fsdp 2": (4, "pp=2,dp_shard=2")}
RECOMPUTED = ("--policy.gradient_checkpointing=true",)
BACKBONE_TRAINS = ("--policy.train_expert_only=false",)
MORE = STEPS + 2
# LeRobot's own AdamW where FusedAdamW is not what is tested.
TORCHS = (("optimizer", False),)


def _arguments(policy: str, name: str) -> tuple[str, ...]:
    """With shards pi0.5 and MolmoAct2 recompute their activations, which changes no number."""
    return RECOMPUTED if "fsdp" in name and policy != "groot" else ()


def _native(**options: Any) -> LayoutRun:
    return LayoutRun(policy="pi05 deep", patched=False, arguments=BACKBONE_TRAINS, steps=4, **options)


RUNS = {
    **{f"{policy} alone": LayoutRun(policy=policy, patched=False) for policy in FAMILIES},
    **{
        f"{policy} {name}": LayoutRun(
            policy=policy,
            ranks=ranks,
            layout=layout,
            arguments=_arguments(policy, name),
            features=() if (policy, name) == ("pi05 deep", "pp 2") else TORCHS,
        )
        for policy in FAMILIES
        for name, (ranks, layout) in LAYOUTS.items()
        if policy == "pi05 deep" or ranks == 4
    },
    # Seven blocks in four stages: cuts inside stacks, and ranks with no part in some.
    "groot pp 4": LayoutRun(policy="groot", ranks=4, layout="pp=4", features=TORCHS),
    "native alone": _native(),
    "native pp 2": _native(ranks=2, layout="pp=2"),
    "pp by one": LayoutRun(policy="pi05 deep", patched=False, steps=MORE, resumes="pi05 deep pp 2"),
    "one by pp": LayoutRun(
        policy="pi05 deep",
        ranks=2,
        layout="pp=2",
        steps=MORE,
        resumes="pi05 deep alone",
        features=TORCHS,
    ),
    "too many": LayoutRun(policy="pi05", ranks=2, layout="pp=2", steps=1),
    "unfrozen": LayoutRun(
        policy="molmoact2",
        ranks=2,
        layout="pp=2",
        steps=1,
        arguments=("--policy.train_action_expert_only=false",),
    ),
    "recomputed native": LayoutRun(
        policy="pi05 deep", ranks=2, layout="pp=2", steps=1, arguments=(*BACKBONE_TRAINS, *RECOMPUTED)
    ),
}
REFUSALS = {
    "too many": "layout: pp=2 stages, but pi05's .* are 1 blocks and each stage needs one; use pp <= 1",
    "unfrozen": "layout: pp=2: it needs our forward with the vision-language side frozen, but the language"
    " model is not frozen: .* trains",
    "recomputed native": "layout: pp=2: the host's own forward runs .* not with gradient_checkpointing",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run_all(__file__, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("name", ["pi05 deep pp 2", *(f"{policy} pp 2 fsdp 2" for policy in FAMILIES)])
def test_ten_updates_are_those_of_one_process(runs: dict[str, Found], name: str) -> None:
    assert not difference(runs[name], runs[f"{name.split(' pp')[0]} alone"], state=True)


def test_cuts_inside_stacks_change_nothing(runs: dict[str, Found]) -> None:
    run = runs["groot pp 4"]
    assert not difference(run, runs["groot alone"], state=True)
    counts = run.site("layouts/pipeline")["reason"].split("blocks a stage: ")[1]
    assert any(line.count(" 0") < 3 for line in counts.split("; "))


def test_a_backbone_that_trains_goes_through_the_hosts_own_forward(runs: dict[str, Found]) -> None:
    run = runs["native pp 2"]
    assert not difference(run, runs["native alone"], updates=4, state=True)
    assert run.site("pi05/frozen_prefix")["native_calls"] == 4


def test_checkpoints_go_on_with_and_without_a_pipeline(runs: dict[str, Found]) -> None:
    assert not difference(runs["one by pp"], runs["pp by one"], updates=MORE - STEPS, state=True)


_PI05 = (".language_model.layers.1.", ".gemma_expert.model.layers.1.")


@pytest.mark.parametrize(
    ("policy", "second", "layout"),
    [
        ("pi05 deep", _PI05, "pp 2"),
        ("pi05 deep", _PI05, "pp 2 fsdp 2"),
        ("molmoact2", (".transformer.blocks.1.", ".action_expert.blocks.1."), "pp 2 fsdp 2"),
    ],
)
def test_a_rank_holds_its_blocks_only(
    runs: dict[str, Found], policy: str, second: tuple[str, ...], layout: str
) -> None:
    ranks, text = LAYOUTS[layout]
    weights, folder = runs[f"{policy} alone"].weights, runs[f"{policy} {layout}"].folder.parent
    blocks = sum(value.nbytes for name, value in weights.items() if any(part in name for part in second))
    for rank in range(ranks):
        whole, held = map(int, (folder / _bytes_of(policy, text, rank)).read_text().split())
        assert 0 < blocks < whole
        assert held == whole - blocks if ranks == 2 else held < whole - blocks


@pytest.mark.parametrize("run", REFUSALS)
def test_what_does_not_work_is_refused_before_training(runs: dict[str, Found], run: str) -> None:
    assert re.search(REFUSALS[run], runs[run].error)
    assert not list(runs[run].folder.parent.glob(f"{run}.steps.jsonl*"))


@pytest.mark.parametrize(
    ("family", "tp", "expected"),
    [
        ("pi05", 2, "together with tp=2 it is not built"),
        ("act", 1, "no stages are known for act, only for pi05"),
    ],
)
def test_a_mesh_or_family_without_stages_is_refused(family: str, tp: int, expected: str) -> None:
    assert expected in str(pipeline_refusals.of(nn.Module(), family, tp))


@pytest.mark.parametrize(
    ("weights", "stages_", "expected"),
    [
        ([1] * 6, 2, [0, 0, 0, 1, 1, 1]),
        ([1] * 18, 4, [0] * 4 + [1] * 4 + [2] * 5 + [3] * 5),
        ([9, 1, 1, 1], 2, [0, 1, 1, 1]),
        ([1, 1, 8], 3, [0, 1, 2]),
    ],
)
def test_stages_are_as_equal_as_blocks_allow(weights: list[int], stages_: int, expected: list[int]) -> None:
    assert split(weights, stages_, "blocks") == expected


@pytest.mark.parametrize("draws", [True, False])
def test_dropout_of_one_stage_leaves_the_noise_of_all_alike(draws: bool) -> None:
    inside, behind = zip(*(_draw_on_stage(stage, draws) for stage in range(2)), strict=True)
    assert torch.equal(behind[0], behind[1])
    assert torch.equal(inside[0], inside[1]) is not draws


def _draw_on_stage(stage: int, draws: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a block's dropout and the code behind the blocks draw on one stage, all from one seed."""
    line = Line(group=None, ranks=(0, 1), stage=stage, device=torch.device("cpu"))
    block = nn.Dropout(0.5)
    stages.put(block, stages.Place(line=line, owner=stage, cut=None, end=None, draws=draws))
    torch.manual_seed(7)
    with stages.apart([block]):
        dropped = block(torch.ones(64))
    return dropped, torch.rand(4)


def _bytes_of(policy: str, layout: str, rank: int) -> str:
    return f"{policy}.{layout}.{rank}.bytes"


@contextmanager
def _noting_bytes(folder: Path) -> Iterator[None]:
    """Each rank writes down the bytes of its parameters before and after the model is taken apart."""
    from somaspeed_patch.layouts import launch

    prepare = launch._prepare

    def prepared(wrapped: Any, accelerator: Any, model: Any) -> Any:
        whole = sum(p.nbytes for p in model.parameters())
        result = prepare(wrapped, accelerator, model)
        held = sum(shards.local(p).nbytes for p in result.parameters())
        policy = {"pi05": "pi05 deep"}.get(model.name, model.name)
        file = folder / _bytes_of(policy, str(features.value("layout")), dist.get_rank())
        file.write_text(f"{whole} {held}")
        return result

    with replaced.object(launch, "_prepare", prepared):
        yield


if __name__ == "__main__":
    with _noting_bytes(Path(sys.argv[1])):
        serve_runs(RUNS)
