"""The names of accelerate, LeRobot and transformers that FusedAdamW's adapters rely on, and their order.

Checked: signatures and values in the installed hosts; which kinds of parallelism are served; orders of
import, patch(), building the optimizer and unpatch(), each in a fresh process; hosts that lack a name or are
of another version; what unpatch() leaves. A red canary after an upgrade: look at what the host does now.
"""

import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DummyOptim
from lerobot.optim import factory
from lerobot.optim import optimizers as lerobot
from lerobot.scripts import lerobot_train
from transformers import Trainer, TrainingArguments, trainer
from transformers.integrations import deepspeed
from transformers.training_args import OptimizerNames

import somaspeed_patch
from somaspeed_patch import adapter, patching
from somaspeed_patch.kernels import adamw
from somaspeed_patch.optim import FusedAdamW, hooks
from somaspeed_patch.sites import site
from somaspeed_patch.testing_optim import forget_counts, small_tiles

TARGETS = ("accelerate_clip", "hf_trainer", "lerobot_optimizer")
interpreted = pytest.mark.skipif(not adamw.INTERPRETED, reason="the kernels reach a CPU in the interpreter")
TOUCHED = (
    Accelerator, Trainer, trainer, lerobot.AdamWConfig, lerobot.XVLAAdamWConfig, lerobot.OptimizerConfig,
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    forget_counts()
    before = [dict(vars(one)) for one in TOUCHED]
    yield
    somaspeed_patch.unpatch()
    after = [dict(vars(one)) for one in TOUCHED]
    assert [one.keys() for one in after] == [one.keys() for one in before]
    assert all(new[name] is old[name] for new, old in zip(after, before, strict=True) for name in old)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def in_order(function: Any, *texts: str) -> bool:
    source = inspect.getsource(function)
    places = [source.index(text) for text in texts]
    return places == sorted(places)


def test_accelerate_clips_as_the_hook_takes_over() -> None:
    assert parameters(Accelerator.clip_grad_norm_) == ["self", "parameters", "max_norm", "norm_type"]
    assert inspect.signature(Accelerator.clip_grad_norm_).parameters["norm_type"].default == 2
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    assert accelerator._optimizers == [optimizer]
    assert type(optimizer) is AcceleratedOptimizer and type(optimizer.optimizer) is torch.optim.AdamW
    assert accelerator.sync_gradients is True and accelerator.is_fsdp2 is False
    assert accelerator.distributed_type == DistributedType.NO
    assert accelerator.unscale_gradients() is None
    assert "self.optimizer.step(closure)" in inspect.getsource(AcceleratedOptimizer.step)


SERVED = {("NO", False), ("MULTI_GPU", False), ("MULTI_CPU", False), ("FSDP", True)}


@pytest.mark.parametrize("kind", [*DistributedType])
@pytest.mark.parametrize("fsdp2", [False, True])
def test_only_layouts_that_have_averaged_before_clipping_are_served(
    kind: DistributedType, fsdp2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "INTERPRETED", True)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([param])
    monkeypatch.setattr(optimizer, "clip_grad_norm_", lambda max_norm: "ours")
    accelerator = SimpleNamespace(
        distributed_type=kind, is_fsdp2=fsdp2, sync_gradients=True, unscale_gradients=lambda: None,
        _optimizers=[SimpleNamespace(optimizer=optimizer)],
        _models=[],
    )  # fmt: skip
    answer = hooks.clip_grad_norm_(lambda *_: "the host's", accelerator, ([param], 1.0), {})
    served = (kind.value, fsdp2 and kind.value == "FSDP") in SERVED
    assert answer == ("ours" if served else "the host's")
    assert site("accelerate_clip/clip").reason == ("" if served else f"clipping belongs to {kind.value}")


def test_there_are_the_kinds_of_parallelism_that_the_hook_knows() -> None:
    assert {kind for kind, _ in SERVED} <= {kind.value for kind in DistributedType}
    assert {"DEEPSPEED", "MEGATRON_LM", "XLA"} <= {kind.value for kind in DistributedType}


def test_lerobot_builds_where_the_hook_sits_and_before_the_scheduler() -> None:
    registry = vars(lerobot.OptimizerConfig)["_choice_registry"]
    assert type(registry) is dict
    assert registry["adamw"] is lerobot.AdamWConfig and registry["xvla-adamw"] is lerobot.XVLAAdamWConfig
    for config in (lerobot.AdamWConfig, lerobot.XVLAAdamWConfig):
        assert parameters(vars(config)["build"]) == ["self", "params"]
    assert in_order(factory.make_optimizer_and_scheduler, "cfg.optimizer.build(params)", ".build(optimizer,")
    assert in_order(
        lerobot_train.update_policy,
        "accelerator.backward(loss)", "accelerator.clip_grad_norm_(", "optimizer.step()",
        "optimizer.zero_grad()", "lr_scheduler.step()",
    )  # fmt: skip


def test_the_trainer_chooses_and_clips_where_the_hooks_sit(tmp_path: Any) -> None:
    hook = vars(Trainer)["get_optimizer_cls_and_kwargs"]
    assert type(hook) is staticmethod and parameters(hook) == ["args", "model"]
    assert "self.accelerator.clip_grad_norm_(" in inspect.getsource(Trainer._clip_grad_norm)
    assert "self.get_optimizer_cls_and_kwargs(self.args" in inspect.getsource(Trainer.create_optimizer)
    for name in ("adamw_torch", "adamw_torch_fused"):
        assert name in {one.value for one in OptimizerNames}
        arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True)
        assert Trainer.get_optimizer_cls_and_kwargs(arguments)[0] is torch.optim.AdamW


def test_the_trainer_leaves_a_dummy_where_deepspeeds_config_names_the_optimizer() -> None:
    assert trainer.deepspeed_init is deepspeed.deepspeed_init
    assert "optimizer, lr_scheduler = deepspeed_optim_sched(" in inspect.getsource(trainer.deepspeed_init)
    assert "optimizer = DummyOptim(" in inspect.getsource(deepspeed.deepspeed_optim_sched)
    source = inspect.getsource(Trainer._prepare_for_training)
    assert "self.optimizer, self.lr_scheduler = deepspeed_init(self, " in source


@pytest.mark.parametrize("theirs", [False, True])
def test_an_optimizer_of_deepspeeds_config_is_reported(theirs: bool) -> None:
    """One that the Trainer builds is reported where it asks for the class."""
    made = (DummyOptim([]) if theirs else torch.optim.SGD([torch.ones(1)]), "scheduler")
    assert hooks.deepspeed_init(lambda *_, **__: made, None, ("trainer",), {"num_training_steps": 1}) == made
    found = site("hf_trainer/optimizer_class")
    assert (found.native_calls, found.reason) == ((1, "DeepSpeed owns the optimizer") if theirs else (0, ""))


# I import the hosts, P patch, O build the optimizer, U unpatch, T train.
ORDERS = ("IOT", "PIOT", "IPOT", "IOPT", "IPOUT", "IPUPOT", "IPUOT", "PUIOT")
RUNNER = """
import json, os, sys
import torch
import somaspeed_patch
from somaspeed_patch import testing_optim

def train(net, optimizer):
    from accelerate import Accelerator
    accelerator, found = Accelerator(cpu=True), []
    net, optimizer = accelerator.prepare(net, optimizer)
    for step in range(4):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        loss = (net(x) - step).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    return found + net.weight.flatten().tolist()

def child(order):
    torch.manual_seed(0)
    net, optimizer, found = torch.nn.Linear(5, 1), None, None
    for step in order:
        if step == "I":
            assert order[0] == "I" or "accelerate.accelerator" not in sys.modules
            import accelerate, lerobot.optim.optimizers as host
        elif step == "P":
            somaspeed_patch.patch(*TARGETS)
        elif step == "O":
            optimizer = host.AdamWConfig(lr=0.1, eps=0.01).build(net.parameters())
        elif step == "U":
            somaspeed_patch.unpatch()
        else:
            found = train(net, optimizer)
    clip = [site.calls for site in somaspeed_patch.report().sites if site.site == "accelerate_clip/clip"]
    return {"built": type(optimizer).__name__, "clipped": sum(clip), "found": found}

TARGETS = sys.argv[2:]

def small(order):
    with testing_optim.small_tiles(64):
        return child(order)

from somaspeed_patch.testing_forks import in_forks
print(json.dumps(in_forks(json.loads(sys.argv[1]), small)))
"""


@pytest.fixture(scope="module")
def orders() -> dict[str, Any]:
    command = [sys.executable, "-c", RUNNER, json.dumps(ORDERS), *TARGETS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@interpreted
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_built_and_who_clips_follows_the_last_call(orders: dict[str, Any], order: str) -> None:
    at = {step: order.rindex(step) if step in order else -1 for step in "PUO"}
    built = order[: at["O"]]
    fused = built.rfind("P") > built.rfind("U")
    patched = at["P"] > at["U"]
    assert orders[order]["built"] == ("FusedAdamW" if fused else "AdamW")
    assert orders[order]["clipped"] == (4 if fused and patched else 0)


@interpreted
def test_every_order_trains_the_same(orders: dict[str, Any]) -> None:
    native = orders["IOT"]["found"]
    for order in ("IOPT", "IPUOT", "PUIOT"):
        assert orders[order]["found"] == native, order
    for order in ("PIOT", "IPOT", "IPUPOT", "IPOUT"):
        ours = orders[order]["found"]
        assert max(abs(x - y) for x, y in zip(ours, native, strict=True)) <= EIGHT_ROUNDINGS * max(native), (
            order
        )
    assert orders["PIOT"]["found"] == orders["IPOT"]["found"] == orders["IPUPOT"]["found"]


# Four updates, each of which rounds the weight twice, in either run: 16 times half an eps.
EIGHT_ROUNDINGS = 8 * torch.finfo(torch.float32).eps


def statuses() -> dict[str, str]:
    return {
        name: site.status for site in somaspeed_patch.report().sites for name in [site.site.split("/")[0]]
    }


LACKING = {
    "accelerate_clip": (Accelerator, "clip_grad_norm_"),
    "lerobot_optimizer": (lerobot, "XVLAAdamWConfig"),
    "hf_trainer": (Trainer, "get_optimizer_cls_and_kwargs"),
}


@pytest.mark.parametrize("target", LACKING)
def test_a_host_that_lacks_a_name_stays_native_and_the_others_go_on(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(*LACKING[target])
    before = [dict(vars(one)) for one in TOUCHED]
    with caplog.at_level(logging.WARNING):
        somaspeed_patch.patch()
    lines = [record.getMessage() for record in caplog.records if record.name == patching.__name__]
    assert len(lines) == 1 and lines[0].startswith(f"{target}: ") and lines[0].endswith("; left native")
    assert {name: statuses()[name] for name in TARGETS} == {
        name: "native" if name == target else "patched" for name in TARGETS
    }
    somaspeed_patch.unpatch()
    assert [dict(vars(one)) for one in TOUCHED] == before


@pytest.mark.parametrize(
    ("owner", "name", "target"),
    [
        (Accelerator, "clip_grad_norm_", "accelerate_clip"),
        (lerobot.AdamWConfig, "build", "lerobot_optimizer"),
        (Trainer, "get_optimizer_cls_and_kwargs", "hf_trainer"),
    ],
)
def test_so_does_one_whose_function_takes_something_else(
    owner: Any, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(
        self: Any, parameters: Any, max_norm: float, norm_type: float = 2, foreach: bool = True
    ) -> None:
        raise AssertionError("not called")

    monkeypatch.setattr(owner, name, newer)
    somaspeed_patch.patch()
    assert vars(owner)[name] is newer
    assert target not in patching.active() and set(TARGETS) - {target} <= set(patching.active())
    reason = next(one.reason for one in somaspeed_patch.report().sites if one.site.startswith(target))
    assert "foreach), expected (" in reason


@pytest.mark.parametrize(
    ("target", "distribution"),
    [("accelerate_clip", "accelerate"), ("lerobot_optimizer", "lerobot"), ("hf_trainer", "transformers")],
)
def test_a_host_of_an_unknown_version_stays_native(
    target: str, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = adapter.installed
    monkeypatch.setattr(
        adapter, "installed", lambda name: "99.0" if name == distribution else installed(name)
    )
    somaspeed_patch.patch()
    assert target not in patching.active()
    reason = next(one.reason for one in somaspeed_patch.report().sites if one.site.startswith(target))
    assert reason.startswith(f"needs {distribution}") and reason.endswith("found 99.0")


@interpreted
def test_without_accelerates_hook_a_fused_optimizer_trains_as_natively() -> None:
    """patch("lerobot_optimizer") alone: the host clips in place."""
    with somaspeed_patch.patched("lerobot_optimizer"), small_tiles(64):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = lerobot.AdamWConfig(lr=0.1).build([param])
        accelerator = Accelerator(cpu=True)
        optimizer = accelerator.prepare(optimizer)
        param.grad = torch.tensor([3.0, 0.0, 4.0])
        assert float(accelerator.clip_grad_norm_([param], 1.0)) == 5.0
        assert param.grad.tolist() == pytest.approx([0.6, 0.0, 0.8])
        optimizer.step()
    assert optimizer.state[param]["exp_avg"].tolist() == pytest.approx([0.06, 0.0, 0.08])


def test_patching_twice_is_patching_once_and_everything_comes_off() -> None:
    for _ in range(2):
        somaspeed_patch.patch(*TARGETS)
        somaspeed_patch.patch(*TARGETS)
        assert not hasattr(vars(Accelerator)["clip_grad_norm_"].__wrapped__, "__wrapped__")
        somaspeed_patch.unpatch()


def test_a_feature_switched_off_and_on_again_is_reported_as_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "INTERPRETED", False)
    somaspeed_patch.patch(*TARGETS)
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    FusedAdamW([param]).step()
    somaspeed_patch.patch(*TARGETS, optimizer=False)
    somaspeed_patch.patch(*TARGETS, optimizer=True)
    assert site("accelerate_clip/optimizer").status == "patched"


def test_functions_that_a_script_took_while_patched_go_on_working() -> None:
    with somaspeed_patch.patched(*TARGETS):
        build, choose = lerobot.AdamWConfig(lr=0.1).build, Trainer.get_optimizer_cls_and_kwargs
    arguments = SimpleNamespace(
        optim="adamw_torch", learning_rate=0.1, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8,
        optim_args=None,
    )  # fmt: skip
    assert issubclass(choose(arguments)[0], torch.optim.AdamW)
    assert isinstance(build([torch.nn.Parameter(torch.ones(3))]), torch.optim.AdamW)


@pytest.mark.parametrize("first", ["accelerate_clip", "step_recorder"])
@pytest.mark.parametrize("undone", ["accelerate_clip", "step_recorder"])
def test_two_adapters_of_one_function_come_and_go_in_any_order(first: str, undone: str) -> None:
    """Both wrap accelerate's clip_grad_norm_ and backward."""
    before = dict(vars(Accelerator))
    pair = ["accelerate_clip", "step_recorder"]
    for target in sorted(pair, key=lambda name: name != first):
        somaspeed_patch.patch(target)
    for target in sorted(pair, key=lambda name: name != undone):
        somaspeed_patch.unpatch(target)
    assert dict(vars(Accelerator)) == before
