"""The one type of table for terminal, HTML and files: columns that format their values, and rows."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specgen.report.charts import Bars, Lines, Point, Ticks
from specgen.report.display import DASH, Show, ends, value

Row = Mapping[str, Any]  # value by column name; None if not measured


_FORMULA = tuple("=+-@\t\r\n")  # what spreadsheets take for the beginning of one


def csv_text(names: Iterable[str], rows: Iterable[Row]) -> str:
    """``rows`` as CSV below the header ``names``; a text that a spreadsheet would compute gets an apostrophe before it.

    So a head named ``=1+1`` is shown as that (OWASP, CSV injection). Numbers are left as they are.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_inert, names := list(names)))
    writer.writerows([_inert(row.get(name)) for name in names] for row in rows)
    return file.getvalue()


def _inert(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) and cell != DASH else cell


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column. ``show`` formats values on terminal and page; files hold the raw value. Strings are unchanged."""

    name: str  # a key of every row
    title: str | None = None  # defaults to the name
    unit: str = ""  # us, TB/s, tokens/s; empty for names and counts
    show: Show = value
    interval: str = ""  # the key of the value's 95 % interval
    wraps: bool = False  # text that may wrap; the first column always does
    link: str = ""  # the key of the address that a page links the value to; an empty one is no link

    @property
    def heading(self) -> str:
        title = self.name if self.title is None else self.title
        return f"{title} [{self.unit}]" if self.unit else title

    def text(self, row: Row) -> str:
        found = row[self.name]
        return found if isinstance(found, str) else self.show(found)

    def ends(self, row: Row) -> str:
        """The formatted interval; empty for a column without intervals."""
        if not self.interval:
            return ""
        found = row[self.interval]
        return found if isinstance(found, str) else ends(found, self.show)


def keys(columns: Iterable[Column]) -> list[str]:
    """The keys of a row that ``columns`` show: values and intervals."""
    return [key for column in columns for key in (column.name, column.interval) if key]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows and columns; a page shows ``title``, ``note`` and a chart above them."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str
    note: str = ""
    lines: Lines | None = None  # a separate chart, instead of ``bars``
    bars: str = ""  # the column that is also drawn as bars on the axis ``ticks``
    ticks: Ticks = (0, 0.25, 0.5, 0.75, 1)
    num_keys: int = 1  # leading columns that identify a row, repeated where a terminal splits the table
    group: int = 1  # the other columns are kept together in groups of this size

    @property
    def has_header(self) -> bool:
        return any(column.heading for column in self.columns)

    @property
    def chart(self) -> Lines | Bars | None:
        """``lines``, or one bar per row."""
        if self.lines or not (self.bars and self.rows):
            return self.lines
        first, column = self.columns[0], next(each for each in self.columns if each.name == self.bars)
        points = [
            Point(name=first.text(row), number=row[self.bars], interval=row.get(column.interval))
            for row in self.rows
        ]
        return Bars(title=self.title, ticks=self.ticks, show=column.show, points=points)


def pairs(title: str, items: Iterable[tuple[str, str, str]]) -> Table:
    """A table without headings: label, and number with note."""
    return Table(
        title=title,
        columns=(Column(name="label", title=""), Column(name="text", title="", wraps=True)),
        rows=tuple({"label": label, "text": f"{number} {note}".strip()} for label, number, note in items),
    )
