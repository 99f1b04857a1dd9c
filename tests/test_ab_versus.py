"""Two results side by side, and the check that fails where a ratio drops."""

import json
import subprocess
import sys

import pytest

from somaspeed_patch import testing_ab_page
from somaspeed_patch.ab import versus


@pytest.fixture
def files(tmp_path):
    """Writes two results, the second as `change` makes it; gives their paths."""

    def files(change=lambda found: None, make=testing_ab_page.trainer):
        paths = tmp_path / "old.json", tmp_path / "new.json"
        for path in paths:
            found = make()
            if path.stem == "new":
                change(found)
            path.write_text(json.dumps(found))
        return paths

    return files


def test_equal_results_keep_every_claim(files):
    old, new = map(versus.read, files())
    assert versus.claims(old) == versus.claims(new) != {}
    assert versus.dropped(old, new, 0.0) == [] == versus.differences(old, new)


def _halve(found):
    for arm in found["comparison"]["arms"].values():
        for one in arm["equal_batch"]:
            one["ratio"] /= 2


def test_a_ratio_that_drops_is_named_with_both_values(files):
    old, new = map(versus.read, files(_halve))
    (arm, kind, batch), was = next(item for item in versus.claims(old).items() if item[0][1] == "equal_batch")
    (said,) = [line for line in versus.dropped(old, new, 0.05) if line.startswith(f"{arm}, equal")]
    assert f"{was / 2:.2f}x, was {was:.2f}x" in said
    assert versus.dropped(old, new, 0.5) == []
    rows = {line[0]: line[1:] for line in versus.lines(old, new)}
    at = "" if batch is None else f" {batch}"
    assert rows[f"{arm}, equal batch{at}"] == (f"{was:.2f}", f"{was / 2:.2f}", "0.500")


def test_a_claim_that_is_withheld_now_is_a_drop_and_says_why(files):
    def withhold(found):
        for arm in found["comparison"]["arms"].values():
            arm.update(equal_batch=[], best_batch=None, withheld=["a/b fell back"])

    old, new = map(versus.read, files(withhold))
    drops = versus.dropped(old, new, 0.05)
    assert len(drops) == len(versus.claims(old)) and all("no claim, was" in drop for drop in drops)
    assert all("a/b fell back" in drop for drop in drops)


def test_what_else_differs_is_said(files):
    def move(found):
        found["commit"] = "other"
        found["machine"]["cores"] = 999
        found["versions"]["torch"] = "9"

    old, new = map(versus.read, files(move))
    said = versus.differences(old, new)
    assert any(line.startswith("commit: ") and line.endswith("-> other") for line in said)
    assert any(line.endswith("-> 999") for line in said) and any(line.startswith("torch: ") for line in said)


def test_best_batches_are_one_claim_whatever_the_batch(files):
    old, new = map(versus.read, files(make=testing_ab_page.step))
    assert any(kind == "best_batch" and batch is None for _, kind, batch in versus.claims(old))
    assert versus.dropped(old, new, 0.0) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}'])
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}: expected a results.json of somaspeed ab"):
        versus.read(path)


def ab(*words):
    command = [sys.executable, "-m", "somaspeed_patch", "ab", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_exit_code_is_for_a_ci_job(files):
    old, new = files(_halve)
    assert ab("--compare", old, new).returncode == 0
    done = ab("--compare", old, new, "--check")
    assert done.returncode == 4 and "DROPPED" in done.stdout
    assert ab("--compare", old, new, "--check", "--allow", "0.6").returncode == 0


def test_one_thing_at_a_time(files):
    old, new = files()
    done = ab("pi05_libero_tiny", "--compare", old, new)
    assert done.returncode == 2 and "expected a recipe, or --compare" in done.stderr
    assert ab().returncode == 2
