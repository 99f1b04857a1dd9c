"""`somaspeed layout plan`: the census against real models and shards, the memory against measured peaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from somaspeed_patch import cli, patched
from somaspeed_patch.ab import synthetic_groot, synthetic_molmoact2, synthetic_pi05, synthetic_recipe
from somaspeed_patch.layouts import families, mesh
from somaspeed_patch.layouts.layout import Layout, parse
from somaspeed_patch.layouts.shard import shard
from somaspeed_patch.layouts_plan import activations, cuts, meta, plan, sizes, table
from somaspeed_patch.layouts_plan.activations import Kept, Part
from somaspeed_patch.layouts_plan.sizes import Census, Unit, Weight

RECIPES = "pi05_libero", "molmoact2_libero", "groot_libero"
SUBJECTS = {"pi05": synthetic_pi05, "molmoact2": synthetic_molmoact2, "groot": synthetic_groot}

# GiB, `peak_allocated_gib` of one H200: recipes/results/{pi05,molmoact2,groot}_synthetic_h200.json; pi0.5's
# eager ones of pi05_optimizer_h200.json. At batch 8 an older optimizer of ours had 1 GiB of scratch (13.69).
MEASURED = [
    ("pi05_libero", "eager", 8, 12.678),
    ("pi05_libero", "eager", 32, 14.179),
    ("pi05_libero", "eager", 256, 31.475),
    ("pi05_libero", "compiled", 8, 13.694),
    ("pi05_libero", "compiled", 32, 13.720),
    ("pi05_libero", "compiled", 256, 25.850),
    ("molmoact2_libero", "eager", 32, 27.692),
    ("molmoact2_libero", "compiled", 32, 22.655),
    ("molmoact2_libero", "compiled", 64, 32.604),
    ("molmoact2_libero", "compiled", 128, 52.802),
    ("groot_libero", "eager", 80, 37.236),
    ("groot_libero", "eager", 320, 78.163),
    ("groot_libero", "compiled", 80, 35.367),
    ("groot_libero", "compiled", 320, 70.843),
    ("groot_libero", "compiled", 640, 118.185),
    ("groot_libero", "recompute", 320, 46.588),
    ("groot_libero", "recompute", 640, 72.036),
]


@cache
def census(recipe: str) -> Census:
    return sizes.take(meta.model(synthetic_recipe.load(recipe)))


def settings(recipe: str, forward: str, batch: int) -> plan.Settings:
    return plan.Settings(
        census=census(recipe),
        kept=activations.of(synthetic_recipe.load(recipe), forward),
        batch=batch,
        autocast=recipe != "molmoact2_libero",
    )


def tiny(recipe: str, size: str = "micro") -> Any:
    return replace(synthetic_recipe.load(recipe), size=size)


@pytest.mark.parametrize(("recipe", "forward", "batch", "gib"), MEASURED)
def test_the_peak_of_one_gpu_is_within_a_tenth_of_the_measured_one(
    recipe: str, forward: str, batch: int, gib: float
) -> None:
    (row,) = plan.rows(settings(recipe, forward, batch), 1)
    assert row.memory.peak / plan.GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "total", "trainable"),
    [
        ("pi05_libero", 4_143_404_816, 693_422_112),
        ("molmoact2_libero", 5_442_196_208, 577_564_448),
        ("groot_libero", 3_144_016_000, 1_620_515_968),
    ],
)
def test_full_size_models_have_the_published_parameters(recipe: str, total: int, trainable: int) -> None:
    found = census(recipe)
    assert found.numbers(trains=True) == trainable
    assert found.numbers(trains=True) + found.numbers(trains=False) == total


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_census_on_meta_is_that_of_the_real_tiny_model(recipe: str) -> None:
    section = tiny(recipe)
    policy = SUBJECTS[section.model].Subject(section, torch.device("cpu")).policy
    on_meta, real = sizes.take(meta.model(section)), sizes.take(policy)
    assert on_meta == real
    for trains in (True, False):
        own = [p for p in policy.parameters() if p.requires_grad is trains]
        weights = [weight for unit in real.units for weight in unit.of(trains=trains)]
        assert sizes.stored(weights) == sum(p.nbytes for p in own)
        assert real.numbers(trains=trains) == sum(p.numel() for p in own)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Rank 0 of four, without the other three."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", ["whole", "sharded"])
@pytest.mark.usefixtures("four_ranks")
def test_a_rank_holds_what_fully_shard_leaves_it(recipe: str, frozen: str) -> None:
    section = tiny(recipe)
    policy = SUBJECTS[section.model].Subject(section, torch.device("cpu")).policy
    found, family = sizes.take(policy), families.of(policy)
    layout = Layout(dp_shard=4, frozen=frozen)
    assert family is not None
    shard(policy, family, layout, mesh.build(layout, "cpu"))
    chosen = plan.Settings(census=found, kept=activations.of(section, "eager"), batch=1, autocast=False)
    row = next(row for row in plan.rows(chosen, 4) if row.layout == layout)
    for trains, predicted in ((True, row.memory.trainable), (False, row.memory.frozen)):
        held = [p for p in policy.parameters() if p.requires_grad is trains]
        assert predicted == sum(_bytes_here(p) for p in held)


def _bytes_here(parameter: Any) -> int:
    """With the padding of an uneven shard."""
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return local.untyped_storage().nbytes()


def test_molmoact2s_eager_layers_keep_what_autograd_saves() -> None:
    section, batch = tiny("molmoact2_libero", "small"), 4
    subject = synthetic_molmoact2.Subject(section, torch.device("cpu"))
    parameters = {p.untyped_storage().data_ptr() for p in subject.policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with patched("molmoact2"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        subject.policy.forward(subject.batch(batch))
    saved = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in parameters)
    found = activations.of(section, activations.EAGER)
    layers = found.stacks[0].on(tp=1)
    assert saved / batch == pytest.approx(layers, rel=0.06)  # the ends of the expert are not modelled


def weight(*shape: int, trains: bool = True, itemsize: int = 2, split: int | None = None) -> Weight:
    return Weight(shape=shape, itemsize=itemsize, trains=trains, castable=itemsize == 4, split=split)


SMALL = Census(
    family="none",
    units=(
        Unit(name="never", weights=(weight(1000),), runs=False),
        Unit(name="layers.0", weights=(weight(6, 10), weight(8, 100, trains=False)), runs=True, block=(0, 0)),
        Unit(
            name="layers.1", weights=(weight(8, 10, split=0), weight(8, 10, split=1)), runs=True, block=(0, 1)
        ),
        Unit(name=sizes.ROOT, weights=(weight(4, 5, itemsize=4),), runs=True),
    ),
    tp_width=2,
)
SMALL_SETTINGS = plan.Settings(
    census=SMALL,
    kept=Kept(
        stacks=(Part(whole=1e9, split=1e9),), ends=Part(whole=1e9), working=1e9, reduced=500, passed=70
    ),
    batch=3,
    autocast=True,
)


def small(text: str) -> plan.Row:
    layout = parse(text)
    return next(row for row in plan.rows(SMALL_SETTINGS, layout.ranks) if row.layout == layout)


def test_fsdp2_pads_shards_and_gathers_a_unit_with_the_next_one() -> None:
    memory = small("dp_shard=4,frozen=whole").memory
    # Six rows in four shards are two a rank.
    assert memory.trainable == 2 * 250 + 2 * 20 + 2 * 40 + 4 * 5
    assert memory.gradients == 2 * 20 + 2 * 40 + 4 * 5
    assert memory.optimizer == 2 * memory.gradients
    assert memory.frozen == 1600
    assert memory.casts == 2 * 20
    # The root 80, layers.0 160 beside twice layers.1 320; gradients of root and layers.1, which fp32 sends.
    assert memory.gathered == 80 + 160 + 2 * 320 + 80 + 320 + 640
    assert memory.activations == 9e9
    assert memory.peak == 640 + 1600 + 280 + memory.gathered + 40 + 9e9 + plan.WORKSPACE
    assert small("dp_shard=4,frozen=sharded").memory.frozen == 400


def test_ddp_holds_buckets_and_tensor_parallelism_splits_what_its_plan_names() -> None:
    ddp, tp = small("dp_replicate=2").memory, small("tp=2").memory
    assert ddp.trainable == 2000 + 120 + 320 + 80
    assert ddp.gradients == 120 + 320 + 80 + ddp.trainable
    assert ddp.gathered == tp.gathered == 0
    assert tp.trainable == 2000 + 120 + 160 + 80
    assert tp.activations == 3 * (2e9 + 1e9 / 2)


def test_bytes_that_a_rank_sends() -> None:
    fsdp, ddp = small("dp_shard=4").traffic, small("dp_replicate=4").traffic
    # layers.0 and layers.1 for forward and backward, the root once, `never` not at all.
    assert fsdp.gathered == 3 * (2 * 40 + 2 * 80 + 20)
    assert fsdp.reduced == 3 * 4 * (20 + 40 + 5)
    assert (ddp.gathered, ddp.reduced, ddp.states) == (0, 2 * 3 / 4 * (2000 + 120 + 320 + 80), 0)
    hsdp = small("dp_replicate=2,dp_shard=2").traffic
    assert hsdp.gathered == 2 * (60 + 160) + 40
    assert hsdp.reduced == 4 * (30 + 80 + 10) + 2 * 1 / 2 * 4 * (30 + 80 + 10)
    assert small("dp_shard=4,frozen=sharded").traffic.gathered == fsdp.gathered + 2 * 3 * 400
    assert small("tp=2").traffic.states == 2 * 1 / 2 * 500 * 3
    assert fsdp.seconds(link_gbs=2.0) == fsdp.total / 2e9


def test_a_pipeline_is_planned_by_its_fullest_stage() -> None:
    # layers.0 weighs 4 * 60 + 800, layers.1 4 * 160: one each. Stage 0 has 1600 frozen bytes.
    row = small("pp=2")
    assert row.memory.activations == 3 * (1e9 + 2e9 / 2)
    assert (row.memory.trainable, row.memory.frozen) == (2000 + 120 + 80, 1600)
    assert row.traffic.states == 3 * 2 * 70
    assert row.traffic.reduced == 2 * 1 / 2 * 80  # the root's gradients
    assert row.samples == 3
    with pytest.raises(ValueError, match="pp=3 stages, but none's stacks are 2 blocks"):
        cuts.stages(SMALL, 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_share_blocks_and_activations(recipe: str) -> None:
    kept = replace(activations.of(synthetic_recipe.load(recipe), activations.EAGER), working=0)
    found = census(recipe)
    stages = cuts.stages(found, 4)
    blocks = [unit for unit in found.units if unit.block is not None]
    assert sorted(u.name for s in stages for u in s.census.units if u.block) == sorted(u.name for u in blocks)
    assert [sum(part) for part in zip(*(s.shares for s in stages), strict=True)] == pytest.approx(
        [1.0] * len(kept.stacks)
    )
    alone = sum(kept.peak(1, 1, stage.shares) - kept.ends.on(1) for stage in stages)
    assert alone == pytest.approx(kept.peak(1) - kept.ends.on(1))


def test_reshard_never_keeps_what_it_gathered() -> None:
    chosen = replace(SMALL_SETTINGS, reshard="never")
    row = next(row for row in plan.rows(chosen, 4) if row.name == "fsdp2 4 whole")
    assert row.traffic.gathered == 3 * (40 + 80 + 20)
    assert row.memory.gathered == small("dp_shard=4").memory.gathered


def test_the_layouts_of_eight_gpus() -> None:
    found = dict(plan.layouts(8, tp_width=12, blocks=4))
    assert list(found) == [
        "ddp",
        *(
            f"{name} {frozen}"
            for name in ("fsdp2 8", "hsdp 2x4", "hsdp 4x2")
            for frozen in ("whole", "sharded")
        ),
        *(f"tp {tp}, fsdp2 {8 // tp} {frozen}" for tp in (2, 4) for frozen in ("whole", "sharded")),
        "pp 2, fsdp2 4 whole",
        "pp 4, fsdp2 2 whole",
    ]
    assert all(layout.ranks == 8 for layout in found.values())
    assert dict(plan.layouts(1, tp_width=12, blocks=4)) == {"one process": Layout()}
    assert list(plan.layouts(2, tp_width=2, blocks=0))[-1] == ("tp 2 whole", Layout(tp=2))


def test_it_takes_what_fits_and_sends_least() -> None:
    found = plan.rows(SMALL_SETTINGS, 4)
    first = plan.best(found, gib=80)
    assert first is not None
    assert first.traffic.total / first.samples == min(row.traffic.total / row.samples for row in found)
    assert plan.best(found, gib=1) is None
    row = small("dp_shard=4")
    most = plan.largest_batch(row, gib=80)
    for batch, fits in ((most, True), (most + 1, False)):
        again = next(
            other for other in plan.rows(replace(SMALL_SETTINGS, batch=batch), 4) if other.name == row.name
        )
        assert plan.fits(again, gib=80) is fits
    assert plan.largest_batch(row, gib=1) == 0


def asked(*words: str) -> int:
    result: int = cli.main(["layout", "plan", *words])
    return result


def test_the_table_fits_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("groot_libero", "--gpus", "8", "--gib", "48") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= table.WIDTH
    assert "batch 320 a replica, 8 GPUs of 48 GiB: 1,620.5 M numbers train" in shown
    assert "take tp 4, fsdp2 2 whole: dp_shard=2,tp=4" in shown
    assert "without tp and pp fsdp2 8 sharded fits batches to" in shown


def test_json_says_the_same_and_one_means_that_none_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("pi05_libero", "--gpus", "4", "--batch", "256", "--arm", "patched_compiled", "--json")
    assert asked(*words, "--gib", "24") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["forward"], found["link_gbs"]) == (256, "compiled", 25.0)
    assert found["parameters"] == {"trainable": 693_422_112, "frozen": 3_449_982_704}
    by_name = {entry["name"]: entry for entry in found["layouts"]}
    fitting = {name for name, entry in by_name.items() if entry["fits"]}
    assert fitting and "ddp" not in fitting
    assert found["take"] in {by_name[name]["layout"] for name in fitting}
    assert parse(found["take"]).ranks == 4
    assert asked(*words, "--gib", "8") == 1
    assert json.loads(capsys.readouterr().out)["take"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["pi05_libro", "--gpus", "1"], "did you mean pi05_libero?"),
        (["pi05_libero", "--gpus", "0"], "--gpus must be more than 0, but is 0"),
        (["pi05_libero", "--gpus", "2", "--batch", "-1"], "--batch must be more than 0, but is -1"),
        (["groot_hf_trainer", "--gpus", "1"], "expected a section `synthetic`"),
        (["pi05_libero", "--gpus", "1", "--arm", "native"], "the host's own forward"),
        (["pi05_libero", "--gpus", "1", "--arm", "patchd"], "did you mean patched?"),
        (["pi05_libero", "--gpus", "1", "--arm", "without_compact_tokens"], "features compact_tokens"),
        (["groot_libero", "--gpus", "1", "--arm", "patched_compiled_documented"], "policy all_fp32"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        asked(*words, "--gib", "24")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_only_groot_recomputes_and_only_bf16_is_modelled() -> None:
    recipe = synthetic_recipe.load("pi05_libero")
    with pytest.raises(ValueError, match="only groot has the feature recompute, but this is pi05"):
        activations.of(recipe, activations.RECOMPUTE)
    with pytest.raises(ValueError, match="only bfloat16 is modelled, but dtype is float32"):
        activations.of(replace(recipe, dtype="float32"), activations.EAGER)
