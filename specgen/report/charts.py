"""The charts of a report, a study or a bench as inline SVG: acceptance curves, accepted drafts, bars, lines."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specgen.display import Show, between, clip, hundredths, percent, plain
from specgen.report.intervals import Interval

ARM_STYLES = ("first", "second", "third", "fourth")  # of the arms in a chart, over again from the fifth on
Bar = tuple[str, float | None, Interval | None]  # its label, how long it is, and a whisker on it
Lines = Mapping[str, Sequence[tuple[str, float]]]  # the name of each line: its points, at a column each

_WIDTH = 400  # of the view box; the page scales it to 0.8 to 1.4 of that, so text stays readable
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 14, 40  # margins of a plot
_HEIGHT = 250
_GROUP_LEFT, _GROUP_ROW, _GROUP_NAME = 132, 26, 16
_BAR_ROW, _BAR_NAME = 38, 30
_NAMES = 52  # margin for the names at the ends of lines
_NAME_ROW = 12
_MANY = 9  # columns from which on labels lose their decimal


def acceptance_chart(positions: Sequence[Mapping[str, Any]]) -> str:
    """Joint and conditional acceptance over the position of the draft, each rate with its 95 % interval."""
    curves = [
        _curve("second", positions, "conditional", "conditional_ci95", 4, len(positions)),
        _curve("first", positions, "rate", "ci95", -4, len(positions)),
    ]
    ticks = [_column_label(_column(i, len(positions)), str(i)) for i in range(len(positions))]
    description = "; ".join(f"token {row['position']}: joint {percent(row['rate'])}" for row in positions)
    body = [_percent_grid(1.0), *ticks, _axis_label("position of the draft (token i)"), *curves]
    return _svg("acceptance", "Acceptance by draft position", description, _HEIGHT, body)


def histogram_chart(steps: Sequence[int]) -> str:
    """The share of the verify steps that accepted j drafts, which ``steps[j]`` did."""
    shares = [number / max(sum(steps), 1) for number in steps]
    top = _round_up(max(shares))
    width = 0.62 * _span() / len(shares)
    body = [_percent_grid(top), _axis_label("drafts accepted in a step")]
    for j, share in enumerate(shares):
        x, y = _column(j, len(shares)), _height(share / top)
        label = hundredths(share) if len(shares) < _MANY else f"{100 * share:.0f}"
        body += [
            f'<rect class="fill" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{_height(0) - y:.1f}"><title>{j} accepted: {percent(share)} of steps</title></rect>',
            f'<text class="value" text-anchor="middle" x="{x:.1f}" y="{y - 4:.1f}">{label}</text>',
            _column_label(x, str(j)),
        ]
    description = "; ".join(f"{j} accepted: {percent(share)}" for j, share in enumerate(shares))
    return _svg("histogram", "Verify steps by accepted drafts", description, _HEIGHT, body)


def length_chart(kind: str, groups: Mapping[str, Mapping[str, Any]]) -> str:
    """The mean acceptance length of each group, with its 95 % interval, as a bar from 1: plain decoding."""
    most = len(next(iter(groups.values()))["acceptance"]) + 1
    bottom = len(groups) * _GROUP_ROW + 6
    body = [_length_grid(most, bottom)]
    for row, (label, group) in enumerate(groups.items()):
        body += _length_bar(label, group, most, row * _GROUP_ROW + 6)
    description = "; ".join(
        f"{label}: {plain(group['mean_acceptance_length'])}" for label, group in groups.items()
    )
    return _svg(f"by-{kind}", f"Mean acceptance length by {kind}", description, bottom + 38, body)


def arms_chart(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The joint acceptance of each arm over the position of the draft, one curve over the other."""
    columns = max(map(len, curves.values()))
    body = [_percent_grid(1.0), _axis_label("position of the draft (token i)")]
    body += [_column_label(_column(i, columns), str(i)) for i in range(columns)]
    apart = min(9, 0.7 * _span() / columns / len(curves))  # equal rates stand side by side
    for index, positions in enumerate(curves.values()):
        style = ARM_STYLES[index % len(ARM_STYLES)]
        shift = apart * (index - (len(curves) - 1) / 2)
        body.append(_curve(style, positions, "rate", "ci95", shift, columns))
    description = "; ".join(
        f"{name}: {', '.join(percent(row['rate']) for row in positions)}"
        for name, positions in curves.items()
    )
    return _svg("arms", "Acceptance by draft position and arm", description, _HEIGHT, body)


def bars_chart(name: str, title: str, bars: Sequence[Bar], show: Show) -> str:
    """One bar from 0 for each of ``bars``, under its name and its number by ``show``; ``name`` is its id."""
    most = max([1e-9, *(max(value or 0.0, *(interval or (0.0,))) for _, value, interval in bars)])
    bottom = len(bars) * _BAR_ROW
    body: list[str] = []
    for row, (label, value, interval) in enumerate(bars):
        body += _bar(label, value, interval, show, scale=_WIDTH / most, top=row * _BAR_ROW)
    description = "; ".join(f"{label}: {show(value)}" for label, value, _ in bars)
    return _svg(name, title, description, bottom, body)


def lines_chart(name: str, title: str, x_label: str, y_label: str, lines: Lines, show: Show) -> str:
    """``lines`` from 0 on, each with its name at its end; what their points stand at is a column each, in order."""
    columns = list(dict.fromkeys(x for points in lines.values() for x, _ in points))
    top = _round_number(max(y for points in lines.values() for _, y in points))
    places = {x: _LEFT + (i + 0.5) * (_span() - _NAMES) / len(columns) for i, x in enumerate(columns)}
    body = [_number_grid(top), _axis_label(escape(f"{y_label} over {x_label}"))]
    body += [_column_label(places[x], escape(x)) for x in columns]
    ends = _apart([_height(points[-1][1] / top) for points in lines.values()])
    for index, (label, points) in enumerate(lines.items()):
        hue = 220 - 260 * index / max(len(lines) - 1, 1)  # from blue through green and red
        body.append(_line(hue, label, [(places[x], y) for x, y in points], top, ends[index], show))
    description = "; ".join(
        f"{label}: {', '.join(f'{x} {show(y)}' for x, y in points)}" for label, points in lines.items()
    )
    return _svg(name, title, description, _HEIGHT, body)


# --- marks ----------------------------------------------------------------------------------------


def _curve(
    style: str,
    positions: Sequence[Mapping[str, Any]],
    rate: str,
    interval: str,
    shift: float,
    columns: int,
) -> str:
    """A line through the rates that exist, with whiskers; ``shift`` keeps two curves' whiskers apart."""
    seen = [row for row in positions if row[rate] is not None]
    points = [(_column(row["position"], columns) + shift, _height(row[rate])) for row in seen]
    marks = [f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>']
    for (x, y), row in zip(points, seen, strict=True):
        low, high = (_height(end) for end in row[interval])
        text = f"token {row['position']}: {percent(row[rate])} {between(row[interval], hundredths)}"
        marks.append(
            f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{text}</title></circle>'
        )
    return f'<g class="{style}">{"".join(marks)}</g>'


def _line(
    hue: float, label: str, points: Sequence[tuple[float, float]], top: float, end: float, show: Show
) -> str:
    """A line through ``points`` (place, number); its name stands at the right margin, at height ``end``."""
    short = escape(label)
    placed = [(x, _height(y / top), show(y)) for x, y in points]
    marks = [f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)}"/>']
    marks += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{short}: {text}</title></circle>'
        for x, y, text in placed
    ]
    marks.append(f'<text x="{_WIDTH - _RIGHT - _NAMES + 4}" y="{end + 4:.1f}">{short}</text>')
    return f'<g class="line" style="color: hsl({hue:.0f} 65% 48%)">{"".join(marks)}</g>'


def _bar(
    label: str, value: float | None, interval: Interval | None, show: Show, *, scale: float, top: int
) -> list[str]:
    text = f"{show(value)} {between(interval, show)}" if interval else show(value)
    marks = [
        f'<text class="name" x="0" y="{top + 13}">{escape(clip(label, _BAR_NAME))}</text>'
        f'<text text-anchor="end" x="{_WIDTH}" y="{top + 13}">{text}</text>'
    ]
    if value is not None:
        marks.append(
            f'<rect class="fill" x="0" y="{top + 19}" width="{value * scale:.1f}" height="12">'
            f"<title>{escape(label)}: {text}</title></rect>"
        )
    if interval is not None:
        low, high = (end * scale for end in interval)
        marks.append(f'<path class="whisker" d="M{low:.1f} {top + 25}H{high:.1f}"/>')
    return marks


def _length_bar(label: str, group: Mapping[str, Any], most: int, top: int) -> list[str]:
    middle = top + _GROUP_ROW / 2
    short = escape(clip(label, _GROUP_NAME))
    name = f'<text class="name" text-anchor="end" x="{_GROUP_LEFT - 8}" y="{middle + 4}">{short}</text>'
    length, interval = group["mean_acceptance_length"], group["mean_acceptance_length_ci95"]
    if length is None:
        return [name]
    start, end = _along(1, most), _along(length, most)
    bar = (
        f'<rect class="fill" x="{start:.1f}" y="{middle - 7}" width="{end - start:.1f}" height="14">'
        f"<title>{escape(label)}: {plain(length)} {between(interval, plain)}</title></rect>"
    )
    low, high = interval or (length, length)
    whisker = f'<path class="whisker" d="M{_along(low, most):.1f} {middle}H{_along(high, most):.1f}"/>'
    return [name, bar, whisker]


# --- frame ----------------------------------------------------------------------------------------


def _svg(name: str, title: str, description: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-text">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _percent_grid(top: float) -> str:
    """Five lines from 0 to ``top`` with their percentages."""
    lines = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _height(share)
        lines.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text text-anchor="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{100 * top * share:g} %</text>'
        )
    return "".join(lines)


def _number_grid(top: float) -> str:
    """Five lines from 0 to ``top`` with their numbers."""
    lines = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _height(share)
        lines.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT - _NAMES}"/>'
            f'<text text-anchor="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{top * share:g}</text>'
        )
    return "".join(lines)


def _length_grid(most: int, bottom: float) -> str:
    step = -(-most // 9)
    lines = [
        f'<path class="grid" d="M{_along(length, most):.1f} 0V{bottom}"/>'
        f'<text text-anchor="middle" x="{_along(length, most):.1f}" y="{bottom + 14}">{length}</text>'
        for length in range(1, most + 1, step)
    ]
    middle = (_GROUP_LEFT + _WIDTH - _RIGHT) / 2
    label = f'<text text-anchor="middle" x="{middle}" y="{bottom + 32}">tokens a verify step</text>'
    return "".join(lines) + label


def _axis_label(text: str) -> str:
    return f'<text text-anchor="middle" x="{_LEFT + _span() / 2:g}" y="{_HEIGHT - 6}">{text}</text>'


def _column_label(x: float, text: str) -> str:
    return f'<text text-anchor="middle" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}">{text}</text>'


def _span() -> int:
    return _WIDTH - _LEFT - _RIGHT


def _column(index: int, columns: int) -> float:
    return _LEFT + (index + 0.5) * _span() / columns


def _height(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)


def _along(length: float, most: int) -> float:
    return _GROUP_LEFT + (length - 1) / (most - 1) * (_WIDTH - _GROUP_LEFT - _RIGHT)


def _round_up(share: float) -> float:
    """The next of 20 %, 40 %, ... 100 %, so that grid lines fall on whole percentages."""
    return next(top / 5 for top in range(1, 6) if share <= top / 5)


def _round_number(number: float) -> float:
    """A number a little above with a power of ten as its unit, so that a quarter of it is short."""
    if number <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(number))
    return next(
        step * power
        for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
        if number <= step * power * (1 + 1e-9)
    )


def _apart(heights: Sequence[float]) -> list[float]:
    """``heights`` moved until each is a row of text from the next and none is below the plot; their order stays."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved, least, most = list(heights), float("-inf"), _height(0)
    for i in order:
        moved[i] = max(heights[i], least)
        least = moved[i] + _NAME_ROW
    for i in reversed(order):
        moved[i] = min(moved[i], most)
        most = moved[i] - _NAME_ROW
    return moved
