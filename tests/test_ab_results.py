"""The arithmetic of the results on hand-made numbers."""

import json
from pathlib import Path

import pytest

from somaspeed_patch.ab import cell_runs, results, table
from somaspeed_patch.ab.recipe import load
from somaspeed_patch.ab.runner import Run, interleaved
from somaspeed_patch.ab.steps import Update, read

RECIPE = """\
host: none
steps: 7
discard: 5
repeats: 2
necessary_tflop_per_sample: 0.5
arms:
  native: {targets: none}
  patched: {targets: [pi05]}
"""


OURS = [
    {
        "site": "a/b",
        "status": "patched",
        "reason": "",
        "calls": 7,
        "native_calls": 0,
        "fallbacks": 0,
        "last_fallback": None,
    }
]
CACHED = """\
  native_cached: {targets: none, against: none}
  patched_cached: {targets: [pi05], against: native_cached}
loader: {native: native_cached, patched: patched_cached}
"""


def _update(samples, total):
    return Update(samples=samples, seconds={"total": total})


def test_steady_speed_discards_the_first_updates():
    updates = [_update(8, 100.0)] * 5 + [_update(8, 1.0), _update(4, 2.0)]
    assert cell_runs.samples_per_second(updates, 5) == 12 / 3.0
    assert cell_runs.samples_per_second(updates, 0) == 52 / 503.0


def _seconds(total):
    return {
        "data": 0.1 * total,
        "preprocess": 0,
        "forward": 0.4 * total,
        "backward": 0.3 * total,
        "optimizer": 0.2 * total,
    }


def _write(folder, totals, *, rank=0, world=1, loss=1.0, seconds=_seconds, samples=8):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "step": i,
            "loss": loss / i,
            "grad_norm": 1.0,
            "samples": samples,
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

    def ab(speeds=None, loss=1.0, failed=(), seconds=_seconds, more="", sites=OURS, old="", new=""):
        file.write_text((RECIPE + more).replace(old, new) if old else RECIPE + more)
        runs = []
        for name, totals in (speeds or {"native": (2.0, 2.0), "patched": (1.0, 1.0)}).items():
            arm, _, batch = name.partition(" ")
            for repeat, total in enumerate(totals, 1):
                folder = tmp_path / "runs" / f"{name}-{repeat}"
                other = loss if arm == "patched" else 1.0
                _write(folder, [9.0] * 5 + [total] * 2, loss=other, seconds=seconds, samples=int(batch or 8))
                if arm.startswith("patched"):
                    (folder / "somaspeed_report.json").write_text(json.dumps({"sites": sites}))
                reason = "exit code 1: boom" if arm in failed else ""
                runs.append(_run(folder, arm, repeat, reason, int(batch) if batch else None))
        return load(str(file)), runs

    return ab


def _run(folder, arm, repeat, reason, batch=None):
    status = "failed" if reason else "finished"
    common = {"seconds": 30.0, "command": ("x",), "environment": {}}
    return Run(
        arm=arm,
        batch=batch,
        repeat=repeat,
        folder=str(folder),
        status=status,
        reason=reason,
        started=990.0,
        **common,
    )


def cell(found, arm, batch=None):
    (one,) = [cell for cell in found["cells"] if (cell["arm"], cell["batch"]) == (arm, batch)]
    return one


def equal(found, arm):
    (one,) = found["comparison"]["arms"][arm]["equal_batch"]
    return one


def test_a_cell_has_its_figures(ab):
    found = results.build(*ab())
    native = cell(found, "native")
    assert native["samples_per_second"] == {"median": 4.0, "p20": 4.0, "p80": 4.0, "repeats": [4.0, 4.0]}
    assert native["step_seconds"]["median"] == 2.0 and native["setup_seconds"]["median"] == 11.0
    assert native["peak_allocated_gib"] == 1.0 and native["completed_steps"] == 7
    assert native["measured_samples"] == [16, 16] and native["slowest_rank_seconds"] == [4.0, 4.0]
    assert native["loss"] == [[i, 1 / i] for i in range(1, 8)]
    assert native["native"] and not cell(found, "patched")["native"]
    assert (native["tflop_per_sample"], native["tflops"], native["mfu"]) == (0.5, 2.0, None)
    assert found["schema"] == 2 and found["kind"] == "trainer"
    assert results.exit_code(found) == 0


def test_the_share_of_the_peak_needs_a_known_device():
    assert results.work(0.5, 989.0, ["NVIDIA H200"], 1)["mfu"] == 0.5
    assert results.work(0.5, 989.0, ["NVIDIA H200"], 2)["mfu"] == 0.25  # the speed is that of both ranks
    assert results.work(0.5, 989.0, ["cpu"], 1)["mfu"] is None
    assert results.work(None, 989.0, ["NVIDIA H200"], 1)["tflops"] is None


def test_the_comparison_states_its_interval(ab):
    found = results.build(*ab({"native": (2.0, 4.0), "patched": (1.0, 1.0)}))
    ratio = equal(found, "patched")
    assert (ratio["against"], ratio["ratio_by_repeat"]) == ("native", [2.0, 4.0])
    assert ratio["ratio"] == pytest.approx(8**0.5)
    assert ratio["low"] < 2 and ratio["high"] > 4
    assert found["comparison"]["best_native"] == {"arm": "native", "batch": None}


def test_the_published_fields(ab):
    (entry,) = results.build(*ab())["published"]
    assert entry["speedup"] == 2.0 and entry["world_size"] == 1
    assert entry["native"] == {
        "config": "native",
        "microbatch_per_gpu": None,
        "global_batch": 8,
        "summary": {
            "completed_steps": 7,
            "target_steps": 7,
            "setup_seconds": 11.0,
            "samples_per_second_steady": 4.0,
            "measured_steps": 2,
        },
        "measured_samples": 32,
        "measured_seconds": 8.0,
        "peak_allocated_gib": 1.0,
    }


def test_no_gain_is_said_plainly(ab):
    found = results.build(*ab({"native": (1.0, 1.0), "patched": (2.0, 2.0)}))
    assert equal(found, "patched")["ratio"] == 0.5
    assert any(any("0.50x" in word for word in row) for row in table.rows(found))


def test_phases_are_medians_of_steady_updates(ab):
    phases = cell(results.build(*ab()), "native")["phase_seconds"]
    assert phases == pytest.approx(
        {"data": 0.2, "preprocess": 0, "forward": 0.8, "backward": 0.6, "optimizer": 0.4}
    )


def test_a_red_gate_withholds_every_speed(ab):
    found = results.build(*ab(loss=1.01))
    assert results.exit_code(found) == 3 and not found["gate"]["patched"]["green"]
    patched = cell(found, "patched")
    assert not {"samples_per_second", "step_seconds", "phase_seconds"} & set(patched)
    assert patched["withheld"][0].startswith("the parity gate is red: loss differs by 0.01 relative")
    said = found["comparison"]["arms"]["patched"]
    assert said["equal_batch"] == [] and said["best_batch"] is None and said["withheld"]
    assert found["published"] == []
    text = table.markdown(found)
    assert "the parity gate is RED, so no speed is given" in text and "0.00x" not in text
    row = next(row for row in table.rows(found) if row[0] == "patched")
    assert row[2] == "-" and row[-1] == "-"


def test_a_failed_arm_is_said_in_words(ab):
    found = results.build(*ab(failed=("patched",)))
    assert results.exit_code(found) == 1 and found["gate"] == {}
    assert "run 1: exit code 1: boom" in table.markdown(found)
    assert found["comparison"]["arms"]["patched"]["equal_batch"] == []
    assert "exit code 1: boom" in found["comparison"]["arms"]["patched"]["withheld"][0]


def test_a_failed_baseline_leaves_the_others_without_a_ratio(ab):
    found = results.build(*ab(failed=("native",)))
    assert results.exit_code(found) == 1 and found["comparison"]["best_native"] is None
    assert found["comparison"]["arms"]["patched"]["equal_batch"] == []


def test_what_really_ran_is_said(ab):
    left = {**OURS[0], "site": "c/d", "calls": 0, "native_calls": 14, "reason": "q is on cpu"}
    found = results.build(*ab(sites=[*OURS, left]))
    assert cell(found, "patched")["sites"][1] == left and cell(found, "native")["sites"] == []
    assert "patched ran c/d: 0 calls, 14 native, 0 fallbacks (q is on cpu)" in table.markdown(found)


def test_a_fallback_that_fired_withholds_the_claim_but_not_the_figures(ab):
    fell = {**OURS[0], "fallbacks": 3, "last_fallback": "RuntimeError: no kernel"}
    found = results.build(*ab(sites=[fell]))
    patched = cell(found, "patched")
    assert patched["withheld"] == ["a/b fell back to the host 3 times: RuntimeError: no kernel"]
    assert patched["samples_per_second"]["median"] == 8.0
    assert found["comparison"]["arms"]["patched"]["equal_batch"] == []


def test_an_arm_in_which_nothing_ran_makes_no_claim(ab):
    found = results.build(*ab(sites=[]))
    assert cell(found, "patched")["withheld"] == ["nothing of ours ran in it: the report counts no call"]


def test_a_loader_that_decides_withholds_the_claim(ab):
    def slow(total):
        return {**dict.fromkeys(cell_runs.PHASES, 0.0), "data": 0.7 * total, "forward": 0.3 * total}

    found = results.build(*ab(seconds=slow))
    (said,) = cell(found, "patched")["withheld"]
    assert said.startswith("loader-bound: data and preprocessing take 70% of the step")
    assert said in table.markdown(found)
    assert found["comparison"]["arms"]["patched"]["equal_batch"] == []
    assert cell(results.build(*ab()), "patched")["withheld"] == []


def test_cached_arms_say_whether_the_loader_decides_and_stand_for_nothing_else(ab):
    speeds = {"native": (2.0,), "patched": (1.0,), "native_cached": (1.9,), "patched_cached": (0.5,)}
    found = results.build(*ab(speeds, more=CACHED))
    assert set(found["gate"]) == {"patched", "patched_cached"} and results.exit_code(found) == 0
    arms = found["comparison"]["arms"]
    assert found["comparison"]["best_native"]["arm"] == "native"  # though native_cached is faster
    assert arms["native_cached"] == {"equal_batch": [], "best_batch": None, "withheld": []}
    assert equal(found, "patched_cached")["against"] == "native_cached"
    assert equal(found, "patched_cached")["ratio"] == pytest.approx(1.9 / 0.5)
    assert arms["patched_cached"]["best_batch"] is None
    assert cell(found, "native")["loader"]["bound"] == "compute"
    assert cell(found, "patched")["loader"]["bound"] == "loader"
    why = "loader-bound: 8.00 samples/s with the real loader, 16.00 with cached batches"
    assert arms["patched"] == {"equal_batch": [], "best_batch": None, "withheld": [why]}
    text = table.markdown(found)
    assert "native: 4.00 samples/s with the real loader, 4.21 with cached batches: compute-bound" in text


def test_a_red_or_failed_arm_gives_no_word_on_the_loader(ab):
    speeds = {"native": (2.0,), "patched": (1.0,), "native_cached": (1.9,), "patched_cached": (0.5,)}
    red = results.build(*ab(speeds, loss=1.01, more=CACHED))
    assert [one["arm"] for one in red["cells"] if one["loader"]] == ["native"]
    failed = results.build(*ab(speeds, failed=("native_cached",), more=CACHED))
    assert cell(failed, "native")["loader"] is None and set(failed["gate"]) == {"patched"}


def test_cached_arms_by_themselves_are_an_ordinary_comparison(ab):
    speeds = {"native_cached": (2.0,), "patched_cached": (1.0,)}
    recipe, runs = ab(speeds, more=CACHED)
    found = results.build(recipe.chosen("native_cached,patched_cached", None), runs)
    assert equal(found, "patched_cached")["ratio"] == 2.0
    assert found["comparison"]["best_native"]["arm"] == "native_cached"


BATCHES = {
    "old": "arms:\n  native: {targets: none}\n  patched: {targets: [pi05]}",
    "new": 'arguments: ["-b={batch}"]\nbatches: [8]\narms:\n  native: {targets: none, batches: [8, 16]}\n'
    "  patched: {targets: [pi05], batches: [8, 64]}",
}
AT_BATCHES = {
    "native 8": (2.0, 2.0),
    "native 16": (3.2, 3.2),
    "patched 8": (1.0, 1.0),
    "patched 64": (4.0, 4.0),
}


def test_equal_batch_and_best_batch_are_two_columns(ab):
    found = results.build(*ab(AT_BATCHES, **BATCHES))
    arms = found["comparison"]["arms"]
    assert found["comparison"]["best_native"] == {"arm": "native", "batch": 16}
    assert equal(found, "patched")["ratio"] == 2.0 and equal(found, "patched")["batch"] == 8
    best = arms["patched"]["best_batch"]
    assert (best["batch"], best["against"], best["against_batch"]) == (64, "native", 16)
    assert best["ratio"] == pytest.approx(16 / 5)
    header, *rows = table.rows(found)
    assert header[-2:] == ("equal batch", "best batch")
    by_cell = {row[:2]: row[-2:] for row in rows}
    assert by_cell["patched", "8"] == ("2.00x (2.00-2.00) of native", "-")
    assert by_cell["patched", "64"] == ("-", "3.20x (3.20-3.20) of native at 16")


def test_an_arm_without_a_common_batch_is_red(ab):
    more = {**BATCHES, "new": BATCHES["new"].replace("[8, 64]", "[64]")}
    found = results.build(*ab({name: AT_BATCHES[name] for name in AT_BATCHES if "d 8" not in name}, **more))
    assert found["gate"]["patched"]["reasons"][0].startswith("patched has no batch in common with native")


def test_the_results_are_strict_json_without_this_machines_paths(ab, tmp_path):
    recipe, runs = ab(loss=float("nan"))
    text = json.dumps(results.build(recipe, runs), allow_nan=False)
    assert cell(json.loads(text), "patched")["loss"][0] == [1, "nan"]
    assert cell(json.loads(text), "patched")["withheld"][1] == "the loss is nan at update 1"
    assert str(tmp_path) not in text and '"runs/patched-1"' in text


def test_a_nan_of_the_baseline_leaves_nothing_to_compare_with(ab):
    recipe, runs = ab()
    _write(Path(runs[0].folder), [9.0] * 5 + [2.0] * 2, loss=float("nan"))
    found = results.build(recipe, runs)
    assert cell(found, "native")["withheld"] == ["the loss is nan at update 1"]
    assert found["comparison"]["best_native"] is None and not found["gate"]["patched"]["green"]


def test_arms_are_interleaved_forwards_and_backwards(ab):
    recipe, _ = ab()
    order = [(repeat, arm.name) for repeat, arm, _ in interleaved(recipe.chosen(None, 3))]
    assert [name[0] for _, name in order] == list("nppnnp")
    assert [repeat for repeat, _ in order] == [1, 1, 2, 2, 3, 3]


def test_an_arm_that_was_ended_earlier_is_judged_and_measured_over_its_own_updates(ab):
    short = "  slow: {targets: none, stop_after: 6, discard: 4}\n"
    found = results.build(*ab({"native": (2.0,), "patched": (1.0,), "slow": (4.0,)}, more=short))
    assert found["gate"]["slow"]["green"]
    slow = cell(found, "slow")
    assert (slow["updates"], slow["discarded"], slow["completed_steps"]) == (6, 4, 6)
    assert slow["samples_per_second"]["repeats"] == [pytest.approx(16 / 13.0)]  # updates of 9 and of 4 s


def test_the_profiled_update_says_how_busy_the_gpu_is(ab):
    recipe, runs = ab()
    _profiled(Path(runs[0].folder) / "steps.jsonl", 0.2)
    native = cell(results.build(recipe, runs), "native")
    assert native["busy_share"] == 0.75  # of a step of 2 s
    assert native["communication_seconds"] is None  # one rank has nobody to talk to


def test_the_rank_that_communicates_most_says_for_how_long(ab):
    recipe, runs = ab()
    folder = Path(runs[0].folder)
    (folder / "steps.jsonl").unlink()
    for rank, seconds in enumerate((0.2, 0.4)):
        _write(folder, [9.0] * 5 + [2.0] * 2, rank=rank, world=2)
        _profiled(folder / f"steps.jsonl.rank{rank}", seconds)
    native = cell(results.build(recipe, runs[:1]), "native")
    assert (native["communication_seconds"], native["exposed_communication_seconds"]) == (0.4, 0.1)
    assert (native["world_size"], native["global_batch"], native["tflops"]) == (2, 16, 0.5 * 8 / 2)


def _profiled(file, communication):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    seen = {"busy_seconds": 1.5, "exposed_communication_seconds": 0.1}
    lines[4]["profile"] = {**seen, "communication_seconds": communication}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_the_recorder_could_not_look_at_withholds_nothing(ab):
    blind = {**OURS[0], "site": "step_recorder/record_profile", "fallbacks": 1, "last_fallback": "no CUPTI"}
    assert cell(results.build(*ab(sites=[*OURS, blind])), "patched")["withheld"] == []
    assert cell(results.build(*ab(sites=[blind])), "patched")["withheld"][0].startswith("nothing of ours ran")
