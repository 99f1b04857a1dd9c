"""The arithmetic of the results on hand-made numbers."""

import json

import pytest

from somaspeed_patch.ab import results, table
from somaspeed_patch.ab.recipe import load
from somaspeed_patch.ab.runner import Run, interleaved
from somaspeed_patch.ab.steps import Update, read

RECIPE = """\
host: none
steps: 7
discard: 5
repeats: 2
arms:
  native: {targets: none}
  patched: {targets: none}
"""


CACHED = """\
  native_cached: {targets: none, against: none}
  patched_cached: {targets: none, against: native_cached}
loader: {native: native_cached, patched: patched_cached}
"""


def _update(samples, total):
    return Update(samples=samples, seconds={"total": total})


def test_steady_speed_discards_the_first_updates():
    updates = [_update(8, 100.0)] * 5 + [_update(8, 1.0), _update(4, 2.0)]
    assert results.samples_per_second(updates, 5) == 12 / 3.0
    assert results.samples_per_second(updates, 0) == 52 / 503.0


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([3.0], 0.2, 3.0),
        ([1.0, 2.0], 0.2, 1.2),
        ([4, 1, 3, 2, 5, 6], 0.8, 5.0),
        ([0, 10], 0.5, 5.0),
        ([1, 2, 3], 1.0, 3),
    ],
)
def test_quantile(values, q, expected):
    assert results.quantile(values, q) == pytest.approx(expected)


def test_spread():
    found = results.spread([10.0, 30.0, 20.0])
    assert found == {
        "median": 20.0,
        "p20": pytest.approx(14),
        "p80": pytest.approx(26),
        "repeats": [10.0, 30.0, 20.0],
    }


def _seconds(total):
    return {
        "data": 0.1 * total,
        "preprocess": 0,
        "forward": 0.4 * total,
        "backward": 0.3 * total,
        "optimizer": 0.2 * total,
    }


def _write(folder, totals, *, rank=0, world=1, loss=1.0, seconds=_seconds):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "step": i,
            "loss": loss / i,
            "grad_norm": 1.0,
            "samples": 8,
            "seconds": {**seconds(total), "total": total},
            "at": 1000.0 + i,
            "peak_bytes": 2**30 * (1 + rank),
            "peak_kind": "CUDA allocated",
            "rank": rank,
            "world": world,
            "device": "GPU",
        }
        for i, total in enumerate(totals, 1)
    ]
    name = "steps.jsonl" if world == 1 else f"steps.jsonl.rank{rank}"
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_slowest_rank_decides_and_samples_add_up(tmp_path):
    _write(tmp_path, [1.0, 4.0], rank=0, world=2)
    _write(tmp_path, [3.0, 2.0], rank=1, world=2)
    updates = read(tmp_path / "steps.jsonl").updates()
    assert [(update.samples, update.seconds["total"]) for update in updates] == [(16, 3.0), (16, 4.0)]
    assert updates[0].seconds["forward"] == pytest.approx(
        1.2
    )  # of that rank, so that phases add up to the total


@pytest.fixture
def ab(tmp_path):
    """A recipe and its runs: native at 2 s an update, patched at 1 s."""
    file = tmp_path / "hand.yaml"

    def ab(speeds=None, loss=1.0, failed=(), seconds=_seconds, more=""):
        file.write_text(RECIPE + more)
        runs = []
        for arm, totals in (speeds or {"native": (2.0, 2.0), "patched": (1.0, 1.0)}).items():
            for repeat, total in enumerate(totals, 1):
                folder = tmp_path / f"{arm}-{repeat}"
                _write(
                    folder, [9.0] * 5 + [total] * 2, loss=loss if arm == "patched" else 1.0, seconds=seconds
                )
                runs.append(_run(folder, arm, repeat, "exit code 1: boom" if arm in failed else ""))
        return load(str(file)), runs

    return ab


def _run(folder, arm, repeat, reason):
    status = "failed" if reason else "finished"
    common = {"seconds": 30.0, "command": ("x",), "environment": {}}
    return Run(
        arm=arm, repeat=repeat, folder=str(folder), status=status, reason=reason, started=990.0, **common
    )


def test_the_comparison_has_the_published_fields(ab):
    found = results.build(*ab())
    assert found["comparison"]["native"] == {
        "completed_steps": 7,
        "setup_seconds": 11.0,
        "peak_allocated_gib": 1.0,
        "loss_first": 1.0,
        "loss_last": 1 / 7,
        "samples_per_second_steady": 4.0,
        "median_step_seconds": 2.0,
    }
    assert found["comparison"]["patched"]["ratio"] == 2.0
    assert found["comparison"]["patched"]["ratio_by_repeat"] == [2.0, 2.0]
    assert results.exit_code(found) == 0


def test_the_ratio_is_of_medians_over_repeats(ab):
    found = results.build(*ab({"native": (2.0, 4.0), "patched": (1.0, 1.0)}))
    native = found["arms"]["native"]["samples_per_second"]
    assert native == {
        "median": 3.0,
        "p20": pytest.approx(2.4),
        "p80": pytest.approx(3.6),
        "repeats": [4.0, 2.0],
    }
    assert found["comparison"]["patched"]["ratio"] == pytest.approx(8 / 3)
    assert found["comparison"]["patched"]["ratio_by_repeat"] == [2.0, 4.0]


def test_no_gain_is_said_plainly(ab):
    found = results.build(*ab({"native": (1.0, 1.0), "patched": (2.0, 2.0)}))
    assert found["comparison"]["patched"]["ratio"] == 0.5
    assert any("0.50x" in row for row in table.rows(found))


def test_phases_are_medians_of_steady_updates(ab):
    phases = results.build(*ab())["arms"]["native"]["phase_seconds"]
    assert phases == pytest.approx(
        {"data": 0.2, "preprocess": 0, "forward": 0.8, "backward": 0.6, "optimizer": 0.4, "total": 2.0}
    )


def test_a_red_gate_withholds_every_speed(ab):
    found = results.build(*ab(loss=1.01))
    assert results.exit_code(found) == 3 and not found["gate"]["patched"]["green"]
    patched = found["comparison"]["patched"]
    assert not {"ratio", "samples_per_second_steady", "median_step_seconds"} & set(patched)
    assert not {"samples_per_second", "step_seconds", "phase_seconds"} & set(found["arms"]["patched"])
    text = table.markdown(found)
    assert "the parity gate is RED, so no speed is given" in text and "0.00x" not in text
    assert next(row for row in table.rows(found) if row[0].startswith("samples/s"))[2] == "-"


def test_a_failed_arm_is_said_in_words(ab):
    found = results.build(*ab(failed=("patched",)))
    assert results.exit_code(found) == 1 and found["gate"] == {}
    assert "patched failed: run 1: exit code 1: boom" in table.markdown(found)
    assert "ratio" not in found["comparison"]["patched"]


def test_a_failed_baseline_leaves_the_others_without_a_ratio(ab):
    found = results.build(*ab(failed=("native",)))
    assert results.exit_code(found) == 1 and "ratio" not in found["comparison"]["patched"]


def test_what_really_ran_is_said(ab, tmp_path):
    counts = {"calls": 0, "native_calls": 14, "fallbacks": 0, "last_fallback": None}
    sites = [{"site": "a/b", "status": "patched", "reason": "q is on cpu", **counts}]
    recipe, runs = ab()
    (tmp_path / "patched-2" / "somaspeed_report.json").write_text(json.dumps({"sites": sites}))
    found = results.build(recipe, runs)
    assert found["arms"]["patched"]["sites"] == sites and found["arms"]["native"]["sites"] == []
    assert "patched ran a/b: 0 calls, 14 native, 0 fallbacks (q is on cpu)" in table.markdown(found)


def test_a_loader_that_decides_is_named(ab):
    def slow(total):
        return {**dict.fromkeys(results.PHASES, 0.0), "data": 0.6 * total, "preprocess": 0.1 * total}

    found = results.build(*ab(seconds=slow))
    said = found["arms"]["patched"]["loader_bound"]
    assert said.startswith("loader-bound: data and preprocessing take 70% of the step")
    assert said in table.markdown(found)
    assert results.build(*ab())["arms"]["patched"]["loader_bound"] is None


def test_cached_arms_say_whether_the_loader_decides_and_stand_for_nothing_else(ab):
    speeds = {"native": (2.0,), "patched": (1.0,), "native_cached": (1.9,), "patched_cached": (0.5,)}
    found = results.build(*ab(speeds, more=CACHED))
    assert set(found["gate"]) == {"patched", "patched_cached"} and results.exit_code(found) == 0
    assert found["comparison"]["native_cached"]["against"] is None
    assert "ratio" not in found["comparison"]["native_cached"]
    assert found["comparison"]["patched_cached"]["against"] == "native_cached"
    assert found["comparison"]["patched_cached"]["ratio"] == pytest.approx(1.9 / 0.5)
    assert {name: fields["bound"] for name, fields in found["loader"].items()} == {
        "native": "compute",
        "patched": "loader",
    }
    assert table.rows(found)[-1] == (
        "speed against baseline",
        "-",
        "2.00x",
        "not compared",
        "3.80x of native_cached",
    )
    text = table.markdown(found)
    assert "native: 4.00 samples/s with the real loader, 4.21 with cached batches: compute-bound" in text
    assert "patched: 8.00 samples/s with the real loader, 16.00 with cached batches: loader-bound" in text
    assert "native_cached trains on other data than the baseline and is not compared with any arm" in text


def test_a_red_or_failed_arm_gives_no_word_on_the_loader(ab):
    speeds = {"native": (2.0,), "patched": (1.0,), "native_cached": (1.9,), "patched_cached": (0.5,)}
    assert set(results.build(*ab(speeds, loss=1.01, more=CACHED))["loader"]) == {"native"}
    failed = results.build(*ab(speeds, failed=("native_cached",), more=CACHED))
    assert failed["loader"] == {} and set(failed["gate"]) == {"patched"}
    assert "samples_per_second" not in failed["arms"]["patched_cached"]


def test_cached_arms_by_themselves_are_an_ordinary_comparison(ab):
    speeds = {"native_cached": (2.0,), "patched_cached": (1.0,)}
    recipe, runs = ab(speeds, more=CACHED)
    found = results.build(recipe.chosen("native_cached,patched_cached", None), runs)
    assert found["comparison"]["patched_cached"]["ratio"] == 2.0 and found["loader"] == {}
    assert all("against" not in fields for fields in found["comparison"].values())


def test_the_results_are_strict_json(ab, tmp_path):
    recipe, runs = ab(loss=float("nan"))
    text = json.dumps(results.build(recipe, runs), allow_nan=False)
    assert json.loads(text)["comparison"]["patched"]["loss_last"] == "nan"


def test_arms_are_interleaved_forwards_and_backwards(ab):
    recipe, _ = ab()
    order = [(repeat, arm.name) for repeat, arm in interleaved(recipe.chosen(None, 3))]
    assert [name[0] for _, name in order] == list("nppnnp")
    assert [repeat for repeat, _ in order] == [1, 1, 2, 2, 3, 3]


def test_an_arm_that_was_ended_earlier_is_judged_and_measured_over_its_own_updates(ab):
    short = "  slow: {targets: none, stop_after: 6, discard: 4}\n"
    found = results.build(*ab({"native": (2.0,), "patched": (1.0,), "slow": (4.0,)}, more=short))
    assert found["gate"]["slow"]["green"]
    slow = found["arms"]["slow"]
    assert (slow["updates"], slow["discarded"]) == (6, 4)
    assert slow["samples_per_second"]["repeats"] == [pytest.approx(16 / 13.0)]  # updates of 9 and of 4 s
    assert found["comparison"]["slow"]["completed_steps"] == 6
