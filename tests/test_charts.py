"""Charts and their numbers: a reference line, points over two numbers, one style per name, names that can be read."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specgen.experiments.study_tables import _ACCURACY
from specgen.report import display, page
from specgen.report.charts import DRAFT_LENGTHS, STYLES, Bars, Lines, Point, quarters, styles_of, svg
from specgen.report.display import ratio

SVG = "{http://www.w3.org/2000/svg}"


CSS = (Path(page.__file__).parent / "page.css").read_text()


COLOURS = [*STYLES, "ink", "soft"]


def drawn(chart):
    return ElementTree.fromstring(str(svg(chart)).replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" ', 1))


def speedups(lines, **other):
    chart = {"title": "Speed-up", "label": "batch", "ticks": quarters(2), "show": ratio, "named": True}
    return Lines(**chart, lines=lines, **other)


def line(*numbers):
    return [
        Point(name=str(at), number=number, interval=(0.9 * number, 1.1 * number))
        for at, number in enumerate(numbers)
    ]


def heights(chart):
    """y of the axis at each tick."""
    return {
        text.text: float(text.get("y")) - 4
        for text in chart.iter(f"{SVG}text")
        if text.get("text-anchor") == "end"
    }


def test_a_reference_is_a_line_at_its_value():
    chart = drawn(speedups({"4": line(1.2, 1.5)}, reference=1.0))
    (mark,) = (path.get("d") for path in chart.iter(f"{SVG}path") if path.get("class") == "reference")
    assert float(re.match(r"M48 ([\d.]+)h", mark)[1]) == pytest.approx(heights(chart)["1"], abs=0.1)
    bars = Bars(title="", ticks=quarters(2), show=ratio, points=line(1.5), reference=1.0)
    (mark,) = (path.get("d") for path in drawn(bars).iter(f"{SVG}path") if path.get("class") == "reference")
    assert mark.startswith("M200.0 0V")  # the middle of 0 to 2
    assert "reference" not in str(svg(speedups({"4": line(1.2)})))


def test_one_name_has_one_style_in_every_chart():
    few, many = (speedups({k: line(1.0) for k in names}, order=DRAFT_LENGTHS) for names in ("04", "01234"))
    assert few.styles["4"] == many.styles["4"] == "fifth"
    assert len(set(styles_of(DRAFT_LENGTHS, DRAFT_LENGTHS).values())) == len(DRAFT_LENGTHS) == len(STYLES)
    assert styles_of(["b", "x"], ["a", "b"]) == {"b": "second", "x": "third"}


@pytest.mark.parametrize("name", ["4", "draft loop", "a name that goes on and on"])
def test_names_at_the_ends_of_lines_fit_on_a_phone(name):
    root = drawn(speedups({name: line(1.2, 1.5), "0": line(1.0, 1.0)}))
    ends = [text for text in root.iter(f"{SVG}text") if "end" in text.get("class").split()]
    assert len(ends) == 2
    wide = 13 * 0.56  # of 13 px, the largest
    assert all(float(text.get("x")) + wide * len(text.text) <= 400 for text in ends)
    dots = [float(dot.get("cx")) for dot in root.iter(f"{SVG}circle")]
    assert max(dots) < min(float(text.get("x")) for text in ends)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["card", "paper"])
def test_names_and_marks_can_be_read(scheme, ground):
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})\b", light if scheme == "light" else dark))
    assert set(COLOURS) <= set(colours)
    faint = {name: _contrast(colours[name], colours[ground]) for name in COLOURS}
    assert {name: found for name, found in faint.items() if found < 4.5} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_coloured_tokens_can_be_read(scheme):
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})\b", light if scheme == "light" else dark))
    shares = [
        float(share) for share in re.findall(r"\.d\d .*rgb\(from var\(--good\) r g b / ([.\d]+)\)", CSS)
    ]
    assert len(shares) == 8
    assert shares == sorted(set(shares)), "a later draft is darker"
    grounds = [colours["wrong"], colours["bonus"], colours["mark"]]
    grounds += [_mixed(colours["good"], colours["card"], share) for share in shares]
    assert [ground for ground in grounds if _contrast(colours["ink"], ground) < 4.5] == []


def _mixed(above, below, share):
    parts = [(int(above[at : at + 2], 16), int(_long(below)[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


def _long(colour):
    return colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])


def _contrast(one, other):
    """Of two colours, as WCAG 2 defines it."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour):
    parts = [int(_long(colour)[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("show", "text"),
    [
        (display.count, "0"),
        (display.plain, "0.00"),
        (display.rate, "0.0"),
        (display.percent, "0.0 %"),
        (display.hundredths, "0.0"),
        (display.ratio, "0.00x"),
    ],
)
def test_nothing_is_below_nothing(show: display.Show, text: str) -> None:
    """The end of an interval that rounds to zero has no sign."""
    assert show(-1e-9) == show(0.0) == text
    assert show(-1.0).startswith("-1")


def test_nor_is_it_as_a_difference() -> None:
    show = next(column.show for column in _ACCURACY if column.name == "difference")
    assert [show(share) for share in (-1e-9, 0.0, -0.01, 0.01)] == ["+0.0", "+0.0", "-1.0", "+1.0"]
