"""A layout's text and arithmetic, its flag for LeRobot's commands, its key in a recipe; families' units."""

from pathlib import Path

import pytest
import torch

import somaspeed_patch
from somaspeed_patch import features, host_flags
from somaspeed_patch.ab import recipe
from somaspeed_patch.layouts import families, units
from somaspeed_patch.layouts.layout import Layout, parse


@pytest.fixture(scope="module")
def policies():
    from somaspeed_patch import testing_groot, testing_molmoact2, testing_pi05

    return {
        "pi05": testing_pi05.make_policy(train_expert_only=True),
        "molmoact2": testing_molmoact2.make_policy(train_action_expert_only=True, action_mode="continuous"),
        "groot": testing_groot.make_policy(),
    }


def test_a_layout_reads_and_prints_every_key():
    text = "dp_replicate=2,dp_shard=4,tp=2,pp=3,reshard=never,frozen=sharded,checkpointing=full"
    assert parse(text) == Layout(
        dp_replicate=2, dp_shard=4, tp=2, pp=3, reshard="never", frozen="sharded", checkpointing="full"
    )
    assert str(parse(text)) == text
    assert parse(text).ranks == 48
    assert parse("") == Layout() == parse(" dp_shard = 1 ")


@pytest.mark.parametrize(
    ("text", "error"),
    {
        "dp_shards=2": "'dp_shards' in 'dp_shards=2' is no key; did you mean dp_shard? valid: dp_replicate",
        "dp_shard=0": "dp_shard must be a number of ranks from 1, or -1 for all that are left, but is '0'",
        "tp=-1": "tp must be a number of ranks from 1, but is '-1'",
        "dp_shard": "dp_shard must be a number of ranks from 1, or -1 for all that are left, but is ''",
        "reshard=sometimes": "reshard must be one of default, always, never, but is 'sometimes'",
        "pp=2,pp=2": "pp is given twice in 'pp=2,pp=2'",
    }.items(),
)
def test_a_wrong_layout_is_refused(text, error):
    with pytest.raises(ValueError, match="layout: ") as found:
        parse(text)
    assert error in str(found.value)


def test_the_arithmetic_of_a_wrong_number_of_ranks():
    with pytest.raises(ValueError, match="pp=1 x dp_replicate=2 x dp_shard=4 x tp=1 = 8 ranks, but 4 were"):
        parse("dp_replicate=2,dp_shard=4").on(4)
    assert parse("dp_replicate=2,dp_shard=-1").on(8) == parse("dp_replicate=2,dp_shard=4")
    with pytest.raises(ValueError, match=r"dp_replicate=3 x dp_shard=2 .* = 6 ranks, but 8 were started"):
        parse("dp_replicate=3,dp_shard=-1").on(8)


def test_replicas_alone_are_left_to_the_host():
    assert not parse("dp_replicate=4").shards
    assert all(parse(text).shards for text in ("dp_shard=2", "dp_replicate=2,dp_shard=2", "tp=2", "pp=2", ""))


@pytest.mark.parametrize("family", ["pi05", "molmoact2", "groot"])
def test_a_policy_is_known_by_its_modules_and_every_pattern_is_there(policies, family):
    model = policies[family]
    found = families.of(model)
    assert found.name == family
    for pattern in (*found.units, *found.never_run, *found.called_alone):
        assert list(families.modules(model, (pattern,))), pattern
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    within = {
        f"{unit}.{name}"
        for unit, module in families.modules(model, (*found.units, *found.never_run))
        for name, _ in module.named_parameters()
    }
    assert len(trained & within) > len(trained) / 2  # the root holds the rest


def test_another_model_is_of_no_family():
    assert families.of(torch.nn.Sequential(torch.nn.Linear(2, 2))) is None


def test_our_flags_are_taken_out_of_the_hosts_and_set():
    from lerobot.configs import parser

    words = ["--steps=3", "--somaspeed.layout", "dp_shard=2", "--somaspeed.compile", "--seed=7",
             "--somaspeed.frozen-prefix=false"]  # fmt: skip
    with somaspeed_patch.patched("lerobot_train", "layouts", "pi05"):
        assert parser.filter_path_args(["policy"], words) == ["--steps=3", "--seed=7"]
        assert features.value("layout") == "dp_shard=2"
        assert features.value("compile") is True
        assert features.value("frozen_prefix") is False
    assert parser.filter_path_args(["policy"], words) == words


@pytest.mark.parametrize(
    ("flag", "error"),
    {
        "--somaspeed.layouts=dp_shard=2": "no feature is called 'layouts'; did you mean layout?",
        "--somaspeed.compile=maybe": "--somaspeed.compile takes true or false, but was given 'maybe'",
    }.items(),
)
def test_a_wrong_flag_is_refused(flag, error):
    with pytest.raises(ValueError, match=error.split("'")[0]) as found:
        host_flags.taken_out([flag])
    assert error in str(found.value)


def written(folder: Path, arm: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(
        "description: d\nhost: lerobot-train\nsteps: 4\ndiscard: 1\nrepeats: 1\n"
        "arguments: ['--steps={steps}']\n"
        f"arms:\n  native: {{ targets: none }}\n  sharded: {{ targets: default, {arm} }}\n"
    )
    return file


def test_a_recipes_arm_has_a_layout(tmp_path):
    arm = recipe.load(written(tmp_path, "layout: 'dp_replicate=2,dp_shard=2'")).arms[1]
    assert arm.features == {"layout": "dp_replicate=2,dp_shard=2"}
    error = "recipe.yaml:9: arms.sharded.layout: 'dp' in 'dp=2' is no key"
    with pytest.raises(recipe.RecipeError, match=error):
        recipe.load(written(tmp_path, "layout: dp=2"))


@pytest.fixture
def one_rank(tmp_path):
    """torch's process group, of this process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_compiled_block_that_is_a_shard_runs_once_within_its_hooks(one_rank, monkeypatch, recomputed):
    from torch.distributed.fsdp import fully_shard

    from somaspeed_patch import compiled
    from somaspeed_patch.groot import dit

    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    x = torch.randn(2, 3)
    plain, sharded = Layer(), Layer()
    sharded.load_state_dict(plain.state_dict())
    dit.backbone_block(plain, x).sum().backward()
    if recomputed:
        units.recompute(sharded)
    fully_shard(sharded, mesh=one_rank, reshard_after_forward=True)
    with somaspeed_patch.patched("groot", compile=True):
        out = dit._through(dit.backbone_block, sharded, x)
        assert isinstance(sharded.inner.weight, torch.distributed.tensor.DTensor)  # freed again
        out.sum().backward()
    assert torch.allclose(out, plain.body(x))
    assert torch.allclose(sharded.inner.weight.grad.full_tensor(), plain.inner.weight.grad)


class Layer(torch.nn.Module):
    """Counts how often it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(3, 3), 0

    def forward(self, x):
        return self.body(x)

    def body(self, x):
        self.calls += 1
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("way", ["called", "in its place"])
def test_a_recomputed_unit_has_the_same_gradients_and_computes_twice(way):
    layer, x = Layer(), torch.randn(2, 3, requires_grad=True)
    layer(x).sum().backward()
    expected, kept = x.grad.clone(), layer.inner.weight.grad.clone()
    x.grad = layer.inner.weight.grad = None
    units.recompute(layer)
    layer.calls = 0
    out = layer(x) if way == "called" else units.call(layer, Layer.body, x)
    out.sum().backward()
    assert layer.calls == 2
    assert torch.equal(x.grad, expected)
    assert torch.equal(layer.inner.weight.grad, kept)
    with torch.no_grad():
        layer(x)
    assert layer.calls == 3
