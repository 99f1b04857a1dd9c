"""The benchmark of FusedAdamW, tried on a CPU: its lists, its gate, and what it writes."""

import json
import signal
import sys
import time

import pytest
import torch

from somaspeed_patch.kernels import adamw, bench_adamw, bench_adamw_arms, bench_adamw_gate, bench_adamw_models
from somaspeed_patch.kernels.bench_adamw_arms import Missing, Problem
from somaspeed_patch.optim import FusedAdamW
from somaspeed_patch.testing_pi05 import loss_and_gradients, make_batch, make_policy

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")

CPU = torch.device("cpu")
_BF16, _FP32 = torch.bfloat16, torch.float32
MIXED = [((40, 30), _BF16), ((70,), _FP32)]


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Tiles of 1 Ki elements: a tile takes the interpreter its whole length, however small a tensor is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "ITER", 1)
        patch.setattr(adamw, "TILE", adamw.BLOCK)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What `--tiny` writes."""
    out = tmp_path_factory.mktemp("bench") / "result.json"
    arguments = ["--tiny", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench_adamw.py", *arguments])
        bench_adamw.main(arguments)
    return json.loads(out.read_text())


def rows(result, name):
    entry = next(entry for entry in result["lists"] if entry["name"] == name)
    return {row["arm"]: row for row in entry["rows"]}


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("pi05", 208, 430_098_464),
        ("molmoact2", 588, 577_564_448),
        ("molmoact2_bf16", 588, 577_564_448),
        ("groot", 537, 1_620_515_968),
        ("fp32_1620m", 539, 1_620_037_888),
        ("bf16_545m", 330, 545_464_320),
        ("small", 1000, 65_536_000),
    ],
)
def test_list_has_the_published_size(name, tensors, elements):
    entries = bench_adamw_models.load(name)
    assert (len(entries), bench_adamw_models.elements(entries)) == (tensors, elements)


def test_no_list_is_left_out():
    assert set(bench_adamw_models.names()) == {
        "pi05", "molmoact2", "molmoact2_bf16", "groot", "fp32_1620m", "bf16_545m", "small",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["pi05", "molmoact2", "groot"])
def test_list_is_that_of_the_real_class(name):
    if name == "groot":
        pytest.importorskip("diffusers")
        pytest.importorskip("tree")
    assert bench_adamw_models.load(name) == bench_adamw_models.CLASSES[name]()


def test_pi05_is_stored_in_two_dtypes():
    entries = bench_adamw_models.load("pi05")
    sizes = {
        dtype: bench_adamw_models.elements(e for e in entries if e[1] == dtype) for dtype in (_BF16, _FP32)
    }
    assert sizes == {_BF16: 311_427_072, _FP32: 118_671_392}


def test_only_the_lm_head_of_pi05_has_no_gradient():
    policy = make_policy(train_expert_only=True, dtype="bfloat16")
    _, gradients = loss_and_gradients(policy, make_batch(policy))
    trainable = {name for name, param in policy.named_parameters() if param.requires_grad}
    assert {name for name in trainable if name not in gradients} == {
        "model.paligemma_with_expert.gemma_expert.lm_head.weight"
    }


@pytest.mark.parametrize("items", [[], [1], [1, 1, 1], [1, 2, 1, 2, 1], [1, 2, 2, 1, 2, 2, 3, 3, 1]])
def test_packed_list_is_shorter_and_comes_back(items):
    entries = [((item, 2), _FP32) for item in items]
    packed = bench_adamw_models._pack([([item, 2], "float32") for item in items])
    assert bench_adamw_models._unpack(packed) == entries
    assert len(packed) <= len(items)


def test_written_file_is_the_stored_one(tmp_path, monkeypatch, capsys):
    stored = json.loads(bench_adamw_models.FILE.read_text())
    monkeypatch.setattr(bench_adamw_models, "FILE", tmp_path / "models.json")
    bench_adamw_models.main(["pi05", "molmoact2"])
    written = json.loads((tmp_path / "models.json").read_text())
    assert written == {name: stored[name] for name in ("pi05", "molmoact2")}
    assert "pi05: 208 tensors, 430,098,464 numbers" in capsys.readouterr().out


def test_tiny_run_has_every_arm_and_says_why_one_has_no_time(tiny):
    assert [entry["name"] for entry in tiny["lists"]] == ["pi05", "small"]
    assert list(rows(tiny, "pi05")) == list(bench_adamw_arms.ARMS)
    assert set(rows(tiny, "small")) == set(bench_adamw_arms.ARMS) - {bench_adamw_arms.WIDE}
    untimed = {arm: row["status"] for arm, row in rows(tiny, "pi05").items() if row["status"] != "timed"}
    graph = "a CUDA graph needs CUDA"
    assert untimed == {"fused, graph": graph, "deepspeed": "not installed", "ours, graph": graph}


@pytest.mark.parametrize("name", ["pi05", "small"])
def test_tiny_run_passes_the_gate(tiny, name):
    for arm in ("ours", bench_adamw_arms.WIDE):
        row = rows(tiny, name).get(arm)
        if row is None:
            continue
        assert row["errors"].keys() == row["errors_allowed"].keys() >= {"norm", "param float32"}
        assert all(0 <= row["errors"][key] <= row["errors_allowed"][key] for key in row["errors"])
    entry = next(entry for entry in tiny["lists"] if entry["name"] == name)
    assert entry["round_trip"]["error_over_allowed"] <= 1
    assert entry["round_trip"]["returns_bit_equal"]
    assert entry["checked_elements"] == entry["elements"] > 0
    assert len(entry["gradient_norms"]) == tiny["gate_updates"] == 3
    assert min(entry["gradient_norms"]) > tiny["hyperparameters"]["max_norm"], "no step was clipped"


def test_fp32_moments_are_nearer_to_the_truth_than_bf16_ones(tiny):
    ours, wide = rows(tiny, "pi05")["ours"], rows(tiny, "pi05")[bench_adamw_arms.WIDE]
    assert wide["errors"]["exp_avg bfloat16"] < 1e-6 < 1e-4 < ours["errors"]["exp_avg bfloat16"]


def test_tiny_run_has_the_figures_of_a_timed_arm(tiny):
    for row in rows(tiny, "pi05").values():
        if row["status"] != "timed":
            assert row["median_ms"] is row["cpu_ms"] is None
            continue
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert len(row["medians_ms"]) == 2
        assert row["gb_s"] > 0 and row["of_copy"] > 0 and row["cpu_ms"] > 0 and row["held_gib"] > 0
        assert (row["cpu_moved_ms"] is not None) == row["arm"].startswith("ours")
    assert rows(tiny, "pi05")["compiled"]["compile_s"] > 0


def test_result_says_where_it_comes_from_and_names_no_path(tiny):
    found = tiny["environment"]
    assert found["command"][0] in ("python", "bench_adamw.py") and found["command"][-1] == "--tiny"
    assert "/" not in " ".join(found["command"])
    assert found["gpu"] is None and found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert {"commit", "date", "cudnn"} <= found.keys()


def test_bf16_section_compares_four_arms(tiny):
    section = tiny["bf16_updates"]
    arms = {arm["arm"]: arm for arm in section["arms"]}
    assert list(arms) == ["torch fused", "ours", "ours, stochastic_rounding", "ours, master_weights"]
    assert (section["weights"], section["steps"], section["lr"]) == (64, 4, 2.5e-5)
    assert arms["ours"]["fraction"] == pytest.approx(arms["torch fused"]["fraction"], abs=0.1)
    assert arms["ours"]["fraction"] < 0.6 < arms["ours, master_weights"]["fraction"] < 1.2
    assert arms["ours"]["unmoved"] > arms["ours, stochastic_rounding"]["unmoved"]


def test_table_is_the_last_thing_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_adamw, "ARMS", ("fused", "ours"))
    bench_adamw.main(["--tiny", "--only", "small", "--out", str(tmp_path / "r.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small: done after")
    assert lines[-3].split()[:2] == ["list", "arm"]
    assert [line.split()[:2] for line in lines[-2:]] == [["small", "fused"], ["small", "ours"]]
    assert json.loads((tmp_path / "r.json").read_text())["bf16_updates"] is None


@pytest.mark.parametrize(
    ("arguments", "interpreted", "message"),
    [
        (["--tiny"], False, "set TRITON_INTERPRET=1"),
        ([], True, "no CUDA GPU is visible"),
        (["--only", "pi06"], True, "invalid choice: 'pi06'"),
    ],
)
def test_wrong_call_says_what_to_do(arguments, interpreted, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_adamw, "INTERPRETED", interpreted)
    with pytest.raises(SystemExit):
        bench_adamw.main(["--out", str(tmp_path / "r.json"), *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "moments", "expected"), [(_FP32, None, 32), (_BF16, None, 16), (_BF16, _FP32, 24)]
)
def test_bytes_a_parameter(dtype, moments, expected):
    problem = Problem([((10, 10), dtype)], CPU)
    assert problem.method_bytes(moments) == 100 * expected
    first, second = problem.moments(moments)
    held = [*problem.params, *problem.grads, *first, *second]
    assert problem.held_bytes(moments) == sum(tensor.nbytes for tensor in held)


def test_moved_gradients_are_the_same_at_other_addresses():
    problem = Problem(MIXED, CPU)
    problem.fill_gradients(1)
    seen = [problem.params[0].grad]
    for _ in range(3):
        problem.move_gradients()
        seen.append(problem.params[0].grad)
        assert seen[-1].data_ptr() != seen[-2].data_ptr()
        assert torch.equal(seen[-1], problem.grads[0])
    problem.use_own_gradients()
    assert problem.params[0].grad is problem.grads[0]


def judged(wrap):
    """What the gate has against an arm whose call is `wrap(arm, call)`."""
    problem = Problem([((70,), _FP32)], CPU)
    truth = bench_adamw_gate.truth_of(problem)
    fused, arm = (bench_adamw_arms.build(name, problem, 0) for name in ("fused", "ours"))
    native = bench_adamw_gate.errors(bench_adamw_gate.run(fused, truth), truth)
    call = arm.call
    arm.call = lambda: wrap(arm, call)
    return bench_adamw_gate.verdict(arm, truth, native)[2]


def test_gate_passes_the_kernels():
    assert judged(lambda arm, call: call()) == []


def test_gate_stops_a_wrong_update():
    def wrong(arm, call):
        norm = call()
        arm.optimizer.state[arm.problem.params[0]]["exp_avg"].mul_(1.01)
        return norm

    assert any(reason.startswith("exp_avg float32 off by ") for reason in judged(wrong))


def test_gate_stops_a_nan():
    def broken(arm, call):
        norm = call()
        arm.problem.params[0].data[0] = float("nan")
        return norm

    assert any("param float32 off by inf" in reason for reason in judged(broken))


def test_gate_stops_a_written_gradient():
    def writing(arm, call):
        norm = call()
        arm.problem.grads[0].mul_(0.5)
        return norm

    assert "the gradients were written" in judged(writing)


def test_gate_stops_an_arm_that_gives_other_bits_in_a_second_run():
    calls = []

    def drifting(arm, call):
        norm = call()
        calls.append(norm)
        if len(calls) == 2 * bench_adamw_gate.STEPS:
            moment = arm.optimizer.state[arm.problem.params[0]]["exp_avg_sq"]
            moment[0] = torch.nextafter(moment[0], torch.tensor(1.0))
        return norm

    assert judged(drifting) == ["two runs differ"]


def test_failing_arm_is_recorded_and_the_others_go_on(monkeypatch):
    def build(name, problem, seconds):
        if name == "foreach":
            raise OSError("no such library")
        return bench_adamw_arms.build(name, problem, seconds)

    monkeypatch.setattr(bench_adamw, "ARMS", ("foreach", "fused", "compiled"))
    monkeypatch.setattr(bench_adamw, "build", build)
    entry = bench_adamw.Measurement(CPU, compile_s=0).measure("one", [((20,), _FP32)])
    assert {row["arm"]: row["status"] for row in entry["rows"]} == {
        "foreach": "OSError: no such library",
        "fused": "timed",
        "compiled": "not compiled: the other lists used up the time for it",
    }


def test_ours_gets_no_time_if_its_state_does_not_travel(monkeypatch):
    trip = {"passed": False, "error_over_allowed": 3.0, "returns_bit_equal": True}
    monkeypatch.setattr(bench_adamw_gate, "round_trip", lambda problem, places: trip)
    monkeypatch.setattr(bench_adamw, "ARMS", ("fused", "ours"))
    entry = bench_adamw.Measurement(CPU, compile_s=0).measure("one", [((20,), _FP32)])
    assert {row["arm"]: row["status"] for row in entry["rows"]} == {
        "fused": "timed",
        "ours": "no time: its state does not come through torch.optim.AdamW",
    }


def test_round_trip_notices_a_state_that_torch_reads_otherwise(monkeypatch):
    problem = Problem([((70,), _FP32)], CPU)
    problem.fill_params()
    assert bench_adamw_gate.round_trip(problem, [0])["passed"]

    def lossy(optimizer):
        saved = torch.optim.AdamW.state_dict(optimizer)
        state = {key: {**entry, "step": entry["step"] * 0} for key, entry in saved["state"].items()}
        return {**saved, "state": state}

    monkeypatch.setattr(FusedAdamW, "state_dict", lossy)
    assert not bench_adamw_gate.round_trip(problem, [0])["passed"]


def test_without_torchs_fused_arm_there_is_no_gate(monkeypatch):
    monkeypatch.setattr(bench_adamw, "ARMS", ("foreach",))
    with pytest.raises(RuntimeError, match="no gate without torch's fused AdamW, and it is not in ARMS"):
        bench_adamw.Measurement(CPU, compile_s=0).measure("one", [((20,), _FP32)])


def test_time_limit_ends_a_body_that_catches_exceptions_and_keeps_the_outer_limit():
    before = signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with pytest.raises(Missing, match="too late"), bench_adamw_arms.time_limit(0.05, "too late"):
            while True:
                try:
                    time.sleep(1)
                except Exception:
                    continue
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_checked_places_are_the_ends_of_each_shape_within_the_limit(monkeypatch):
    params = [torch.empty(size) for size in (5, 7, 5, 7, 5, 100)]
    assert bench_adamw_gate.checked_places(params) == [0, 1, 3, 4, 5]
    monkeypatch.setattr(bench_adamw_gate, "CHECKED", 30)
    assert bench_adamw_gate.checked_places(params) == [0, 1, 3, 4]
    monkeypatch.setattr(bench_adamw_gate, "CHECKED", 1)
    assert bench_adamw_gate.checked_places(params) == [0]
