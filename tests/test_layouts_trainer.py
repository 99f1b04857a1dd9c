"""transformers.Trainer under layouts, on gloo ranks, against one native process with the same samples.

Checked: losses, norms, learning rates and weights of every update under FSDP2 and HSDP, with a ZeRO-2 config
in the recipe, with and without accumulation; how often gradients are sent; checkpoints that another layout
and one native process go on from; ZeRO-2 checkpoints; what is refused. As a script it serves the runs.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import somaspeed_patch
from somaspeed_patch.layouts import hf_trainer, zero_checkpoint, zero_config
from somaspeed_patch.sites import site
from somaspeed_patch.testing_layouts_trainer import (
    MAX_NORM,
    ROWS,
    SAVED,
    STEPS,
    TARGETS,
    ZERO2,
    TrainerRun,
    run_all,
    serve,
)

FSDP, HSDP = "dp_shard=2", "dp_replicate=2,dp_shard=2"
UNITS = 6  # with something to train: four blocks of the DiT, one of vl_self_attention, the root
OWN_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
BF16 = {"bf16": True, "max_steps": SAVED}
Ranks = list[dict[str, Any]]


def as_zero2(folder: Path) -> None:
    """The native run's checkpoint as DeepSpeed's ZeRO-2 writes it on three ranks."""
    source = folder / "alone" / f"checkpoint-{SAVED}"
    made = folder / "zero2" / source.name
    shutil.copytree(source, made)
    saved = torch.load(made / "optimizer.pt")
    (made / "optimizer.pt").unlink()
    (made / "latest").write_text("global_step2")
    weights, shapes = load_file(made / "model.safetensors"), names_by_group(folder)
    write_zero2(made / "global_step2", weights, shapes, saved)


def names_by_group(folder: Path) -> list[list[str]]:
    groups: list[list[str]] = json.loads((folder / "alone" / "groups.json").read_text())
    return groups


def write_zero2(folder: Path, weights: Any, groups: list[list[str]], saved: Any) -> None:
    """See zero_checkpoint; the padding of moments is saved, and that of weights is not."""
    folder.mkdir()
    parts: list[dict[str, Any]] = [
        {"single_partition_of_fp32_groups": [], "partition_count": [3, 3], "zero_stage": 2,
         "base_optimizer_state": {"state": {}, "param_groups": saved["param_groups"]}}
        for _ in range(3)
    ]  # fmt: skip
    place = 0
    for group, names in enumerate(groups):
        entries = [saved["state"][place + i] for i in range(len(names))]
        place += len(names)
        for rank, piece in enumerate(pieces([weights[name] for name in names])):
            parts[rank]["single_partition_of_fp32_groups"].append(piece)
        moments = {key: pieces([e[key] for e in entries], pad=True) for key in ("exp_avg", "exp_avg_sq")}
        for rank, part in enumerate(parts):
            state = {key: moment[rank] for key, moment in moments.items()}
            part["base_optimizer_state"]["state"][group] = {**state, "step": entries[0]["step"]}
    for rank, part in enumerate(parts):
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": part, "ds_version": "0.17.6"}, file)
    shapes = [{name: weights[name].shape for name in names} for names in groups]
    torch.save({"param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")


def pieces(tensors: list[torch.Tensor], pad: bool = False) -> list[torch.Tensor]:
    """The tensors in three parts of one length, a multiple of two, the last one padded or shorter."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    size = -(-len(flat) // 6) * 2
    padded = torch.cat([flat, flat.new_zeros(3 * size - len(flat))])
    return [part.clone() for part in (padded if pad else flat).split(size)]


RUNS = {
    "alone": TrainerRun(),
    "fsdp for zero2, accumulating": TrainerRun(
        ranks=2, layout=FSDP, accumulate=4, arguments={"deepspeed": ZERO2}
    ),
    "hsdp": TrainerRun(ranks=4, layout=HSDP),
    "alone from fsdp": TrainerRun(resumes="fsdp for zero2, accumulating"),
    "hsdp, accumulating, from fsdp": TrainerRun(
        ranks=4, layout=HSDP, accumulate=2, resumes="fsdp for zero2, accumulating"
    ),
    "fsdp from zero2": TrainerRun(ranks=2, layout=FSDP, resumes="zero2", before=as_zero2, best="alone"),
    "bf16 ddp": TrainerRun(ranks=2, layout="dp_replicate=2", arguments=BF16),
    "bf16 fsdp": TrainerRun(ranks=2, layout=FSDP, arguments={**BF16, "deepspeed": ZERO2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Ranks]:
    return run_all(__file__, folder)


def assert_same(ours: Ranks, native: Ranks) -> None:
    """`ours` may have begun later."""
    assert not isinstance(ours, str), ours
    losses = torch.stack([rank["losses"] for rank in ours]).mean(0)
    expected = torch.stack([rank["losses"] for rank in native]).mean(0)[-len(losses) :]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for rank in ours:
        assert rank["norms"] == pytest.approx(native[0]["norms"], rel=1e-5)
        assert rank["rates"] == native[0]["rates"]


def assert_same_weights(ours: Path, native: Path) -> None:
    found, expected = (load_file(path / "final" / "model.safetensors") for path in (ours, native))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert (found[name] - value).abs().max() <= 1e-5, name


LIKE_ALONE = [name for name in RUNS if name != "alone" and not name.startswith("bf16")]


@pytest.mark.parametrize("name", LIKE_ALONE)
def test_updates_are_those_of_one_native_process(runs: dict[str, Ranks], folder: Path, name: str) -> None:
    [alone] = runs["alone"]
    assert len(alone["losses"]) == len(alone["norms"]) == STEPS
    assert min(alone["norms"]) < MAX_NORM < max(alone["norms"])
    assert_same(runs[name], [alone])
    assert len(runs[name][0]["losses"]) == STEPS - (SAVED if RUNS[name].resumes else 0)
    assert_same_weights(folder / name, folder / "alone")


def test_bf16_is_autocast_over_fp32_weights_as_under_ddp(runs: dict[str, Ranks], folder: Path) -> None:
    assert_same(runs["bf16 fsdp"], runs["bf16 ddp"])
    assert_same_weights(folder / "bf16 fsdp", folder / "bf16 ddp")
    assert (runs["bf16 fsdp"][0]["losses"] != runs["fsdp for zero2, accumulating"][0]["losses"][:SAVED]).all()
    sites = runs["bf16 fsdp"][0]["sites"]
    why = "autocast bf16 over float32 parameters that train and float32 frozen ones"
    assert sites["layouts_trainer/precision"] == (1, 0, why)
    assert "fp32 masters are fp32 weights under autocast now" in sites["layouts_trainer/zero"][2]


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.layout in (FSDP, HSDP)])
def test_weights_and_moments_are_split_and_fp32(runs: dict[str, Ranks], name: str) -> None:
    for rank in runs[name]:
        state = rank["state"]
        assert state["dtypes"] == {"torch.float32"}
        assert state["here"] * 2 == state["all"]
        assert state["optimizer"] == "FusedAdamW"


@pytest.mark.parametrize("name", [name for name in LIKE_ALONE if RUNS[name].layout])
def test_gradients_are_sent_once_a_unit_and_update(runs: dict[str, Ranks], name: str) -> None:
    sent = UNITS * len(runs[name][0]["losses"])
    expected = {"reduce_scatter_tensor": sent}
    if RUNS[name].layout == HSDP:
        expected["all_reduce"] = sent
    for rank in runs[name]:
        assert rank["counts"] == expected


def test_the_report_says_what_was_done(runs: dict[str, Ranks]) -> None:
    sites = runs["fsdp for zero2, accumulating"][0]["sites"]
    assert sites["layouts_trainer/zero"] == (1, 0, f"ZeRO-2 taken out, layout={FSDP} in its place")
    assert sites["layouts_trainer/accelerator"] == (1, 0, "")
    checkpoints = -(-STEPS // SAVED)  # one more behind the last update
    assert sites["layouts_trainer/save"][:2] == (2 * checkpoints + 1, 0)  # model, optimizer; the last model
    assert sites["layouts/shard"][:2] == (1, 0)
    assert f"{UNITS} units" in sites["layouts/shard"][2]
    loaded = runs["fsdp from zero2"][0]["sites"]["layouts_trainer/load"]
    assert loaded == (1, 0, "master weights and moments of DeepSpeed's global_step2")
    assert runs["hsdp, accumulating, from fsdp"][0]["sites"]["layouts_trainer/load"] == (1, 0, "")


def test_the_files_are_those_of_one_process(runs: dict[str, Ranks], folder: Path) -> None:
    ours, native = (
        folder / name / f"checkpoint-{SAVED}" for name in ("fsdp for zero2, accumulating", "alone")
    )
    names = {path.name for path in native.iterdir()} - {"rng_state.pth"}
    assert {path.name for path in ours.iterdir()} - {"rng_state_0.pth", "rng_state_1.pth"} == names
    found, expected = (torch.load(path / "optimizer.pt", weights_only=True) for path in (ours, native))
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]
    assert found["state"].keys() == expected["state"].keys()
    for key, entry in expected["state"].items():
        for name, value in entry.items():
            assert type(found["state"][key][name]) is type(value)
            torch.testing.assert_close(found["state"][key][name], value, rtol=1e-3, atol=1e-6)


def test_the_best_checkpoint_is_loaded_and_a_second_training_refused(
    runs: dict[str, Ranks], folder: Path
) -> None:
    best = load_file(folder / "fsdp from zero2" / "best" / "model.safetensors")
    expected = load_file(folder / "alone" / f"checkpoint-{SAVED}" / "model.safetensors")
    assert best.keys() == expected.keys()
    assert all(torch.equal(best[name], value) for name, value in expected.items())
    for rank in runs["fsdp from zero2"]:
        assert "a model that is sharded already; build a new Trainer" in rank["refused"]


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_ranks_that_share_samples_are_refused(tmp_path: Path, axis: str) -> None:
    axes = {name: SimpleNamespace(size=lambda n=1 + (name == axis): n) for name in ("tp", "pp")}
    trainer = SimpleNamespace(accelerator=SimpleNamespace(_somaspeed_mesh=axes))
    with pytest.raises(ValueError, match=f"{axis}=2 under transformers.Trainer.*with {axis}=1"):
        hf_trainer.accelerator(lambda: None, trainer, (), {})


class OnlyPart:
    """A ZeRO-2 checkpoint with something missing."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.tag = tmp_path / "global_step2"
        shutil.copytree(folder / "zero2" / f"checkpoint-{SAVED}" / "global_step2", self.tag)

    def refused(self, why: str) -> None:
        with pytest.raises(ValueError, match=f"{why}.*zero_to_fp32.py.*moments and the step count are lost"):
            zero_checkpoint.Reader(self.tag)


def test_an_incomplete_zero_checkpoint_is_refused(
    runs: dict[str, Ranks], folder: Path, tmp_path: Path
) -> None:
    part = OnlyPart(folder, tmp_path)
    last = part.tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    saved = torch.load(last)
    last.unlink()
    part.refused("has 2 of 3 ranks' parts")
    torch.save(saved, part.tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    part.refused("not a whole checkpoint")


def test_another_optimizers_zero_checkpoint_is_refused(
    runs: dict[str, Ranks], folder: Path, tmp_path: Path
) -> None:
    part = OnlyPart(folder, tmp_path)
    for file in part.tag.glob("zero_pp_rank_*"):
        saved = torch.load(file)
        del saved["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg_sq"]
        torch.save(saved, file)
    part.refused("has no exp_avg and exp_avg_sq")


@pytest.fixture
def with_layout() -> Iterator[None]:
    with somaspeed_patch.patched(*TARGETS, layout=FSDP):
        yield


def arguments(tmp_path: Path, config: Any, **given: Any) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", deepspeed=config, **given)


def with_zero(**settings: Any) -> dict[str, Any]:
    return {**ZERO2, "zero_optimization": {**ZERO2["zero_optimization"], **settings}}


REFUSED = {
    "ZeRO stage 3; layout replaces 1 and 2: set stage to 2, or drop layout": with_zero(stage=3),
    "moves state to the host .offload_optimizer.": with_zero(offload_optimizer={"device": "cpu"}),
    "quantizes what it sends": with_zero(zero_quantized_gradients=True),
    "has scheduler, which nothing here does": {**ZERO2, "scheduler": {"type": "WarmupLR"}},
    "has the optimizer Lamb": {**ZERO2, "optimizer": {"type": "Lamb"}},
    "gradient_clipping=0.5, the TrainingArguments 1.0; make it auto": {**ZERO2, "gradient_clipping": 0.5},
    "bf16.enabled=True, the TrainingArguments False": {**ZERO2, "bf16": {"enabled": True}},
    "neither JSON nor a file": "no/such/file.json",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_fsdp2_would_not_do_is_refused(with_layout: None, tmp_path: Path, why: str) -> None:
    with pytest.raises(ValueError, match=f"^layout: .*{why}"):
        arguments(tmp_path, REFUSED[why])


def test_a_config_is_read_from_a_file_and_as_json(with_layout: None, tmp_path: Path) -> None:
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(with_zero(offload_optimizer={"device": "none"})))
    for given in (str(file), file.read_text()):
        made = arguments(tmp_path, given)
        assert made.deepspeed is None
        assert made.deepspeed_plugin is None
        assert made.max_grad_norm == 1.0
    assert site("layouts_trainer/zero").calls == 2


def test_without_clipping_in_the_config_nothing_is_clipped(
    with_layout: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {name: value for name, value in ZERO2.items() if name != "gradient_clipping"}
    with caplog.at_level(logging.INFO, "somaspeed_patch.layouts"):
        assert arguments(tmp_path, config).max_grad_norm == 0
    assert [record.getMessage() for record in caplog.records] == [
        "layout: the DeepSpeed config has no gradient_clipping, so nothing is clipped",
        f"layout: ZeRO-2 taken out, layout={FSDP} in its place",
    ]


def test_an_optimizer_of_the_config_decays_every_parameter(with_layout: None, tmp_path: Path) -> None:
    """DeepSpeed puts all of them in one group."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for config, decayed in (
        (ZERO2, ["0.weight"]),
        ({**ZERO2, "optimizer": OWN_ADAMW}, [*model.state_dict()]),
    ):
        trainer = Trainer.__new__(Trainer)
        trainer.args = arguments(tmp_path, config)
        assert trainer.get_decay_parameter_names(model) == decayed
    with pytest.raises(ValueError, match="AdamW of its own, the TrainingArguments optim=adafactor"):
        arguments(tmp_path, {**ZERO2, "optimizer": OWN_ADAMW}, optim="adafactor")


def test_nvidias_config_is_none_where_all_is_auto(with_layout: None) -> None:
    run = SimpleNamespace(training=SimpleNamespace(bf16=True))
    assert zero_config.nvidia_config(lambda: ZERO2, run, (), {}) is None
    own = {**ZERO2, "gradient_clipping": 0.5}
    assert zero_config.nvidia_config(lambda: own, run, (), {}) is own
    with pytest.raises(ValueError, match="ZeRO stage 3"):
        zero_config.nvidia_config(lambda: with_zero(stage=3), run, (), {})


def test_layouts_trainer_alone_is_refused(tmp_path: Path) -> None:
    with somaspeed_patch.patched("layouts_trainer", layout=FSDP):
        made = arguments(tmp_path, None)
        with pytest.raises(ValueError, match="on without layouts, which splits the model"):
            Trainer(torch.nn.Linear(1, 1), made)


def layout_calls() -> dict[str, tuple[int, int]]:
    sites = somaspeed_patch.report().sites
    return {s.site: (s.calls, s.native_calls) for s in sites if s.site.startswith("layouts")}


def test_without_layout_and_unpatched_it_is_the_hosts(tmp_path: Path) -> None:
    before = [dict(vars(owner)) for owner in (Trainer, TrainingArguments)]
    with somaspeed_patch.patched(*TARGETS):
        counts = layout_calls()
        trainer = Trainer(torch.nn.Linear(ROWS, 1), arguments(tmp_path, None))
        trainer.save_model(str(tmp_path / "model"))
        assert zero_config.nvidia_config(lambda: ZERO2, None, (), {}) is ZERO2
        assert layout_calls() == counts
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"weight", "bias"}
    for owner, names in zip((Trainer, TrainingArguments), before, strict=True):
        after = dict(vars(owner))
        assert after.keys() - {"__slotnames__"} == names.keys() - {"__slotnames__"}  # pickle's own note
        assert all(after[name] is value for name, value in names.items() if name != "__slotnames__")


if __name__ == "__main__":
    serve(RUNS)
