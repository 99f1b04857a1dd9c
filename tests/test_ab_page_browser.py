"""The page of `somaspeed ab` in a real browser, on a phone and on a desk, light and dark."""

import base64
import io
import shutil

import pytest
from PIL import Image

from somaspeed_patch import testing_ab_page as made
from somaspeed_patch.ab_page import page

pytest.importorskip("matplotlib", reason="the page needs the extra ab")
selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium")

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE, DESK = (360, 740), (1280, 900)
PAGES = {"both": [made.step(), made.trainer()], "hostile": [made.hostile()]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium.webdriver.chrome.service import Service

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(f"needs chromium and chromedriver, found {chromium} and {driver}")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = selenium.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, results in PAGES.items():
        page.write(results, folder / f"{name}.html", made.HOSTILE if name == "hostile" else "somaspeed ab")
    return folder


@pytest.fixture
def shown(browser, files):
    """Opens a page at a size in a scheme; gives the browser."""

    def opened(name, size, scheme="light"):
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get((files / f"{name}.html").as_uri())
        return browser

    return opened


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_fits_its_window_and_logs_nothing(shown, name, size):
    browser = shown(name, size)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.execute_script("return window.innerWidth") == size[0]
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= size[0]
    outside = browser.execute_script(
        "return [...document.querySelectorAll('p, li, h1, h2, h3, figure, dd, summary, caption div')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll')).length"
    )
    assert outside == 0
    assert browser.get_log("browser") == []


@pytest.mark.parametrize(("size", "width"), [(PHONE, 340), (DESK, 720)], ids=["phone", "desk"])
def test_only_the_drawing_for_the_width_is_seen_and_its_text_is_readable(shown, size, width):
    browser = shown("both", size)
    seen = browser.execute_script(
        "return [...document.querySelectorAll('figure svg')].filter(e => e.getClientRects().length)"
        ".map(e => [+e.getAttribute('width'), e.getBoundingClientRect().width])"
    )
    assert len(seen) == 6 and {found[0] for found in seen} == {width}
    smallest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('figure svg text')]"
        ".filter(e => e.getClientRects().length).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest * seen[0][1] / width >= 10.5
    beyond = browser.execute_script(
        "return [...document.querySelectorAll('figure svg text')].filter(e => e.getClientRects().length)"
        ".map(e => [e.textContent, e.getBoundingClientRect(), e.closest('svg').getBoundingClientRect()])"
        ".filter(([, t, s]) => t.right > s.right + 2 || t.left < s.left - 12).map(([words]) => words)"
    )
    assert beyond == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_chart_is_drawn_in_the_colours_of_the_scheme(shown, size, scheme):
    browser = shown("both", size, scheme)
    browser.execute_script("document.querySelector('figure').scrollIntoView()")
    image = Image.open(io.BytesIO(base64.b64decode(browser.get_screenshot_as_base64()))).convert("RGB")
    colors = {color: count for count, color in image.getcolors(2**24)}
    paper, ours = {"light": ((255, 255, 255), (0, 114, 178)), "dark": ((21, 24, 28), (74, 163, 223))}[scheme]
    assert len(colors) > 100
    assert max(colors, key=colors.get) == paper
    assert colors[ours] > 2000  # the bars of patched arms
    other = ((21, 24, 28), (74, 163, 223)) if scheme == "light" else ((255, 255, 255), (0, 114, 178))
    assert colors.get(other[1], 0) == 0


def test_the_keyboard_reaches_everything_in_order_and_one_sees_where_it_is(shown):
    from selenium.webdriver.common.keys import Keys

    browser = shown("both", PHONE)
    expected = browser.execute_script(
        "window.at = [...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')];"
        "return window.at.filter(e => e.checkVisibility()).map(e => window.at.indexOf(e))"
    )
    visited, outlines = [], []
    for _ in expected:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        index, style, width, seen = browser.execute_script(
            "const e = document.activeElement, s = getComputedStyle(e);"
            "const r = e.getBoundingClientRect();"
            "return [window.at.indexOf(e), s.outlineStyle, parseFloat(s.outlineWidth),"
            " r.top < innerHeight && r.bottom > 0 && r.left >= 0]"
        )
        visited.append(index)
        outlines.append((style, width >= 2, seen))
    assert len(expected) > 15 and visited == expected
    assert set(outlines) == {("solid", True, True)}
    tags = [browser.execute_script(f"return window.at[{i}].tagName") for i in visited[:4]]
    assert tags == ["A", "A", "A", "SUMMARY"]


def test_a_fold_opens_by_keyboard_and_its_table_scrolls(shown):
    from selenium.webdriver.common.keys import Keys

    browser = shown("both", PHONE)
    fold = browser.find_element("xpath", "//summary[contains(., 'every repeat')]")
    browser.execute_script("arguments[0].focus()", fold)
    fold.send_keys(Keys.ENTER)
    region = browser.find_element("xpath", "//details[@open]//div[@role='region']")
    assert region.is_displayed()
    width, inner = browser.execute_script(
        "return [arguments[0].clientWidth, arguments[0].scrollWidth]", region
    )
    assert inner > width and width <= 360


def accessible(browser):
    """The names of all that a screen reader finds, by role."""
    names = {}
    for node in browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]:
        if not node["ignored"]:
            names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    return names


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_every_image_table_and_region_has_a_name_for_who_cannot_see_it(shown, size):
    from selenium.webdriver.support.ui import WebDriverWait

    browser = shown("both", size)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    tables = browser.execute_script("return document.querySelectorAll('table').length")
    # What opened is in the tree a moment later, on a busy machine a long one.
    WebDriverWait(browser, 30).until(lambda page: len(accessible(page)["table"]) == tables)
    names = accessible(browser)
    images = [name for role in ("image", "img") for name in names.get(role, [])]
    assert len(images) == 6 and all(images)
    assert all(names["table"])
    assert all(names["region"]) and len(names["main"]) == 1
    assert names["heading"][:2] == ["somaspeed ab", "pi0.5, expert only, full size, one H200"]


def test_on_paper_it_is_light_whole_and_wide(shown):
    browser = shown("both", PHONE, "dark")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    )
    found = browser.execute_script(
        "const seen = s => [...document.querySelectorAll(s)].filter(e => e.checkVisibility()).length;"
        "return [getComputedStyle(document.body).backgroundColor, seen('.wide'), seen('.narrow'),"
        " [...document.querySelectorAll('details table')].filter(e => e.getClientRects().length).length,"
        " document.querySelectorAll('details table').length]"
    )
    assert found[:3] == ["rgb(255, 255, 255)", 6, 0]
    assert found[3] == found[4] > 2
