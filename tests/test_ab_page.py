"""The page of `somaspeed ab`: what its HTML says, parsed; test_ab_page_browser.py looks at it."""

import copy
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from somaspeed_patch import testing_ab_page as made
from somaspeed_patch.ab import figures, words
from somaspeed_patch.ab.ablations import ablations
from somaspeed_patch.ab_page import page

pytest.importorskip("matplotlib", reason="the page needs the extra ab")

VOID = {"meta", "link", "wbr", "br", "input", "img"}


class Element:
    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent, self.children = tag, dict(attributes), parent, []

    @property
    def text(self):
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def walk(self):
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag):
        return [found for found in self.walk() if found.tag == tag]

    def one(self, tag, words):
        """The only element of that tag whose text begins so."""
        (found,) = (found for found in self.all(tag) if found.text.strip().startswith(words))
        return found


class Tree(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.root = self.at = Element("root", [], None)
        self.feed(text)
        assert self.at is self.root, f"<{self.at.tag}> is never closed"

    def handle_starttag(self, tag, attrs):
        found = Element(tag, attrs, self.at)
        self.at.children.append(found)
        self.at = self.at if tag in VOID else found

    def handle_startendtag(self, tag, attrs):
        self.at.children.append(Element(tag, attrs, self.at))

    def handle_endtag(self, tag):
        assert self.at.tag == tag, f"</{tag}> closes <{self.at.tag}>"
        self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)


@pytest.fixture(scope="module")
def results():
    return [made.step(), made.trainer()]


@pytest.fixture(scope="module")
def html(results):
    return page.render(results, "somaspeed ab")


@pytest.fixture(scope="module")
def tree(html):
    return Tree(html).root


@pytest.fixture(scope="module")
def hostile():
    return Tree(page.render([made.hostile()], made.HOSTILE)).root


def numbers(value):
    """Every number of a JSON value, and words that stand for one."""
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [value] if is_number or value in ("nan", "inf", "-inf") else []


def rounds_to(text, value):
    """Whether the text is the value, as such, in ms or in %, within half a unit of its last digit."""
    mantissa = re.match(r"[-+]?(\d+\.?(\d*)(?:e([-+]\d+))?|nan|inf)", text)
    if not math.isfinite(float(value)):
        return mantissa[0] == str(value)
    half = 0.5 * 10.0 ** (int(mantissa[3] or 0) - len(mantissa[2])) * (1 + 1e-9)
    return any(abs(float(mantissa[0]) - float(value) * scale) <= half for scale in (1, 1e3, 1e2))


def test_every_figure_is_one_of_the_json_rounded(tree, results):
    known = {repr(number) for number in numbers(json.loads(json.dumps(results)))}
    shown = [element for element in tree.walk() if "data-value" in element.attributes]
    stated = [element for element in shown if "data-derived" not in element.attributes]
    assert len(stated) > 900
    assert [e.attributes["data-value"] for e in stated if e.attributes["data-value"] not in known] == []
    wrong = [e.text for e in shown if e.text and not rounds_to(e.text, float(e.attributes["data-value"]))]
    assert wrong == []


def test_every_figure_of_every_cell_is_on_the_page(tree, results):
    keys = (
        "samples_per_second", "step_seconds", "setup_seconds", "phase_seconds", "peak_allocated_gib",
        "busy_share", "mfu", "tflops", "tflop_per_sample", "repeats", "loader",
    )  # fmt: skip
    sections = [found for found in tree.all("section") if found.attributes.get("class") == "results"]
    for one, section in zip(results, sections, strict=True):
        outside = [e for table in section.all("table") for e in table.walk()]
        shown = {e.attributes["data-value"] for e in outside if "data-value" in e.attributes}
        for cell in one["cells"]:
            expected = {repr(number) for key in keys for number in numbers(cell.get(key))}
            assert expected <= shown, cell["arm"]


def test_a_cells_row_has_its_own_figures_in_order(tree, results):
    table = next(t for t in tree.all("table") if t.text.strip().startswith("Medians over the repeats"))
    rows = table.all("tbody")[0].all("tr")
    for cell, row in zip(results[0]["cells"], rows, strict=True):
        speed, step = cell.get("samples_per_second"), cell.get("step_seconds")
        expected = [cell["batch"]]
        expected += [speed["median"], speed["p20"], speed["p80"], step["median"]] if speed else []
        others = ("peak_allocated_gib", "busy_share", "mfu", "tflops", "repeats")
        expected += [cell[key] for key in others if cell[key] is not None]
        shown = [e.attributes["data-value"] for e in row.walk() if "data-value" in e.attributes]
        assert row.all("th")[0].text == cell["arm"]
        assert shown == [repr(value) for value in expected]


def bars(svg):
    """Value and length of each bar."""
    found = []
    for group in svg.all("g"):
        paths = [c for c in group.children if isinstance(c, Element) and c.tag == "path"]
        if "data-value" in group.attributes and len(paths) == 1:
            xs = [float(x) for x in re.findall(r"[ML] (\S+) \S+", paths[0].attributes["d"])]
            found.append((float(group.attributes["data-value"]), max(xs) - min(xs)))
    return found


@pytest.mark.parametrize("title", ["Samples a second", "Milliseconds of a step", "What each feature"])
def test_bars_are_as_long_as_their_values(tree, title):
    drawings = [svg for svg in tree.all("svg") if svg.all("title")[0].text.startswith(title)]
    assert len(drawings) in (2, 4)
    for svg in drawings:
        found = bars(svg)
        scale = max(length / value for value, length in found)
        assert len(found) >= 2 and all(
            length == pytest.approx(value * scale, rel=1e-4) for value, length in found
        )


def test_both_widths_of_a_chart_say_the_same_and_name_themselves(tree):
    for figure in tree.all("figure"):
        wide, narrow = figure.all("svg")
        assert (wide.attributes["width"], narrow.attributes["width"]) == ("720", "340")
        values = [
            {e.attributes["data-value"] for e in svg.walk() if "data-value" in e.attributes and not e.text}
            for svg in (wide, narrow)
        ]
        assert values[0] == values[1]
        for svg in (wide, narrow):
            named = {e.attributes.get("id"): e.text for e in svg.walk()}
            assert svg.attributes["role"] == "img"
            assert named[svg.attributes["aria-labelledby"]] and named[svg.attributes["aria-describedby"]]


def test_the_speed_chart_describes_its_figures_and_its_gaps(tree):
    said = tree.all("desc")[0].text
    assert "native, batch 64: failed: out of memory" in said
    assert "patched_padded, batch 32: withheld: fallback: pi05/split_attention fell back" in said
    assert re.search(r"patched, batch 256: 157\.\d samples/s, p20 157\.\d, p80 157\.\d", said)


def test_nothing_is_referred_to_outside_the_page(tree, html):
    assert "http:" not in html and "https:" not in html and "@import" not in html
    ids = [e.attributes["id"] for e in tree.walk() if "id" in e.attributes]
    assert len(ids) == len(set(ids)) > 50
    targets = [e.attributes[key] for e in tree.walk() for key in ("href", "src") if key in e.attributes]
    assert {t for t in targets if t != "data:," and t[1:] not in ids} == set()
    assert {name for name in re.findall(r"url\(([^)]*)\)", html) if name[1:] not in ids} == set()
    labels = [
        e.attributes[k] for e in tree.walk() for k in e.attributes if k.startswith("aria-") and k[-2:] == "by"
    ]
    assert set(labels) <= set(ids)
    assert not tree.all("script") and not re.search(r"\son\w+=", html)


def test_texts_of_the_json_stay_texts(hostile):
    assert not hostile.all("script") and not hostile.all("unknown")
    assert (
        hostile.all("h1")[0].text == hostile.all("h2")[0].text == hostile.all("title")[0].text == made.HOSTILE
    )
    tags = {e.tag for e in hostile.walk() if made.HOSTILE in " ".join(e.text.split())}
    assert {"th", "td", "dd", "p", "desc", "caption"} <= tags
    labels = [e.text for e in hostile.all("text")]
    assert any(label.startswith("native <script>alert(") for label in labels)
    quoted = "somaspeed ab '" + made.HOSTILE.replace("'", "'\"'\"'") + "'"
    assert hostile.all("code")[0].text == quoted
    assert any(
        e.text == "nan" and e.attributes["data-value"] == "'nan'" for e in hostile.all("span") if e.attributes
    )


def test_headings_tables_and_regions_are_in_order(tree):
    levels = [int(e.tag[1]) for e in tree.walk() if re.fullmatch("h[1-6]", e.tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert tree.all("html")[0].attributes["lang"] == "en"
    assert len(tree.all("main")) == 1 and tree.all("a")[0].attributes["href"] == "#main"
    for table in tree.all("table"):
        wrapper = table.parent.attributes
        assert (wrapper["role"], wrapper["tabindex"]) == ("region", "0") and wrapper["aria-label"]
        assert table.all("caption")[0].text.strip()
        assert {th.attributes["scope"] for th in table.all("th")} == {"col", "row"}
        widths = {len([c for c in row.children if isinstance(c, Element)]) for row in table.all("tr")}
        assert len(widths) == 1


def test_provenance_can_be_run_again(tree):
    facts = {
        e.all("dt")[0].text: e.all("dd")[0].text
        for e in tree.all("div")
        if e.all("dt") and e.parent.tag == "dl"
    }
    assert facts["Command"] == "python -m somaspeed_patch ab pi05_libero_tiny"
    assert facts["Variables"] == "OMP_NUM_THREADS=1" and facts["Commit"] == "68922ad"
    assert tree.all("code")[0].text == "python -m somaspeed_patch ab pi05_libero --synthetic --budget 470"
    assert "NVIDIA H200, 139.8 GiB, driver 580.95.05" in tree.all("main")[0].text
    assert tree.one("table", "Links between the GPUs").all("td")[1].text == "NV18"


def test_the_page_is_the_same_in_another_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from somaspeed_patch import testing_ab_page as m\n"
        "from somaspeed_patch.ab_page import page\n"
        "page.write([m.trainer()], Path(sys.argv[1]), 'somaspeed ab')"
    )
    target = tmp_path / "page.html"
    target.write_text("older")
    subprocess.run([sys.executable, "-c", code, target], check=True)
    assert target.read_text(encoding="utf-8") == page.render([made.trainer()], "somaspeed ab")
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_the_older_page(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("older")
    with pytest.raises(ValueError, match=r"results\[0\]: expected schema 2, came 1: run somaspeed ab again"):
        page.write([{"schema": 1}], target, "title")
    assert target.read_text() == "older"


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(page.PageError, match=r"pip install 'somaspeed-patch\[ab\]'"):
        page.render([made.trainer()], "title")


def changed(**found):
    """The trainer's results with these figures in both ratios of `patched`."""
    results = copy.deepcopy(made.trainer())
    pair = {"against": "native", "ratio_by_repeat": [found["ratio"]], **found}
    results["comparison"]["arms"]["patched"] = {
        "equal_batch": [{"batch": 8, **pair}],
        "best_batch": {"batch": 64, "against_batch": 8, **pair},
        "withheld": [],
    }
    return results


def test_the_best_claim_comes_first_and_batches_are_not_mixed():
    found = words.findings(made.step())
    assert re.fullmatch(
        r"patched_compiled trains 2\.\d\dx as many samples a second as the best native arm, native_compiled "
        r"\(95 % interval 2\.\d\d to 2\.\d\d\); each at its best batch, 256 against 64",
        found[0],
    )
    assert found[1].startswith("patched_compiled trains 1.93x") and found[1].endswith("; both at batch 32")
    assert all(("best batch" in said) + ("both at" in said) <= 1 for said in found)


@pytest.mark.parametrize(
    ("figures_found", "expected"),
    [
        (
            {"ratio": 1.01, "low": 0.98, "high": 1.04},
            "No difference beyond the noise between patched and the",
        ),
        ({"ratio": 1.0, "low": 1.0, "high": 1.0}, "No difference beyond the noise between patched and the"),
        (
            {"ratio": 0.85, "low": 0.8, "high": 0.9},
            "patched is slower, it trains 0.85x as many samples a second",
        ),
        (
            {"ratio": 2.5, "low": None, "high": None},
            "No claim for patched: one repeat has no interval; in it",
        ),
        ({"ratio": 1.003, "low": 1.002, "high": 1.004}, "patched trains 1.003x as many samples a second as"),
    ],
)
def test_every_verdict_has_its_words(figures_found, expected):
    assert words.findings(changed(**figures_found))[0].startswith(expected)


def test_what_failed_or_was_withheld_is_no_claim():
    assert words.findings(made.trainer())[-1] == (
        "No claim for patched_compiled: run 1: exit code 1: no C++ compiler was found"
    )
    assert words.findings(made.hostile())[0] == (
        f"No claim for patched {made.HOSTILE}: the parity gate is red: {made.HOSTILE}"
    )
    alone = made.results("step", [made.cell("native", 8, None, failure="out of memory")], {"name": "r"}, {})
    assert words.findings(alone) == ["No claim: native failed: out of memory"]
    lonely = made.results("step", [made.cell("native", 8, 3.0)], {"name": "r"}, {})
    assert words.findings(lonely) == ["No claim: there was nothing to compare"]
    assert "No claim: there was nothing to compare." in page.render([lonely], "t")


def test_features_are_compared_with_the_arm_they_are_missing_from():
    found = ablations(made.step())
    assert [(one.feature, one.full["arm"], one.full["batch"]) for one in found] == [
        (feature, "patched", 32) for _, feature, _, _ in made._ABLATIONS
    ]
    full, without = (cell["samples_per_second"]["median"] for cell in (found[0].full, found[0].without))
    assert found[0].gain == full - without and full > without
    assert words.verdict(found[3].found) == words.SAME
    assert ablations(made.trainer()) == []


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (figures.plain(197.77311543), "197.8"),
        (figures.plain(9.996), "10.00"),
        (figures.plain(0.01234), "0.0123"),
        (figures.plain(0.0), "0"),
        (figures.milliseconds(0.2168), "216.8"),
        (figures.percent(0.3812), "38.1 %"),
        (figures.ratio(2.4999), "2.50x"),
        (figures.ratio(0.9996), "0.9996x"),
        (figures.ratio(1.0), "1.00x"),
        (figures.relative(3.14e-07), "3.1e-07"),
        (figures.loss("nan"), "nan"),
    ],
)
def test_figures_are_rounded_once(shown, text):
    assert str(shown) == text


def contrast(one, other):
    """WCAG 2's ratio of two colours in hex."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read_in_both_schemes():
    css = (files("somaspeed_patch.ab_page") / "page.css").read_text()
    light = dict(re.findall(r"(--[\w-]+): (#\w{6});", css.partition("@media")[0]))
    dark = light | dict(re.findall(r"(--[\w-]+): (#\w{6});", css.partition("@media")[2]))
    for scheme in (light, dark):
        for name in ("--text", "--muted", "--link"):
            assert min(contrast(scheme[name], scheme[back]) for back in ("--page", "--raised")) >= 4.5
        for name in ("--ours", "--native-line", "--loss"):
            assert contrast(scheme[name], scheme["--page"]) >= 3
