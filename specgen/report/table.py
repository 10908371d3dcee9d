"""A table as a terminal, a page and files show it: columns that know how to show their values, and rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specgen.display import Show, ends, value
from specgen.report.charts import Bars, Lines, Point, Ticks

Row = Mapping[str, Any]  # the name of each column: its value; None where nothing was measured


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column. ``show`` is for people, files hold the value itself; text is shown as it is."""

    name: str  # a key of every row
    title: str | None = None  # of the column, where it is not its name
    unit: str = ""  # us, TB/s, tokens/s; empty for names and counts
    show: Show = value
    interval: str = ""  # the key of the value's 95 % interval
    wraps: bool = False  # words, not a number; the first column always is

    @property
    def heading(self) -> str:
        """Title and unit."""
        title = self.name if self.title is None else self.title
        return f"{title} [{self.unit}]" if self.unit else title

    def text(self, row: Row) -> str:
        """The value as people read it."""
        found = row[self.name]
        return found if isinstance(found, str) else self.show(found)

    def ends(self, row: Row) -> str:
        """The value's interval; empty for a column without intervals."""
        if not self.interval:
            return ""
        found = row[self.interval]
        return found if isinstance(found, str) else ends(found, self.show)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns; a page shows ``title``, ``note`` and a chart above them."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str
    note: str = ""
    lines: Lines | None = None  # the chart, if it is not of ``bars``
    bars: str = ""  # the column that is also drawn as bars between the ends of ``ticks``
    ticks: Ticks = (0, 0.25, 0.5, 0.75, 1)
    num_keys: int = 1  # columns that say which row it is: repeated where a terminal needs several tables
    group: int = 1  # columns behind those that are kept together

    @property
    def has_header(self) -> bool:
        """Whether any column has a heading."""
        return any(column.heading for column in self.columns)

    @property
    def chart(self) -> Lines | Bars | None:
        """``lines``, or a bar for each row."""
        if self.lines or not (self.bars and self.rows):
            return self.lines
        first, column = self.columns[0], next(each for each in self.columns if each.name == self.bars)
        points = [
            Point(name=first.text(row), number=row[self.bars], interval=row.get(column.interval))
            for row in self.rows
        ]
        return Bars(title=self.title, ticks=self.ticks, show=column.show, points=points)


def pairs(title: str, items: Iterable[tuple[str, str, str]]) -> Table:
    """Labels, each with a number and what there is to say about it."""
    return Table(
        title=title,
        columns=(Column(name="label", title=""), Column(name="text", title="", wraps=True)),
        rows=tuple({"label": label, "text": f"{number} {note}".strip()} for label, number, note in items),
    )
