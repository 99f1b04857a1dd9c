"""The parity gate on hand-made steps files: what is green, what is red, and what it says."""

import json

import pytest

from somaspeed_patch.ab.gate import judge
from somaspeed_patch.ab.recipe import Tolerance
from somaspeed_patch.ab.steps import count, read

TOLERANCE = Tolerance(loss=1e-5, grad_norm=1e-4)


@pytest.fixture
def run(tmp_path):
    """Write a steps file, read it back; `change` maps (update, field) to another value."""
    number = iter(range(100))

    def run(change=None, *, steps=6, rank=None, tail="", drop=()):
        folder = tmp_path / str(next(number))
        folder.mkdir()
        for r in [0] if rank is None else rank:
            file = folder / ("steps.jsonl" if rank is None else f"steps.jsonl.rank{r}")
            lines = [
                _line(i, r, len(rank or [0]), change or {}) for i in range(1, steps + 1) if i not in drop
            ]
            file.write_text("".join(lines) + tail)
        return read(folder / "steps.jsonl")

    return run


def _line(step, rank, world, change):
    fields = {"step": step, "loss": 2.0 - 0.1 * step, "grad_norm": 1.0 + 0.01 * step, "samples": 8}
    fields |= {name: value for (at, name), value in change.items() if at == step}
    return (
        json.dumps({**fields, "seconds": {"total": 1.0}, "rank": rank, "world": world, "more": "ignored"})
        + "\n"
    )


def verdict(baseline, arm, steps=6):
    return judge(baseline, arm, steps=steps, tolerance=TOLERANCE)


def test_equal_runs_are_green(run):
    found = verdict([run(), run()], [run(), run()])
    assert found.green and found.reasons == ()
    assert found.worst["loss"].relative == found.noise["loss"].relative == 0


def test_noise_is_not_measured_with_one_repeat(run):
    assert verdict([run()], [run()]).noise == {}


@pytest.mark.parametrize(("field", "value", "allowed"), [("loss", 1.7, 1e-5), ("grad_norm", 1.03, 1e-4)])
def test_the_tolerance_is_relative_and_sharp(run, field, value, allowed):
    inside = verdict([run()], [run({(3, field): value * (1 + 0.9 * allowed)})])
    outside = verdict([run()], [run({(3, field): value * (1 - 1.1 * allowed)})])
    assert inside.green and inside.worst[field].step == 3
    assert not outside.green
    assert outside.reasons[0].startswith(f"{field} differs by {1.1 * allowed:.3g} relative, allowed")
    assert "at update 3: native" in outside.reasons[0]


def test_one_bad_repeat_is_enough(run):
    assert not verdict([run()], [run(), run({(6, "loss"): 1.5})]).green


def test_one_bad_rank_is_enough(run):
    good, bad = run(rank=[0, 1]), run({(2, "grad_norm"): 9.0}, rank=[0, 1])
    assert verdict([good], [run(rank=[0, 1])]).green
    assert not verdict([good], [bad]).green


def test_a_baseline_that_does_not_repeat_itself_is_red(run):
    noisy = run({(4, "loss"): 1.61})
    found = verdict([run(), noisy], [run()])
    assert not found.green and "the baseline does not repeat itself" in found.reasons[0]
    assert found.noise["loss"].step == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_not_finite_is_red_even_when_both_arms_agree(run, field, value):
    found = verdict([run({(5, field): value})], [run({(5, field): value})])
    assert not found.green
    assert found.reasons == tuple(
        f"{name}, run 1, rank 0: {field} is {value} at update 5" for name in ("native", "patched")
    )


def test_a_missing_update_is_red(run):
    found = verdict([run()], [run(drop={4})])
    assert found.reasons == (
        "patched, run 1, rank 0: expected 6 updates from 1 on, found 5; update 4 is missing",
    )


def test_shorter_and_longer_runs_are_red(run):
    assert "found 5; update 6 is missing" in verdict([run()], [run(steps=5)]).reasons[0]
    assert "found 7; updates are repeated or out of order" in verdict([run()], [run(steps=7)]).reasons[0]


def test_both_too_short_is_red(run):
    assert len(verdict([run(steps=3)], [run(steps=3)]).reasons) == 2


def test_another_batch_size_is_red(run):
    assert "only equal batches are compared" in verdict([run()], [run({(2, "samples"): 7})]).reasons[0]


def test_another_number_of_ranks_is_red(run):
    assert "only equal batches are compared" in verdict([run()], [run(rank=[0, 1])]).reasons[0]


def test_zero_against_something_is_red(run):
    assert not verdict([run({(1, "loss"): 0.0})], [run({(1, "loss"): 1e-9})]).green
    assert verdict([run({(1, "loss"): 0.0})], [run({(1, "loss"): 0.0})]).green


def test_no_runs_and_empty_files_are_red(run, tmp_path):
    assert verdict([run()], []).reasons == ("patched: no run was finished",)
    assert verdict([run()], [read(tmp_path / "nowhere" / "steps.jsonl")]).reasons == (
        "patched, run 1: no updates were recorded",
    )


def test_a_line_cut_off_by_a_crash_is_left_out(run, tmp_path):
    cut = run(steps=2, tail='{"step": 3, "lo')
    assert cut.completed == 2
    assert count(next(tmp_path.glob("*/steps.jsonl"))) == 2
