"""Charts as SVG inside HTML: what every kind of chart shares. About 0.1 s a chart.

A drawing is made twice, WIDE and NARROW css px across, at one unit of the SVG a px. Colours are sentinels
that become CSS variables of the page, so that one drawing serves light, dark and print. Text stays text and
has no font of its own. Ids get a prefix, because all drawings share one document; those nobody refers to go.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from somaspeed_patch.ab.figures import Shown, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 720, 340
SIZE = 13  # px of every text: a phone of 360 px shows it at 12.5
_ADVANCE = 0.58  # mean width of a character over SIZE, system fonts, rounded up

# Sentinels, and what the page's style sheet calls them. Okabe and Ito's colours are the fallbacks.
TEXT, MUTED, RULE, PAGE = "#010203", "#010204", "#010205", "#010206"
NATIVE, NATIVE_LINE, OURS, LOSS = "#010207", "#010208", "#010209", "#01020a"
SERIES = tuple(f"#0103{index:02x}" for index in range(6))
_STYLES = {
    TEXT: "currentColor",
    MUTED: "var(--muted, #5a636e)",
    RULE: "var(--rule, #d9dde2)",
    PAGE: "var(--page, #fff)",
    NATIVE: "var(--native, #d5d9de)",
    NATIVE_LINE: "var(--native-line, #66707c)",
    OURS: "var(--ours, #0072b2)",
    LOSS: "var(--loss, #d55e00)",
    **{
        sentinel: f"var(--series-{index}, {color})"
        for index, (sentinel, color) in enumerate(
            zip(SERIES, ("#e69f00", "#cc79a7", "#56b4e9", "#0072b2", "#009e73", "#d55e00"), strict=True)
        )
    },
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart in both widths, for the page."""

    title: str
    """its name"""
    description: str
    """its figures in words"""
    wide: str
    """SVG for screens from 760 px"""
    narrow: str
    """SVG for phones"""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """An empty drawing and a layer in px, x to the right and y down."""

    figure: Figure
    """the drawing"""
    layer: Axes
    """spans all of it"""
    width: int
    """px"""
    height: int
    """px"""

    @property
    def narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width == NARROW

    def text(self, x: float, y: float, words: str | Shown, **style: Any) -> None:
        """Write at a point; a figure carries its value."""
        write(self.layer, x, y, words, **style)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place in px, with nothing but a light vertical grid."""
        place = (left / self.width, 1 - (top + height) / self.height, width / self.width)
        axes = self.figure.add_axes((*place, height / self.height), facecolor="none")
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, labelsize=SIZE - 1, colors=MUTED, pad=4)
        axes.set_axisbelow(True)
        return axes


def sheet(width: int, height: int) -> Sheet:
    """An empty drawing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
    layer = figure.add_axes((0, 0, 1, 1), facecolor="none", zorder=5)
    layer.set_xlim(0, width)
    layer.set_ylim(height, 0)
    layer.set_axis_off()
    return Sheet(figure=figure, layer=layer, width=width, height=height)


def write(axes: Axes, x: float, y: float, words: str | Shown, **style: Any) -> None:
    """Text in an axes' coordinates, at its middle line; dollar signs are no mathematics."""
    style = {"color": TEXT, "fontsize": SIZE, "va": "center_baseline", **style}
    gid = marked(words.value, derived=words.derived) if isinstance(words, Shown) else None
    axes.text(x, y, " ".join(str(words).split()), parse_math=False, clip_on=False, gid=gid, **style)


def marked(value: Value, *, derived: bool = False) -> str:
    """The gid of an artist that shows this value; `data-value` in the page."""
    return f"{'derived' if derived else 'value'}:{value!r}"


def text_width(words: str, size: float = SIZE) -> float:
    """About how many px the words take."""
    return len(words) * size * _ADVANCE


def fitted(words: str, width: float, *, end: str = "") -> str:
    """Words cut to a width in px, with dots where something is left out; `end` is always kept."""
    room = int(width / (SIZE * _ADVANCE)) - len(end)
    return (words if len(words) <= room else words[: max(room - 3, 1)].rstrip() + "...") + end


def wrapped(words: str, width: float, lines: int) -> list[str]:
    """Words over at most so many lines of a width in px, the last one cut."""
    import textwrap

    room = max(int(width / (SIZE * _ADVANCE)), 8)
    return textwrap.wrap(words, room, max_lines=lines, placeholder="...")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a legend."""

    words: str
    """what it means"""
    style: dict[str, Any]
    """of a patch, or of a line where it has a `linestyle`"""


def legend(on: Sheet, keys: Sequence[Key], *, draw: bool = True) -> int:
    """The keys in a row from the top, wrapped; returns the height they take, in px."""
    x, y = 0.0, 10.0
    for key in keys:
        wide = 30 + text_width(key.words)
        if x and x + wide > on.width:
            x, y = 0.0, y + 22
        if draw:
            _sample(on, x, y, key.style)
            on.text(x + 26, y, key.words)
        x += wide + 12
    return int(y + 20)


def _sample(on: Sheet, x: float, y: float, style: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    if "linestyle" in style:
        ends = style.get("marker") == "|"
        on.layer.add_line(
            Line2D([x + 1, x + 10, x + 19], [y] * 3, markevery=[0, 2] if ends else [1], **style)
        )
    else:
        on.layer.add_patch(Rectangle((x + 1, y - 6), 18, 12, **style))


def numbers_axis(axes: Axes, limit: float, *, ticks: int) -> None:
    """From zero to `limit` with round steps, a light grid, and no more than `ticks` labels."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, limit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x", color=RULE, linewidth=1)


def both(draw: Callable[[int], Sheet], *, prefix: str, title: str, description: str) -> Chart:
    """Draw at both widths.

    Args:
        draw: makes the drawing for a width in px.
        prefix: of all ids, unique in the page.
        title: its name.
        description: its figures in words.
    """
    found = []
    for width in (WIDE, NARROW):
        with _settings():
            svg = _svg(draw(width))
        found.append(_inline(svg, f"{prefix}-{'w' if width == WIDE else 'n'}", title, description))
    return Chart(title=title, description=description, wide=found[0], narrow=found[1])


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's settings that no artist takes, put back afterwards; whatever the user's own file says."""
    import matplotlib

    ours: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "somaspeed",
        "hatch.linewidth": 1.0,
        "path.simplify": False,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(ours)
        yield


def _svg(drawn: Sheet) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    canvas: Any = FigureCanvasSVG(drawn.figure)  # its print_svg has no types
    canvas.print_svg(out, metadata={"Date": None, "Creator": None})
    return out.getvalue()


_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"font-family:[^;]*;?\s*")


def _inline(svg: str, prefix: str, title: str, description: str) -> str:
    """matplotlib's document as an element of ours: no name spaces, metadata, fonts or spare ids."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items()}
        element.text, element.tail = _tight(element, element.text), None
    root[:] = [child for child in root if child.tag != "metadata"]
    for parent in root.iter():
        parent[:] = [child for child in parent if child.tag != "style"]
    used = {name for element in root.iter() for name in _references(element)}
    for element in root.iter():
        _rename(element, used, prefix)
        _colour(element)
    _head(root, prefix, title, description)
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _tight(element: ElementTree.Element, text: str | None) -> str | None:
    return text if element.tag == "text" else None


def _references(element: ElementTree.Element) -> list[str]:
    found = _REFERENCE.findall(" ".join(element.attrib.values()))
    return found + [element.get("href", "").removeprefix("#")]


def _rename(element: ElementTree.Element, used: set[str], prefix: str) -> None:
    name = element.attrib.pop("id", None)
    if name is not None and name in used:
        element.set("id", f"{prefix}-{name}")
    kind, _, value = (name or "").partition(":")
    if kind in ("value", "derived"):
        element.set("data-value", value)
        element.attrib.update({"data-derived": ""} if kind == "derived" else {})
    if "href" in element.attrib:
        element.set("href", f"#{prefix}-{element.attrib['href'].removeprefix('#')}")
    for key in ("style", "clip-path"):
        if key in element.attrib:
            element.set(key, _REFERENCE.sub(rf"url(#{prefix}-\1)", element.attrib[key]))


def _colour(element: ElementTree.Element) -> None:
    """Sentinels to variables, in `style` alone: an attribute takes none everywhere."""
    if "fill" in element.attrib:
        element.set("style", f"fill: {element.attrib.pop('fill')}")
    style = _FONT.sub("", element.get("style", ""))
    for sentinel, name in _STYLES.items():
        style = style.replace(sentinel, name)
    if style:
        element.set("style", style)
    if "d" in element.attrib:
        element.set("d", " ".join(element.attrib["d"].split()))


def _head(root: ElementTree.Element, prefix: str, title: str, description: str) -> None:
    """Size, role and name."""
    _, _, width, height = root.attrib["viewBox"].split()
    names = {"role": "img", "aria-labelledby": f"{prefix}-title", "aria-describedby": f"{prefix}-desc"}
    root.attrib = {"viewBox": root.attrib["viewBox"], "width": width, "height": height, **names}
    for index, (tag, words) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(tag, {"id": f"{prefix}-{tag}"})
        child.text = " ".join(words.split())
        root.insert(index, child)


def finite(values: Sequence[Value]) -> list[float]:
    """As numbers, without those that are none."""
    return [number for number in map(float, values) if math.isfinite(number)]
