"""The names of GR00T that the adapter relies on, in LeRobot's port; real_gr00t/check.py checks NVIDIA's.

A red line here after an upgrade means: look at what the host does now; do not simply update the list.
"""

from dataclasses import replace

import pytest
import torch

from somaspeed_patch.testing_groot_behaviour import BEHAVIOURS, misbehaving
from somaspeed_patch.testing_groot_contract import (
    LEROBOT,
    NVIDIA,
    PARTS,
    QWEN3_VL,
    TRAINER,
    broken,
    missing,
)
from somaspeed_patch.testing_nvidia_groot import BACKBONE, backbone_config, model_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """LeRobot's GR00TN17 with random weights."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    folder = tmp_path_factory.mktemp("groot") / BACKBONE
    backbone_config().save_pretrained(folder)
    torch.manual_seed(0)
    config = GR00TN17Config(**model_settings(str(folder)))
    return GR00TN17(config, transformers_loading_kwargs={}, load_backbone_weights=False).train()


@pytest.mark.parametrize("symbol", [*LEROBOT, *QWEN3_VL, *TRAINER], ids=str)
def test_a_function_is_where_it_was_and_takes_what_it_took(symbol):
    assert not broken([symbol])


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.path)
def test_a_module_inside_the_model_has_what_is_read_of_it(model, part):
    assert not missing(model, [part])


def test_the_functions_do_what_they_did(model):
    assert not misbehaving(model)


def test_the_adapters_own_patches_are_all_in_the_contract():
    from somaspeed_patch.adapters import groot

    listed = {str(symbol) for symbol in (*LEROBOT, *NVIDIA, *QWEN3_VL, *TRAINER)}
    assert {patch.target for patch in groot.PATCHES} <= listed


def test_a_moved_function_is_named_with_its_source_file():
    [symbol] = [one for one in LEROBOT if one.name == "Qwen3Backbone.forward"]
    [line] = broken([replace(symbol, name="Qwen3Backbone.run")])
    assert line.startswith("lerobot.policies.groot.groot_n1_7:Qwen3Backbone.run: not in ")
    assert "groot_n1_7.py" in line
    [line] = broken([replace(symbol, module="lerobot.policies.groot_n2")])
    assert line.startswith(
        "lerobot.policies.groot_n2:Qwen3Backbone.forward: lerobot.policies.groot_n2 cannot"
    )


@pytest.mark.parametrize("exact", [True, False])
def test_changed_parameters_are_named_with_the_source_file(exact):
    [symbol] = [one for one in TRAINER if one.name == "Trainer.training_step"]
    changed = replace(symbol, exact=exact, takes=(*symbol.takes[:2], "scale"))
    [line] = broken([changed])
    assert line.startswith("transformers.trainer:Trainer.training_step: expected ")
    assert "model, inputs, scale" in line
    assert "found (model, inputs, num_items_in_batch) in " in line and "trainer.py" in line


def test_a_function_called_by_keyword_must_not_need_more(model):
    [symbol] = [one for one in LEROBOT if one.name == "Qwen3Backbone.forward"]
    [line] = broken([replace(symbol, exact=False, takes=())])
    assert "found (vl_input)" in line


def test_a_moved_module_is_named_with_the_source_file(model):
    [part] = [one for one in PARTS if one.path.endswith("blocks.0.attn")]
    [line] = missing(model, [replace(part, path=part.path + ".core")])
    assert line.startswith(part.path + ".core: not in GR00TN17 (") and "groot_n1_7.py" in line
    [line] = missing(model, [replace(part, has=("qkv", "gate.weight"))])
    assert line.startswith(f"{part.path}: Qwen3VLVisionAttention has no gate.weight in ")
    [line] = missing(model, [replace(part, kind="Attention")])
    assert "expected a Attention, found a Qwen3VLVisionAttention of " in line


def test_a_changed_behaviour_is_named_with_the_source_file(model, monkeypatch):
    """Each by a change of the model that its check has to see."""
    layer = model.action_head.state_encoder.layer1
    monkeypatch.setattr(layer, "forward", lambda x, ids: x @ layer.W[0] + layer.b[ids].unsqueeze(1))
    monkeypatch.setattr(model.action_head.model, "attend_text_every_n_blocks", 1)
    features = torch.zeros(2, 14, 64)
    monkeypatch.setattr(model.backbone, "_last_decoder_layer_output", lambda inputs: features)
    monkeypatch.setattr(model.backbone, "set_frozen_modules_to_eval_mode", lambda: None)
    lines = misbehaving(model)
    assert [line.split(":")[0] for line in lines] == [owner for owner, _ in BEHAVIOURS]
    assert all(line.endswith(".py") for line in lines)
