"""Gradients of one update: what is saved is what the host trains on; what differs is found and named."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import somaspeed_patch
from somaspeed_patch import sites, testing_accelerate
from somaspeed_patch.ab import gradients
from somaspeed_patch.ab.gradients import compare
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_recorder import Loop, Net, recorded

accelerate = pytest.importorskip("accelerate")
logging_utils = pytest.importorskip("lerobot.utils.logging_utils")

TRAINED = {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}


def same(found, expected):
    """Names, dtypes and every bit."""
    kinds = [{name: (one.dtype, one.shape) for name, one in of.items()} for of in (found, expected)]
    return kinds[0] == kinds[1] and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("max_norm", [0.01, None], ids=["clip", "no clip"])
@pytest.mark.parametrize(("accumulation", "update"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_gradients_are_those_of_the_unpatched_run_before_clipping(tmp_path, max_norm, accumulation, update):
    plain = Loop(accumulation=accumulation, max_norm=max_norm).train(3).gradients
    features = {"record_gradients": str(update)}
    recorded(tmp_path, 3, features=features, accumulation=accumulation, max_norm=max_norm)
    found = load_file(tmp_path / gradients.FILE)
    assert set(found) == TRAINED  # a parameter without a gradient is left out
    assert same(found, plain[update - 1])
    assert {file.name for file in tmp_path.iterdir()} == {"steps.jsonl", gradients.FILE}


def test_gradients_keep_their_dtype(tmp_path):
    loop, _ = recorded(tmp_path, 1, features={"record_gradients": "1"}, dtype=torch.bfloat16)
    found = load_file(tmp_path / gradients.FILE)
    assert same(found, loop.gradients[0]) and found["inner.bias"].dtype == torch.bfloat16


def test_updates_are_counted_from_the_start_of_this_run(tmp_path):
    loop, lines = recorded(tmp_path, 2, features={"record_gradients": "2"}, before=100)
    assert [line["step"] for line in lines] == [101, 102]
    assert same(load_file(tmp_path / gradients.FILE), loop.gradients[1])


def test_fused_adamw_clips_later_and_its_gradients_are_the_same(tmp_path):
    plain = Loop().train(1).gradients
    with somaspeed_patch.patched("accelerate_clip"):
        site = sites.site("accelerate_clip/clip")
        before = site.calls
        recorded(tmp_path, 1, features={"record_gradients": "1"}, optimizer=FusedAdamW)
        assert site.calls == before + 1
    assert same(load_file(tmp_path / gradients.FILE), plain[0])


@pytest.mark.parametrize("max_norm", [0.01, 0.0])
def test_gradients_of_a_trainer(tmp_path, max_norm):
    transformers = pytest.importorskip("transformers")

    class Answers(Net):
        def forward(self, x):
            return {"loss": super().forward(x).square().mean()}

    class Keep(transformers.TrainerCallback):
        """The gradients as the optimizer gets them."""

        def __init__(self):
            self.updates = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            named = model.named_parameters()
            self.updates.append({name: one.grad.clone() for name, one in named if one.grad is not None})

    def train(max_norm, **features):
        testing_accelerate.forget()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "host"), max_steps=2, per_device_train_batch_size=4, use_cpu=True,
            seed=1, gradient_accumulation_steps=2, report_to="none", disable_tqdm=True, save_strategy="no",
            remove_unused_columns=False, max_grad_norm=max_norm,
        )  # fmt: skip
        torch.manual_seed(5)
        keep, rows = Keep(), [{"x": row} for row in torch.randn(32, 3)]
        with somaspeed_patch.patched("step_recorder", **features):
            model = Answers()
            transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[keep]).train()
        return keep.updates

    unclipped = train(0.0)
    file = tmp_path / "steps.jsonl"
    clipped = train(max_norm, record_steps=str(file), record_gradients="1")
    assert same(load_file(tmp_path / gradients.FILE), unclipped[0])
    assert same(clipped[0], unclipped[0]) == (max_norm == 0.0)


def test_switched_off_nothing_is_left_behind(tmp_path):
    recorded(tmp_path, 2, features={})
    assert [file.name for file in tmp_path.iterdir()] == ["steps.jsonl"]


def test_without_a_steps_file_no_gradients_are_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with somaspeed_patch.patched("step_recorder", record_gradients="1"):
        Loop().train(1)
    assert not list(tmp_path.iterdir())


def test_recording_gradients_and_a_profile_changes_nothing_and_can_be_undone(tmp_path):
    plain = Loop().train(3)
    seams = [accelerate.Accelerator, logging_utils.MetricsTracker, accelerate.optimizer.AcceleratedOptimizer]
    before, state = [dict(vars(seam)) for seam in seams], torch.get_rng_state()
    loop, _ = recorded(tmp_path, 3, features={"record_gradients": "1", "record_profile": "2"})
    assert [dict(vars(seam)) for seam in seams] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(same(*updates) for updates in zip(loop.gradients, plain.gradients, strict=True))
    assert same(loop.net.state_dict(), plain.net.state_dict())


@pytest.mark.parametrize("feature", ["record_gradients", "record_profile"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "one", " 1", "01"])
def test_what_is_no_number_of_an_update_is_refused(tmp_path, feature, value):
    with pytest.raises(ValueError, match=f"{feature} must be the number of an update, .* but is '{value}'"):
        recorded(tmp_path, 1, features={feature: value})


def saved(model, folder):
    """The gradients that the module `model()` holds, as the recorder saves them."""
    from somaspeed_patch.ab import recorder_gradients

    testing_accelerate.forget()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model())
    recorder_gradients.save(accelerator, folder)
    return load_file(folder / gradients.FILE)


def test_names_are_those_of_the_model_without_wrappers(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def wrapped():
        net = Net()
        net(torch.ones(2, 3)).sum().backward()
        net.inner, net.outer = checkpoint_wrapper(net.inner), torch.compile(net.outer)
        return torch.compile(net)

    assert set(saved(wrapped, tmp_path)) == TRAINED


def test_of_two_models_the_second_is_numbered(tmp_path):
    from somaspeed_patch.ab import recorder_gradients

    nets = Net(), Net()
    for net in nets:
        net(torch.ones(2, 3)).sum().backward()
    testing_accelerate.forget()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*nets)
    recorder_gradients.save(accelerator, tmp_path)
    assert set(load_file(tmp_path / gradients.FILE)) == TRAINED | {f"1.{name}" for name in TRAINED}


def test_a_sparse_gradient_is_saved_dense(tmp_path):
    def embedded():
        table = torch.nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1, 1, 3])).sum().backward()
        return table

    assert saved(embedded, tmp_path)["weight"].tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("kind", "why"), [("DEEPSPEED", "DEEPSPEED keeps the gradients"), ("FSDP", "FSDP1 joins the gradients")]
)
def test_gradients_that_are_elsewhere_are_not_saved_and_the_report_says_why(tmp_path, kind, why):
    from somaspeed_patch.ab import recorder_gradients

    kept_away = SimpleNamespace(distributed_type=accelerate.DistributedType(kind), _models=[Net()])
    recorder_gradients.save(kept_away, tmp_path)
    assert not list(tmp_path.iterdir())
    assert sites.site("step_recorder/record_gradients").reason.startswith(why)


def test_a_model_without_gradients_is_not_saved(tmp_path):
    with pytest.raises(FileNotFoundError):
        saved(Net, tmp_path)
    assert "no parameter" in sites.site("step_recorder/record_gradients").reason


@pytest.fixture
def files(tmp_path):
    """Save gradients under a name."""

    def save(name, **tensors):
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return save


BASE = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]])}  # norms 5 and 12, together 13


def test_two_runs_agree_and_a_gradient_that_is_off_by_two_percent_is_named(tmp_path):
    for arm in ("native", "patched"):
        recorded(tmp_path / arm, 2, features={"record_gradients": "2"}, accumulation=2)
    native, patched = (tmp_path / arm / gradients.FILE for arm in ("native", "patched"))
    agreed = compare(native, patched, 0.01)
    assert agreed.green and (agreed.share, agreed.error, agreed.parameters) == (0, 0, 4)
    assert agreed.cosine == pytest.approx(1) and agreed.missing == ()
    wrong = load_file(patched)
    wrong["outer.weight"] *= 1.02
    save_file(wrong, patched)
    found = compare(native, patched, 0.01)
    assert not found.green and found.name == "outer.weight" and 1 < found.share < 2
    assert found.error == pytest.approx(0.02 * found.baseline_norm, rel=1e-5)
    assert compare(native, patched, 0.03).green


def test_the_budget_is_of_the_parameter_and_a_little_of_all(files):
    arm = files("arm", a=BASE["a"] + torch.tensor([0.0, 0.25]), b=BASE["b"])
    found = compare(files("base", **BASE), arm, 0.1)
    assert (found.name, found.error, found.baseline_norm) == ("a", 0.25, 5)
    assert found.allowed == pytest.approx(0.1 * 5 + 0.001 * 13)
    assert found.share == pytest.approx(0.25 / 0.513)
    assert found.cosine == pytest.approx((9 + 17) / (5 * math.hypot(3, 4.25)))


@pytest.mark.parametrize(("noise", "green"), [(0.0129, True), (0.0131, False)])
def test_a_gradient_that_is_zero_but_for_rounding_has_the_budget_of_all(files, noise, green):
    base = files("base", **BASE, key_bias=torch.zeros(1))
    found = compare(base, files("arm", **BASE, key_bias=torch.tensor([noise])), 0.1)
    assert found.green is green and found.name == "key_bias" and found.cosine == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["base", "arm", "both"])
def test_what_is_not_finite_is_red_and_named(files, bad, where):
    broken = {**BASE, "b": torch.tensor([[bad]])}
    base = files("base", **(BASE if where == "arm" else broken))
    found = compare(base, files("arm", **(BASE if where == "base" else broken)), 0.1)
    assert not found.green and found.name == "b" and found.share == math.inf


def test_a_gradient_of_one_run_only_is_red_and_named(files):
    base = files("base", **BASE, lost=torch.ones(144))  # of norm 12: part of all gradients together
    found = compare(base, files("arm", **BASE, new=torch.ones(1)), 0.1)
    assert not found.green and found.missing == ("lost", "new") and found.parameters == 2
    assert found.share == 0 and found.allowed == pytest.approx(0.1 * 5 + 0.001 * math.hypot(13, 12))


def test_another_shape_is_red(files):
    found = compare(files("base", **BASE), files("arm", a=BASE["a"], b=torch.tensor([12.0])), 0.1)
    assert not found.green and found.name == "b" and found.share == math.inf and math.isnan(found.cosine)


def test_without_tolerance_only_equal_gradients_are_green(files):
    base = files("base", **BASE)
    assert compare(base, files("arm", **BASE), 0.0).green
    assert compare(base, files("other", **{**BASE, "a": BASE["a"] * 1.0001}), 0.0).share == math.inf


def test_gradients_in_pieces_and_in_different_dtypes(files, monkeypatch):
    torch.manual_seed(0)
    base = {"a": torch.randn(5, 7), "b": torch.randn(3), "c": torch.tensor(2.0), "d": torch.zeros(0, 2)}
    names = files("base", **base), files("arm", **{name: one.bfloat16() for name, one in base.items()})
    whole = compare(*names, 0.01)
    monkeypatch.setattr(gradients, "_PIECE", 4)
    pieces = compare(*names, 0.01)
    assert pieces.name == whole.name and pieces.parameters == 4
    for field in ("share", "error", "allowed", "baseline_norm", "cosine"):
        assert getattr(pieces, field) == pytest.approx(getattr(whole, field), rel=1e-12)
    worst = base[whole.name].double()
    assert whole.error == pytest.approx(float((worst.bfloat16().double() - worst).norm()), rel=1e-12)


def test_files_that_cannot_be_compared_are_said_so(files, tmp_path):
    base = files("base", **BASE)
    with pytest.raises(ValueError, match="arm: no gradients were recorded"):
        compare(base, tmp_path / "arm", 0.1)
    with pytest.raises(ValueError, match="no parameter in common"):
        compare(base, files("other", c=torch.ones(1)), 0.1)


def test_the_module_needs_no_torch_until_it_compares():
    code = "import sys; sys.modules['torch'] = None; import somaspeed_patch.ab.gradients"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
