"""Charts as data: lines, bars and points with their axes; ``svg.py`` draws them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specgen.display import Show
from specgen.report.intervals import Interval

# CSS classes of lines, used cyclically
STYLES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
DRAFT_LENGTHS = (*map(str, range(8)), "auto")  # an ``order``: one K has one colour in every chart

Ticks = Sequence[float]  # the values at the grid lines, the ends of the axis included


def quarters(most: float) -> Ticks:
    """Five ticks from 0 to a round number not below ``most``."""
    power = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    top = next(step * power for step in steps if most <= step * power * (1 + 1e-9))
    return [top * share for share in (0, 0.25, 0.5, 0.75, 1)]


def lengths(num_spec_tokens: int) -> Ticks:
    """Ticks for acceptance lengths: from 1 (plain decoding) to K + 1 or a little more."""
    step = -(-(num_spec_tokens + 1) // 9)
    return range(1, num_spec_tokens + 1 + step, step)


def fraction(ticks: Ticks, number: float, *, logarithmic: bool = False) -> float:
    """The position of ``number`` between the ends of ``ticks``, 0 to 1; all above 0 if ``logarithmic``."""
    if logarithmic:
        return math.log(number / ticks[0]) / math.log(ticks[-1] / ticks[0])
    return (number - ticks[0]) / (ticks[-1] - ticks[0])


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value (None if unknown) and its interval; ``name`` is the bar or the column on the x axis."""

    name: str
    number: float | None
    interval: Interval | None = None


def styles_of(names: Iterable[str], order: Sequence[str] = ()) -> dict[str, str]:
    """The style of each name, by its place in ``order``; names that are not there come behind."""
    names = list(names)
    places = {name: at for at, name in enumerate(dict.fromkeys((*order, *names)))}
    return {name: STYLES[places[name] % len(STYLES)] for name in names}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What all charts share; all values lie between the ends of ``ticks``.

    ``reference`` is a value that others are read against, such as 1.0 for a ratio, and is drawn as a line.
    """

    title: str
    ticks: Ticks
    show: Show
    reference: float | None = None


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Lines by name over columns; ``label`` is the x axis's. A line without points still takes a style.

    With ``named`` the names stand at the ends of the lines; without, there is a legend and points are dodged. Charts
    with the same ``order`` of names (see ``styles_of``) draw the same name in the same style. Columns that have no
    order of their own, such as data sets, are not ``joined``.
    """

    label: str
    lines: Mapping[str, Sequence[Point]]
    named: bool = False
    joined: bool = True
    order: Sequence[str] = ()

    @property
    def styles(self) -> dict[str, str]:
        return styles_of(self.lines, self.order)

    @property
    def legend(self) -> dict[str, str]:
        """Style by name, of a chart that does not name its lines."""
        return {} if self.named else self.styles


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """A bar from the first tick to each number, under its name."""

    points: Sequence[Point]

    @property
    def legend(self) -> dict[str, str]:
        """Empty: bars are named."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A point of a ``Scatter``; ``name`` says on hover what it stands for."""

    name: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class Scatter(Chart):
    """Points by group over two numbers: y on the axis ``ticks``, x on ``across``, with their labels.

    ``joined`` connects the points of a group in their order. ``guide`` is a line through (x, y) behind them: where
    both are equal, or the best that was reached. Both axes may be ``logarithmic``.
    """

    across: Ticks
    label: str  # of the x axis
    side: str  # of the y axis
    groups: Mapping[str, Sequence[Spot]]
    joined: bool = False
    guide: Sequence[tuple[float, float]] = ()
    logarithmic: bool = False
    order: Sequence[str] = ()

    @property
    def styles(self) -> dict[str, str]:
        return styles_of(self.groups, self.order)

    @property
    def legend(self) -> dict[str, str]:
        """Style by name, where there is more than one group."""
        return self.styles if len(self.groups) > 1 else {}
