"""Charts as data (lines, bars and points with their axes), and their drawing as inline SVG with all text escaped.

A page's style sheet colours them, so that one drawing serves light and dark.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from markupsafe import Markup

from specgen.report.display import Show, clip, ends, percent
from specgen.report.intervals import Interval

# CSS classes of lines, used cyclically
STYLES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_WIDTH, _HEIGHT = 400, 250  # of the view box; the page scales it by 0.8 to 1.4, so text stays readable
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 14, 40  # margins of lines
_LETTER = 7.2  # width of one in the name of a column
_SHORT = 6  # letters of a column's name that are always shown: numbers
_SIDE = 20  # margin of bars
_BAR_ROW, _BAR_TEXT = 38, 47  # height, and characters of a name and its numbers together

Ticks = Sequence[float]  # the values at the grid lines, the ends of the axis included


def ticks_to(most: float) -> Ticks:
    """Five ticks from 0 to a round number not below ``most``."""
    power = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    top = next(step * power for step in steps if most <= step * power * (1 + 1e-9))
    return [top * share for share in (0, 0.25, 0.5, 0.75, 1)]


def lengths(num_spec_tokens: int) -> Ticks:
    """Ticks for acceptance lengths: from 1 (plain decoding) to K + 1 or a little more."""
    step = -(-(num_spec_tokens + 1) // 9)
    return range(1, num_spec_tokens + 1 + step, step)


def fraction(ticks: Ticks, number: float) -> float:
    """The position of ``number`` between the ends of ``ticks``, 0 to 1."""
    return (number - ticks[0]) / (ticks[-1] - ticks[0])


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value (None if unknown) and its interval; ``name`` is the bar or the column on the x axis."""

    name: str
    number: float | None
    interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What all charts share; all values lie between the ends of ``ticks``."""

    title: str
    ticks: Ticks
    show: Show

    @property
    def legend(self) -> dict[str, str]:
        """Style by name, of a chart that does not name what it draws."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Lines by name over columns; ``label`` is the x axis's. A line without points still takes a style.

    Points of one column are dodged. Columns that have no order of their own, such as data sets, are not ``joined``.
    ``reference`` is a value that others are read against, such as 1.0 for a ratio, and is drawn as a line.
    """

    label: str
    lines: Mapping[str, Sequence[Point]]
    joined: bool = True
    reference: float | None = None

    @property
    def styles(self) -> dict[str, str]:
        return dict(zip(self.lines, cycle(STYLES), strict=False))

    @property
    def legend(self) -> dict[str, str]:
        return {name: style for name, style in self.styles.items() if self.lines[name]}


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """A bar from the first tick to each number, under its name."""

    points: Sequence[Point]


# --- SVG ------------------------------------------------------------------------------------------


def svg(chart: Lines | Bars) -> Markup:
    """``chart`` as markup, with its values as text for screen readers."""
    height = _HEIGHT
    match chart:
        case Lines():
            marks = _draw_lines(chart)
            each = {name: [_label(chart, point) for point in line] for name, line in chart.lines.items()}
            labels = [f"{name}: {', '.join(points)}" for name, points in each.items()]
        case Bars():
            height, marks = len(chart.points) * _BAR_ROW + 20, _draw_bars(chart)
            labels = [_label(chart, point) for point in chart.points]
    frame = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}: {}">{}</svg>')
    return frame.format(_WIDTH, height, chart.title, "; ".join(labels), Markup("").join(marks))


def _label(chart: Chart, point: Point) -> str:
    interval = f" {ends(point.interval, chart.show)}" if point.interval else ""
    return f"{point.name} {chart.show(point.number)}{interval}"


def _tick(chart: Chart, number: float) -> str:
    return f"{100 * number:g} %" if chart.show is percent else f"{number:g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> Markup:
    frame = Markup('<text class="{}" text-anchor="{}" x="{:.1f}" y="{:.1f}">{}</text>')
    return frame.format(style, anchor, x, y, text)


# --- lines ----------------------------------------------------------------------------------------


def _draw_lines(chart: Lines) -> Iterator[Markup]:
    columns = list(dict.fromkeys(point.name for points in chart.lines.values() for point in points))
    width, styles = _WIDTH - _LEFT - _RIGHT, chart.styles
    yield from _draw_levels(chart, width)
    if chart.reference is not None:
        y = _height(chart, chart.reference)
        yield Markup('<path class="reference" d="M{} {:.1f}h{:.1f}"/>').format(_LEFT, y, width)
    middles = {name: _LEFT + (at + 0.5) * width / len(columns) for at, name in enumerate(columns)}
    for name, x in middles.items():
        yield _text(x, _HEIGHT - _BOTTOM + 16, clip(name, max(_SHORT, int(width / len(columns) / _LETTER))))
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, chart.label)
    apart = min(9, 0.7 * width / max(len(columns), 1) / len(chart.lines))
    for index, (name, points) in enumerate(chart.lines.items()):
        shift = apart * (index - (len(chart.lines) - 1) / 2)
        seen = [(middles[point.name] + shift, point) for point in points if point.number is not None]
        if seen:
            marks = Markup("").join(_draw_line(chart, name, seen))
            yield Markup('<g class="{}">{}</g>').format(styles[name], marks)


def _draw_levels(chart: Chart, width: float) -> Iterator[Markup]:
    """The y axis."""
    for tick in chart.ticks:
        y = _height(chart, tick)
        yield Markup('<path class="grid" d="M{} {:.1f}h{:.1f}"/>').format(_LEFT, y, width)
        yield _text(_LEFT - 6, y + 4, _tick(chart, tick), "end")


def _draw_line(chart: Lines, name: str, seen: Sequence[tuple[float, Point]]) -> Iterator[Markup]:
    if chart.joined:
        places = " ".join(f"{x:.1f},{_height(chart, point.number):.1f}" for x, point in seen)
        yield Markup('<polyline class="" points="{}"/>').format(places)
    for x, point in seen:
        yield _mark(chart, x, point, f"{name}, {_label(chart, point)}")


def _mark(chart: Chart, x: float, point: Point, title: str) -> Markup:
    whisker = Markup("")
    if point.interval:
        low, high = (_height(chart, end) for end in point.interval)
        whisker = Markup('<path class="whisker" d="M{:.1f} {:.1f}V{:.1f}"/>').format(x, low, high)
    mark = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>')
    return whisker + mark.format(x, _height(chart, point.number), title)


def _height(chart: Chart, number: float | None) -> float:
    assert number is not None
    return _HEIGHT - _BOTTOM - fraction(chart.ticks, number) * (_HEIGHT - _BOTTOM - _TOP)


# --- bars -----------------------------------------------------------------------------------------


def _draw_bars(chart: Bars) -> Iterator[Markup]:
    bottom = len(chart.points) * _BAR_ROW
    for tick in chart.ticks:
        x = _along(chart, tick)
        yield Markup('<path class="grid" d="M{:.1f} 0V{}"/>').format(x, bottom)
        yield _text(x, bottom + 14, _tick(chart, tick))
    for row, point in enumerate(chart.points):
        top = row * _BAR_ROW
        text = _label(chart, point)
        numbers = text.removeprefix(point.name).strip()
        name = clip(point.name, _BAR_TEXT - len(numbers) - 1)
        yield _text(_SIDE, top + 13, name, "start", "value")
        yield _text(_WIDTH - _SIDE, top + 13, numbers, "end", "value")
        if point.number is not None:
            bar = '<rect class="fill" x="{:.1f}" y="{}" width="{:.1f}" height="12"><title>{}</title></rect>'
            yield Markup(bar).format(_SIDE, top + 19, _along(chart, point.number) - _SIDE, text)
        if point.interval:
            low, high = (_along(chart, end) for end in point.interval)
            yield Markup('<path class="whisker" d="M{:.1f} {}H{:.1f}"/>').format(low, top + 25, high)


def _along(chart: Bars, number: float) -> float:
    return _SIDE + fraction(chart.ticks, number) * (_WIDTH - 2 * _SIDE)
