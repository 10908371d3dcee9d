"""The HTML report is well-formed and self-contained, escapes text, and draws the right charts, which can be read."""

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specgen.experiments.study_tables import _ACCURACY
from specgen.report import display
from specgen.report import page as page_module
from specgen.report.charts import STYLES, Bars, Lines, Point, lengths, svg, ticks_to
from specgen.report.display import percent, plain, ratio
from specgen.report.page import Page as Content
from specgen.report.report import Report
from specgen.report.table import Column, Table
from specgen.report.tables import curve, curves, page
from specgen.report.tables import of_run as parts_of_run
from specgen.report.terminal import render as in_terminal
from specgen.report.text_list import Entry, ShownText, Span, TextList
from tests.streams import as_json, decode_steps, fold, refusal, request

VOID = {"br", "input", "meta", "wbr"}
SVG = "{http://www.w3.org/2000/svg}"


def a_run(categories=("math", "chat"), num_spec_tokens=4):
    steps = [(num_spec_tokens, i % (num_spec_tokens + 1)) for i in range(20)]
    return as_json(
        itertools.chain(
            *(request(name, steps[i:], category=name, turn=i + 1) for i, name in enumerate(categories))
        ),
        num_spec_tokens,
    )


def of_several_lengths(*lengths):
    """A run of up to 7 drafts per step."""
    return as_json([*request("a", [(k, min(k, 2)) for k in lengths]), *decode_steps(*lengths)], 7)


def render(report, settings, title):
    return page(Report.from_json(report), settings, title)


def of_run(report, settings):
    return parts_of_run(Report.from_json(report), settings)


class Page(HTMLParser):
    """Checks that tags nest, and gathers text and attributes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def drawn(chart):
    return ElementTree.fromstring(
        str(svg(chart)).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    )


def charts_of(report):
    """Those on its page, by title."""
    tables = [part for part in of_run(report, {}) if isinstance(part, Table) and part.chart]
    return {table.title: table.chart for table in tables}


@pytest.mark.parametrize(("report", "least"), [(a_run(), 100), (of_several_lengths(4, 4, 2, 0), 50)])
def test_page_and_terminal_show_the_same_cells(report, least):
    tables = [part for part in of_run(report, {}) if isinstance(part, Table)]
    words = set(Page(render(report, {}, "A run")).text)
    lines = in_terminal(of_run(report, {}), 300)
    cells = [
        text
        for table in tables
        for row in table.rows
        for column in table.columns
        for text in (column.text(row), column.ends(row))
    ]
    assert len(cells) > least
    assert {cell for cell in cells if cell not in ("", "-")} <= words
    assert all(cell in lines for cell in cells)


def test_the_legend_names_the_curves_and_its_note_stands_below():
    point = [Point(name="0", number=0.5)]
    chart = curves("Curves", {"a, <b>": point, "c": point})
    table = Table(title="Acceptance", note="in %", columns=(), rows=(), lines=chart)
    text = Content(title="", settings={}, tables=[table]).to_html()
    words = [word.strip() for word in Page(text).text if word.strip()]
    assert words[words.index("Acceptance") + 1 :][:3] == ["a, <b>", "c", "in %"]
    entries = re.findall(r'<span class="entry"><i class="key (\w+)"></i>([^<]*)</span>', text)
    assert entries == [("first", "a, &lt;b&gt;"), ("second", "c")]
    assert re.search(r"</span>\s*<br>in %</small>", text)


def test_the_page_is_self_contained():
    text = render(a_run(), {}, "A run")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "srcset", "data"} & {name for name, _ in page.attributes}
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text
    assert 'content="width=device-width,initial-scale=1"' in text
    assert "prefers-color-scheme: dark" in text
    assert '<html lang="en">' in text


def test_charts_have_text_for_screen_readers():
    page = Page(render(a_run(), {}, "A run"))
    assert page.tags.count("svg") == page.attributes.count(("role", "img")) == 4
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) == len(set(labels))
    for start in (
        r"Acceptance by draft position: joint: 0 [\d.]+ % \[.*conditional: 0 ",
        r"Accepted drafts per step: 0 accepted ",
        r"By category: chat [\d.]+.*; math [\d.]+",
        r"By turn: 1 ",
    ):
        assert any(re.match(start, label) for label in labels), start


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (as_json([]), "No verify step had drafts"),
        (as_json(request("a", [])), "No verify step had drafts"),
        (as_json(refusal("a")), "1 errors"),
        (as_json(request("a", [(0, 0)] * 3), 0), "Plain decoding"),
        (as_json(request("a", [(4, 0)] * 30), 4), "Almost no draft was accepted"),
        (a_run(categories=("alone",)), "no interval (one conversation, or all alike)"),
        (a_run(num_spec_tokens=1), "category"),
        (a_run(num_spec_tokens=16), "turn"),
    ],
)
def test_odd_runs_are_shown(report, expected):
    for text in (" ".join(Page(render(report, {}, "A run")).text), in_terminal(of_run(report, {}), 300)):
        assert expected in text
        assert not {"None", "nan"} & set(text.split())
        assert ("acceptance length" in text) == (report["num_drafts"] > 0)


def test_only_what_is_wrong_is_an_alert():
    said = {}
    for k, steps in ((0, [(0, 0)]), (4, [(4, 0)] * 30)):
        html = render(as_json(request("a", steps), k), {}, "A run")
        said[k] = re.search(r'<p class="(\w+)">(Plain|Almost)', html).groups()
    assert said == {0: ("finding", "Plain"), 4: ("alert", "Almost")}
    groups = itertools.chain(request("a", [(0, 0)], category="x"), request("b", [(0, 0)]))
    report = as_json(groups, 0)
    assert set(report["categories"]) == {"(none)", "x"}
    assert "svg" not in Page(render(report, {}, "A run")).tags, "plain decoding has no chart"


def test_a_baseline_has_its_tile():
    run = fold(request("a", [(3, 3)] * 2), num_spec_tokens=3)
    report = run.with_baseline(
        fold(request("a", [(0, 0)] * 8), num_spec_tokens=0), [True, True, True, False]
    ).to_json()
    words = Page(render(report, {}, "A run")).text
    assert "3.00x" in words
    assert any(word.endswith("3 of 4 texts identical") for word in words)


@pytest.mark.parametrize(
    ("style", "rate", "interval"), [("first", "rate", "ci95"), ("second", "conditional", "conditional_ci95")]
)
def test_the_curves_are_at_the_rates(style, rate, interval):
    positions = a_run()["acceptance"]
    assert positions[1]["ci95"] != positions[1]["conditional_ci95"]
    chart = drawn(charts_of(a_run())["Acceptance by position"])
    height = {text.text: float(text.get("y")) for text in chart.iter(f"{SVG}text") if text.text.endswith("%")}
    (curve,) = (group for group in chart.iter(f"{SVG}g") if group.get("class") == style)
    marks = [float(mark.get("cy")) for mark in curve.iter(f"{SVG}circle")]
    zero, full = height["0 %"] - 4, height["100 %"] - 4
    expected = [zero + (full - zero) * row[rate] for row in positions]
    assert marks == pytest.approx(expected, abs=0.06)
    whiskers = [list(map(float, re.findall(r"[\d.]+", w.get("d"))))[1:] for w in curve.iter(f"{SVG}path")]
    ends = [end for whisker in whiskers for end in whisker]
    intervals = [zero + (full - zero) * end for row in positions for end in row[interval]]
    assert ends == pytest.approx(intervals, abs=0.06)


def test_a_position_that_no_step_reached_leaves_the_curve():
    report = as_json(request("a", [(2, 0), (2, 0)]))
    chart = drawn(charts_of(report)["Acceptance by position"])
    joint, conditional = (
        len(list(group.iter(f"{SVG}circle")))
        for style in ("first", "second")
        for group in chart.iter(f"{SVG}g")
        if group.get("class") == style
    )
    assert (joint, conditional) == (2, 1)


def test_each_level_of_confidence_has_a_bar_of_what_was_accepted():
    levels = (
        {"at_least": 0.0, "drafts": 40, "accepted": 20, "share": 0.5, "ci95": [0.4, 0.6]},
        {"at_least": 0.6, "drafts": 20, "accepted": 16, "share": 0.8, "ci95": [0.7, 0.9]},
    )
    report = {**a_run(), "confidence": {"levels": levels, "auc": 0.7}}
    chart = drawn(charts_of(report)["Accepted by the drafter's confidence"])
    names = [text.text for text in chart.iter(f"{SVG}text") if text.get("text-anchor") == "start"]
    assert names == ["0.00 to 0.60", "0.60 to 1.00"]
    text = in_terminal(of_run(report, {}))
    assert re.search(
        r"confidence of drafts +0\.70 \(AUC: .*\), ECE 0\.13$", text, re.MULTILINE
    )  # 40 * 0.2 / 60
    assert "AUC 0.70, ECE 0.13" in render(report, {}, "")


@pytest.mark.parametrize("steps", [[5, 3, 2], [0, 0, 7], [100, *[1] * 16]])
def test_bars_are_as_long_as_their_share(steps):
    k = len(steps) - 1
    report = as_json(request("a", [(k, j) for j, number in enumerate(steps) for _ in range(number)]), k)
    assert report["acceptance_histogram"] == steps
    chart = drawn(charts_of(report)["Accepted drafts per step"])
    widths = [float(bar.get("width")) for bar in chart.iter(f"{SVG}rect")]
    assert [w / sum(widths) for w in widths] == pytest.approx([s / sum(steps) for s in steps], abs=2e-3)


def test_bars_of_groups_start_at_plain_decoding():
    groups = a_run()["categories"]
    chart = drawn(charts_of(a_run())["By category"])
    ticks = {text.text: float(text.get("x")) for text in chart.iter(f"{SVG}text")}
    ends = [(float(bar.get("x")), float(bar.get("width"))) for bar in chart.iter(f"{SVG}rect")]
    one, unit = ticks["1"], ticks["2"] - ticks["1"]
    for (start, width), group in zip(ends, groups.values(), strict=True):
        assert start == one
        assert width == pytest.approx((group["mean_acceptance_length"] - 1) * unit, abs=0.1)


def test_long_names_are_cut_before_they_meet_a_number_or_the_edge():
    name, letter = "a name that goes on and on " * 4, 13 * 0.58  # of 13 px, the largest; wide letters
    bar = Point(name=name, number=1.0, interval=(0.941, 1.0))
    chart = drawn(Bars(title="", ticks=ticks_to(1), show=percent, points=[bar]))
    label, number = (text for text in chart.iter(f"{SVG}text") if text.get("class") == "value")
    room = float(number.get("x")) - float(label.get("x"))
    assert letter * (len(label.text) + 1 + len(number.text)) <= room
    assert number.text == "100.0 % [94.1, 100.0]"


@pytest.mark.parametrize(("arms", "columns", "least"), [(3, 4, 8), (6, 8, 4), (2, 16, 7)])
def test_the_marks_of_arms_with_equal_rates_stand_side_by_side(arms, columns, least):
    points = curve(Report.from_json(a_run(num_spec_tokens=columns)).acceptance)
    chart = drawn(curves("Arms", {f"arm {i}": points for i in range(arms)}))
    at = sorted({float(mark.get("cx")) for mark in chart.iter(f"{SVG}circle")})
    assert len(at) == arms * columns
    gaps = [right - left for left, right in itertools.pairwise(at)]
    assert least < min(gaps)
    assert all(max(gaps) - gap < 0.2 for gap in gaps[arms - 1 :: arms]), "a position's marks stay together"


@pytest.mark.parametrize("num_spec_tokens", [1, 4, 16])
def test_nothing_is_drawn_outside_the_charts(num_spec_tokens):
    report = a_run(num_spec_tokens=num_spec_tokens)
    bars = [
        Point(name="a", number=1.0, interval=(0.9, 1.0)),
        Point(name="b", number=0.2),
        Point(name="c", number=None),
    ]
    named = {f"K {i}": [Point(name=str(x), number=0.1 * i * x) for x in range(9)] for i in range(9)}
    charts = (
        *charts_of(report).values(),
        Bars(title="Score", ticks=ticks_to(1), show=percent, points=bars),
        Bars(title="Length", ticks=lengths(16), show=plain, points=bars[:1]),
        Lines(title="", label="", ticks=ticks_to(6.4), show=plain, lines=named),
    )
    assert len(charts) == 7
    for chart in map(drawn, charts):
        *_, width, height = map(float, chart.get("viewBox").split())
        for mark in chart.iter():
            assert 0 <= float(mark.get("x", 0)) + float(mark.get("width", 0)) <= width
            assert 0 <= float(mark.get("y", 0)) + float(mark.get("height", 0)) <= height


def test_every_text_of_a_page_is_escaped():
    bad = "<script>alert('x')</script>&\""
    points = [Point(name=bad, number=0.5, interval=(0.4, 0.6))]
    lines = Lines(title=bad, label=bad, ticks=ticks_to(1), show=percent, lines={bad: points})
    columns = (
        Column(name="a", title=bad, unit=bad),
        Column(name="b", title=bad, interval="c"),
        Column(name="d", show=percent),
    )
    row = {"a": bad, "b": bad, "c": bad, "d": 0.5}
    spans = [Span(bad, "correction", bad), Span("")]
    entries = [
        Entry(
            title=bad, labels={bad: label}, note=bad, question=bad, texts=[ShownText(name=bad, spans=spans)]
        )
        for label in (bad, "")
    ]
    content = Content(
        title=bad,
        settings={bad: bad},
        sentence=bad,
        tiles=[(bad, bad, bad)],
        tables=[
            Table(title=bad, note=bad, columns=columns, rows=(row,), lines=chart, bars="d")
            for chart in (lines, None, curves(bad, {bad: points}))
        ],
        notes={bad: bad},
        findings=[bad],
        texts=TextList(title=bad, note=bad, entries=entries, keys={"correction": bad}),
    )
    text = content.to_html()
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert sum(word.count(bad) for word in page.text) > 40
    assert sum(value.count(bad) for _, value in page.attributes if value) > 9


# --- charts -----------------------------------------------------------------------------------------


CSS = (Path(page_module.__file__).parent / "page.css").read_text()
COLOURS = [*STYLES, "ink", "soft"]


def speedups(lines, **other):
    chart = {"title": "Speed-up", "label": "batch", "ticks": ticks_to(2), "show": ratio}
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
    assert "reference" not in str(svg(speedups({"4": line(1.2)})))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_marks_and_coloured_tokens_can_be_read(scheme):
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})\b", light if scheme == "light" else dark))
    pairs = [(colours[name], colours[ground]) for name in COLOURS for ground in ("card", "paper")]
    shares = [
        float(share) for share in re.findall(r"\.d\d .*rgb\(from var\(--good\) r g b / ([.\d]+)\)", CSS)
    ]
    assert len(shares) == 8
    assert shares == sorted(set(shares)), "a later draft is darker"
    grounds = [colours[name] for name in ("wrong", "bonus", "mark")]
    grounds += [_mixed(colours["good"], colours["card"], share) for share in shares]
    pairs += [(colours["ink"], ground) for ground in grounds]
    assert [pair for pair in pairs if _contrast(*pair) < 4.5] == []


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


SHOWN = {display.count: "0", display.plain: "0.00", display.rate: "0.0", display.ratio: "0.00x"}
SHOWN |= {display.percent: "0.0 %", display.hundredths: "0.0"}


@pytest.mark.parametrize(("show", "text"), SHOWN.items())
def test_nothing_is_below_nothing(show: display.Show, text: str) -> None:
    """The end of an interval that rounds to zero has no sign."""
    assert show(-1e-9) == show(0.0) == text
    assert show(-1.0).startswith("-1")


def test_nor_is_it_as_a_difference() -> None:
    show = next(column.show for column in _ACCURACY if column.name == "difference")
    assert [show(share) for share in (-1e-9, 0.0, -0.01, 0.01)] == ["+0.0", "+0.0", "-1.0", "+1.0"]
