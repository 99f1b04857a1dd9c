"""The README's table comes from results files, cell by cell."""

import json
from pathlib import Path

import pytest

from somaspeed_patch import testing_ab_page as made
from somaspeed_patch.ab import summary, table, versus


def lines(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_the_rows_are_those_of_the_whole_table():
    results = made.step()
    header, _, *rows = lines(summary.summary([results]))
    whole = {tuple(row[:2]): row for row in table.rows(results)[1:]}
    columns = [table.rows(results)[0].index(name) for name in header]
    assert header[-2:] == ["equal batch", "best batch"] and "step, ms" not in header
    for row in rows:
        assert row == [whole[tuple(row[:2])][column] for column in columns]
    arms = [row[0] for row in rows]
    assert arms.count("patched_compiled") == 1 and not set(arms) & set(results["recipe"]["ablations"])
    best = results["comparison"]["best_native"]
    assert [best["arm"], str(best["batch"])] in [row[:2] for row in rows]


def test_the_caption_says_where_and_when():
    results = made.step()
    assert summary.summary([results]).splitlines()[0] == (
        f"**{results['recipe']['description']}**: {results['machine']['devices'][0]}, "
        f"{results['date'][:10]}, commit {results['commit'][:7]}, 3 repeats"
    )


def test_the_caption_counts_repeats_that_were_finished():
    results = made.step()
    for cell in results["cells"]:
        cell["repeats"] -= cell["arm"] == "patched_compiled"
    assert summary.summary([results]).splitlines()[0].endswith(", 2 to 3 repeats")


def test_this_repositorys_readme_is_made_of_its_results():
    root = Path(__file__).parents[1]
    files = [root / f"docs/results/2026-11-30-h200/{model}.json" for model in ("pi05", "molmoact2", "groot")]
    made_of, readme = summary.summary([versus.read(file) for file in files]), (root / "README.md").read_text()
    assert summary.replaced(readme, made_of) == readme


def test_only_what_stands_between_the_markers_changes(tmp_path):
    readme, file = tmp_path / "README.md", tmp_path / "results.json"
    readme.write_text("a\n<!-- results -->\nold\n<!-- /results -->\nb\n")
    file.write_text(json.dumps(made.step()))
    assert summary.main([str(readme), str(file)]) == 0
    text = readme.read_text()
    assert text.startswith("a\n<!-- results -->\n**") and text.endswith("|\n<!-- /results -->\nb\n")
    assert "old" not in text
    assert summary.main([str(readme), str(file)]) == 0 and readme.read_text() == text


@pytest.mark.parametrize("text", ["", "<!-- results -->", "<!-- /results --> <!-- results -->"])
def test_a_file_without_markers_is_refused(text):
    with pytest.raises(ValueError, match="expected a line <!-- results -->"):
        summary.replaced(text, "new")
