"""Tensor parallelism: the real lerobot-train with `tp=2` on gloo ranks, against one process.

As a script it serves the runs: see testing_layouts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch as replaced

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from somaspeed_patch.layouts import families, pi05_layers, tensor_parallel, tp_ops
from somaspeed_patch.layouts.families import Family
from somaspeed_patch.testing_layouts import POLICIES, STEPS, Found, LayoutRun, difference, run_all, serve_runs

BOTH = "tp=2,dp_shard=2"
MORE = STEPS + 3


@contextmanager
def groot_with_dropout() -> Iterator[None]:
    from somaspeed_patch.tiny_groot import redirect, sizes

    micro = replace(sizes.SIZES["micro"], dropout=0.2)
    with replaced.dict(cast(Any, sizes.SIZES), {"micro": micro}), redirect.installed("micro"):
        yield


POLICIES["groot_dropout"] = replace(POLICIES["groot"], tiny=groot_with_dropout)
SPLIT = {  # the run, and the one process it must equal
    "pi05 tp": "pi05 alone",
    "pi05 both": "pi05 alone",
    "molmoact2 both": "molmoact2 alone",
    "groot tp": "groot alone dropping",
    "groot both": "groot alone",
    "pi05 alone from both": "pi05 alone from alone",
    "pi05 both from alone": "pi05 alone from alone",
}
RUNS = {
    "pi05 alone": LayoutRun(policy="pi05", patched=False),
    "molmoact2 alone": LayoutRun(policy="molmoact2", patched=False),
    "groot alone": LayoutRun(policy="groot", patched=False),
    "groot alone dropping": LayoutRun(policy="groot_dropout", patched=False),
    "pi05 tp": LayoutRun(policy="pi05", ranks=2, layout="tp=2"),
    "groot tp": LayoutRun(policy="groot_dropout", ranks=2, layout="tp=2"),
    "pi05 both": LayoutRun(policy="pi05", ranks=4, layout=BOTH),
    "molmoact2 both": LayoutRun(policy="molmoact2", ranks=4, layout=BOTH),
    "groot both": LayoutRun(policy="groot", ranks=4, layout=BOTH),
    "pi05 alone from alone": LayoutRun(policy="pi05", patched=False, resumes="pi05 alone", steps=MORE),
    "pi05 alone from both": LayoutRun(policy="pi05", patched=False, resumes="pi05 both", steps=MORE),
    "pi05 both from alone": LayoutRun(policy="pi05", ranks=4, layout=BOTH, resumes="pi05 alone", steps=MORE),
    "pi05 unpatched": LayoutRun(policy="pi05", ranks=2, layout="tp=2", features=(("frozen_prefix", False),)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return run_all(__file__, tmp_path_factory.mktemp("tp"))


@pytest.mark.parametrize("name", SPLIT)
def test_updates_are_those_of_one_process(runs: dict[str, Found], name: str) -> None:
    updates = MORE - STEPS if "from" in name else STEPS
    assert not difference(runs[name], runs[SPLIT[name]], updates, state=True)


@pytest.mark.parametrize("name", ["pi05 tp", "groot tp"])
def test_what_is_not_split_gets_the_same_gradients_to_the_last_bit(runs: dict[str, Found], name: str) -> None:
    # Whole parameters add to the norm on each rank by themselves, so that ten equal norms exclude a drift.
    assert torch.equal(runs[name].norms[0], runs[name].norms[1])


def test_the_report_says_how_much_is_split(runs: dict[str, Found]) -> None:
    assert "tp 2: 0.1 of 0.5 M numbers split" in runs["groot tp"].site("layouts/shard")["reason"]


def test_pi05_needs_the_forward_that_takes_any_number_of_heads(runs: dict[str, Found]) -> None:
    refused = "tp=2 splits pi0.5's heads, of which LeRobot's own forward counts 8, so ours has to run; but "
    assert refused + "frozen_prefix is off" in runs["pi05 unpatched"].error


class Expert(nn.Module):
    """MolmoAct2's names around one real block of its expert."""

    def __init__(self, heads: int = 2, width: int = 12, multiple: int = 4, **options: Any) -> None:
        from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import ActionExpertBlock

        super().__init__()
        block = ActionExpertBlock(width, heads, mlp_ratio=1.0, ffn_multiple_of=multiple, **options)
        self.action_expert = nn.ModuleDict({"blocks": nn.ModuleList([block])})


def refusal(model: nn.Module, size: int, family: str = "molmoact2") -> str:
    known = {known.name: known for known in families.FAMILIES}
    with pytest.raises(ValueError, match="^layout: tp=") as caught:
        tensor_parallel.check(model, known.get(family, Family(name=family, needs=(), units=())), size)
    return str(caught.value)


def test_heads_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    where = "action_expert.blocks.0.self_attn"
    assert f"tp=4 does not divide the 6 heads of {where}: 6 / 4 = 1.50; use a tp that does (1, 2, 3, 6)" in (
        refusal(Expert(heads=6), 4)
    )


def test_a_width_that_does_not_divide_is_refused() -> None:
    assert "tp=3 does not divide the 16 columns of action_expert.blocks.0.mlp" in refusal(
        Expert(heads=3, multiple=8), 3
    )


@pytest.mark.parametrize("option", ["attn_dropout", "dropout"])
def test_a_dropout_that_would_draw_other_numbers_is_refused(option: str) -> None:
    assert "cannot draw the dropout of action_expert.blocks.0" in refusal(
        Expert(**cast(Any, {option: 0.1})), 2
    )


def test_lora_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(cast(Any, Expert()), LoraConfig(target_modules=["up_proj"]))
    assert "tp=2 does not split PEFT's" in refusal(cast(nn.Module, model), 2)


def test_a_linear_of_another_kind_is_refused() -> None:
    class Quantized(nn.Linear):
        pass

    model = Expert()
    cast(Any, model).action_expert.blocks[0].mlp.up_proj = Quantized(12, 12)
    assert "action_expert.blocks.0.mlp.up_proj is a Quantized" in refusal(model, 2)


def test_an_unknown_family_is_refused() -> None:
    assert "knows the layers of pi05, molmoact2, groot, but this is other" in refusal(Expert(), 2, "other")


def test_parts_of_a_dropout_are_the_whole_one() -> None:
    layer, x = nn.Dropout(0.3), torch.randn(4, 3, 10)
    torch.manual_seed(5)
    whole = layer(x)
    for index, part in enumerate(x.chunk(2, dim=-1)):
        place = tp_ops.Place(group=cast(Any, None), index=index, size=2)
        torch.manual_seed(5)
        assert torch.equal(tp_ops.part_of_dropout(layer, place, part), whole.chunk(2, dim=-1)[index])
        assert tp_ops.part_of_dropout(layer.eval(), place, part) is part
        layer.train()


def test_lerobots_pi05_layer_refuses_a_part_of_the_heads() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        layer = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
        assert not tensor_parallel.is_split(layer)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        parallelize_module(layer, mesh, {"q_proj": ColwiseParallel()})
        arguments = ([None, None], None, None, [None, None], [nn.Linear(4, 4), layer], None)
        with pytest.raises(ValueError, match="LeRobot's own pi0.5 layer would count heads"):
            pi05_layers.joint_layers(lambda *_: None, None, arguments, {})
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    serve_runs(RUNS)
