"""Which optimizers LeRobot's configs build under the patch, and FusedAdamW's own config on the command line.

Checked: equal param_groups for AdamWConfig and XVLAAdamWConfig; what is left to the host, and the report's
reason; `--optimizer.type=somaspeed_adamw`, its options, checkpoint and errors; LeRobot's registry after
unpatch().
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch as replaced

import draccus
import pytest
import torch
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim import optimizers as host
from torch import Tensor, nn

import somaspeed_patch
from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_lerobot import TARGETS, TRAIN, TRAINED, Run, lerobot_train, tiny
from somaspeed_patch.testing_optim import forget_counts

interpreted = pytest.mark.skipif(not adamw.INTERPRETED, reason="the kernels reach a CPU in the interpreter")
TYPE = ["--optimizer.type=somaspeed_adamw", "--use_policy_training_preset=false"]
SCHEDULER = [
    "--scheduler.type=cosine_decay_with_warmup", "--scheduler.num_warmup_steps=1",
    "--scheduler.num_decay_steps=2", "--scheduler.peak_lr=1e-3", "--scheduler.decay_lr=1e-4",
]  # fmt: skip


class Net(nn.Module):
    """Names that XVLAAdamWConfig sorts into its three groups, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vlm, self.head = nn.Linear(6, 5), nn.Linear(5, 1, bias=False)
        self.soft_prompt = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.rand(5) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.vlm(x) + self.soft_prompt) * self.frozen)


@pytest.fixture
def patched() -> Iterator[None]:
    forget_counts()
    with somaspeed_patch.patched("lerobot_optimizer", "accelerate_clip"):
        yield


def site(name: str = "lerobot_optimizer/build") -> Any:
    return next(site for site in somaspeed_patch.report().sites if site.site == name)


def trained(net: Net) -> list[Tensor]:
    return [param for param in net.parameters() if param.requires_grad]


def grouped(net: Net) -> list[dict[str, Any]]:
    heads = {"params": [net.head.weight], "lr": 0.5, "weight_decay": 0.0}
    return [{"params": [*net.vlm.parameters()]}, heads]


ADAMW = host.AdamWConfig(lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
XVLA = host.XVLAAdamWConfig(lr=2e-4, weight_decay=0.1, soft_prompt_warmup_lr_scale=0.01)
Params = Callable[[Net], Any]
CONFIGS: dict[str, tuple[Any, Params]] = {
    "parameters": (ADAMW, lambda net: net.parameters()),
    "groups": (ADAMW, grouped),
    "names": (ADAMW, lambda net: [("a", net.vlm.weight), ("b", net.vlm.bias)]),
    "xvla": (XVLA, lambda net: dict(net.named_parameters())),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_groups_are_those_of_the_host(patched: None, name: str) -> None:
    config, params = CONFIGS[name]
    net = Net()
    ours = config.build(params(net))
    somaspeed_patch.unpatch()
    native = config.build(params(net))
    assert (type(ours), type(native)) == (FusedAdamW, torch.optim.AdamW)
    assert (site().calls, site().native_calls) == (1, 0)
    assert [list(group) for group in ours.param_groups] == [list(group) for group in native.param_groups]
    for mine, theirs in zip(ours.param_groups, native.param_groups, strict=True):
        assert list(map(id, mine.pop("params"))) == list(map(id, theirs.pop("params")))
        assert mine == theirs
    assert ours.defaults == native.defaults


class Molmo(torch.optim.AdamW):
    """As LeRobot main's MolmoAct2AdamW: a subclass with a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            param.sub_(param.grad.sign(), alpha=self.param_groups[0]["lr"])


@dataclass
class MolmoConfig(host.AdamWConfig):
    def build(self, params: Any) -> Molmo:
        return Molmo(params, lr=self.lr)


def update(optimizer: torch.optim.Optimizer, net: Net) -> float:
    """One update as lerobot-train makes it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(net, optimizer)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    accelerator.backward(prepared(x).square().mean())
    norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
    optimizer.step()
    return float(norm)


def test_a_subclass_of_adamw_keeps_its_step_and_the_report_says_why(patched: None) -> None:
    ours, native = Net(), Net()
    optimizer = MolmoConfig(lr=0.1).build(trained(ours))
    assert type(optimizer) is Molmo
    norm = update(optimizer, ours)
    assert site("accelerate_clip/clip").reason == "the optimizer is Molmo, not FusedAdamW"
    assert site("accelerate_clip/clip").native_calls == 1
    somaspeed_patch.unpatch()
    assert update(MolmoConfig(lr=0.1).build(trained(native)), native) == norm
    assert all(map(torch.equal, ours.parameters(), native.parameters()))


def test_what_adamw_config_was_made_to_build_is_left_alone() -> None:
    forget_counts()
    theirs = replaced.object(host.AdamWConfig, "build", MolmoConfig.build)
    with theirs, somaspeed_patch.patched("lerobot_optimizer", "accelerate_clip"):
        assert type(ADAMW.build(Net().parameters())) is Molmo
        assert (site().calls, site().native_calls) == (0, 1)
        assert site().reason == "Molmo is not plain torch.optim.AdamW"


def test_several_optimizers_and_other_kinds_are_left_alone(patched: None) -> None:
    groups = {"vlm": {"lr": 0.1}, "head": {}}
    several = host.MultiAdamConfig(optimizer_groups=groups).build(
        {name: getattr(Net(), name).parameters() for name in groups}
    )
    assert {name: type(one) for name, one in several.items()} == dict.fromkeys(groups, torch.optim.Adam)
    assert type(host.AdamConfig().build(Net().parameters())) is torch.optim.Adam
    assert type(host.SGDConfig().build(Net().parameters())) is torch.optim.SGD


def test_switched_off_it_is_the_hosts(patched: None) -> None:
    somaspeed_patch.patch(optimizer=False)
    assert type(ADAMW.build(Net().parameters())) is torch.optim.AdamW
    assert site().reason == "optimizer=False"
    somaspeed_patch.patch(optimizer=True)
    assert type(ADAMW.build(Net().parameters())) is FusedAdamW


def test_what_accelerates_deepspeed_launcher_owns_is_left_alone(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert type(ADAMW.build(Net().parameters())) is torch.optim.AdamW
    assert site().reason == "DeepSpeed owns the optimizer"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    assert type(ADAMW.build(Net().parameters())) is FusedAdamW


def parse(*arguments: str) -> Any:
    """LeRobot's training config, as its command line is parsed."""
    import lerobot.policies  # noqa: F401 (registers --policy.type)

    return draccus.parse(TrainPipelineConfig, args=[*TRAIN, *TYPE, *arguments])


def test_every_option_is_taken_from_the_command_line(patched: None) -> None:
    config = parse(
        "--optimizer.lr=1e-4", "--optimizer.betas=[0.8,0.95]", "--optimizer.stochastic_rounding=true",
        "--optimizer.rounding_seed=3", "--optimizer.moments_dtype=bfloat16", "--optimizer.nonfinite=raise",
        "--optimizer.fused=true",
    ).optimizer  # fmt: skip
    optimizer = config.build(Net().parameters())
    options, group = optimizer.options, optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["fused"]) == (1e-4, (0.8, 0.95), True)
    assert (options.stochastic_rounding, options.rounding_seed) == (True, 3)
    assert (options.moments_dtype, options.nonfinite) == (torch.bfloat16, "raise")
    assert not options.master_weights and parse("--optimizer.master_weights=true").optimizer.master_weights


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--optimizer.nonfinite=ignore"], "nonfinite must be one of ('propagate', 'skip', 'raise')"),
        (["--optimizer.moments_dtype=int8"], "moments_dtype must be None or one of"),
        (["--optimizer.moments_dtype=fp32"], "must be float32, bfloat16 or float16, but is 'fp32'"),
        (["--optimizer.master_weights=perhaps"], "`master_weights`: Couldn't parse 'perhaps' into a bool"),
        (
            ["--optimizer.master_weights=true", "--optimizer.stochastic_rounding=true"],
            "master_weights and stochastic_rounding solve the same problem; choose one",
        ),
    ],
)
def test_a_wrong_value_is_named(patched: None, arguments: list[str], text: str) -> None:
    with pytest.raises(Exception) as caught:
        parse(*arguments).optimizer.build(Net().parameters())
    assert text in str(caught.value)


def test_the_registry_is_the_hosts_own_again_with_what_others_registered(patched: None) -> None:
    registry = vars(host.OptimizerConfig)["_choice_registry"]
    try:
        host.OptimizerConfig.register_subclass("molmo")(MolmoConfig)
        known = set(host.OptimizerConfig.get_known_choices())
        assert {"adamw", "xvla-adamw", "molmo", "somaspeed_adamw"} <= known
        assert MolmoConfig().type == "molmo" and parse().optimizer.type == "somaspeed_adamw"
        somaspeed_patch.unpatch()
        after = vars(host.OptimizerConfig)["_choice_registry"]
        assert type(after) is dict and after is registry.maps[0]
        assert set(after) == known - {"somaspeed_adamw"} and after["molmo"] is MolmoConfig
    finally:
        vars(host.OptimizerConfig)["_choice_registry"].pop("molmo")


BF16 = ["--policy.dtype=bfloat16", "--steps=2"]
OPTIONS = {
    "plain": (["--steps=2", "--optimizer.lr=1e-3"], set()),
    "master": ([*BF16, "--optimizer.master_weights=true", "--optimizer.nonfinite=skip"], {"master"}),
    "stochastic": ([*BF16, "--optimizer.stochastic_rounding=true"], set()),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("runs")
    with tiny():
        yield {
            name: lerobot_train([*TRAIN, *TYPE, *SCHEDULER, *arguments], folder / name, *TARGETS)
            for name, (arguments, _) in OPTIONS.items()
        }


@interpreted
@pytest.mark.parametrize("name", OPTIONS)
def test_lerobot_train_trains_with_it(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert run.counts("accelerate_clip/clip") == run.counts("accelerate_clip/optimizer") == (2, 0, 0)
    assert [update["lr"] for update in run.updates] == pytest.approx([5e-4, 5.5e-4])
    assert json.loads(run.config(2).read_text())["optimizer"]["type"] == "somaspeed_adamw"
    moved = [value for key, value in run.state(2).items() if key.endswith("exp_avg")]
    assert len(moved) == TRAINED and all(value.isfinite().all() and value.any() for value in moved)


@interpreted
@pytest.mark.parametrize("name", OPTIONS)
def test_its_checkpoint_has_what_the_options_keep_and_nothing_else(runs: dict[str, Run], name: str) -> None:
    state, extra = runs[name].state(2), OPTIONS[name][1]
    assert {key.rsplit("/")[-1] for key in state} == {"step", "exp_avg", "exp_avg_sq"} | extra
    low = [key for key, value in state.items() if value.dtype == torch.bfloat16]
    masters = [value for key, value in state.items() if key.endswith("master")]
    assert len(masters) == (len(low) // 2 if extra else 0)
    assert all(value.dtype == torch.float32 for value in masters)


@interpreted
def test_masters_survive_resuming_and_accelerates_placement(patched: None, runs: dict[str, Run]) -> None:
    from accelerate import Accelerator
    from lerobot.common.train_utils import load_training_state
    from lerobot.policies.pi05 import PI05Policy

    run = runs["master"]
    policy = PI05Policy.from_pretrained(run.checkpoint(2) / "pretrained_model")
    optimizer = parse("--optimizer.master_weights=true").optimizer.build(policy.parameters())
    scheduler = policy.config.get_scheduler_preset().build(optimizer, 2)
    assert load_training_state(run.checkpoint(2), optimizer, scheduler)[0] == 2
    state = Accelerator(cpu=True).prepare_optimizer(optimizer).state_dict()["state"]
    loaded = {f"state/{i}/{name}": value for i, entry in state.items() for name, value in entry.items()}
    saved = run.state(2)
    assert loaded.keys() == saved.keys()
    assert all(value.dtype == saved[name].dtype for name, value in loaded.items())
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
