"""The result of every bench: a table with its conditions, as text, CSV, JSON and an HTML page with plots."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgen.record.files import write_text
from specgen.record.provenance import now
from specgen.report.charts import Lines, Point, ticks_to
from specgen.report.origin import origin
from specgen.report.page import Page
from specgen.report.table import Column, Row, Table, csv_text, keys
from specgen.report.terminal import Part, render

Value = str | int | float | bool | None
_WIDTH = 80  # columns of a kept text: no terminal is narrower
_WHAT = ("device", "model", "drafter", "prompts")  # conditions that a page begins with


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Column ``y`` over column ``x``, with a line per value of column ``series``.

    ``where`` has the values by column that its rows may have. Intervals of column ``y`` are drawn as whiskers.
    ``reference`` is the chart's, see ``Lines``.
    """

    title: str
    x: str
    y: str
    series: str
    where: Mapping[str, Container[Value]] = field(default_factory=dict)
    reference: float | None = None

    def points(self, rows: tuple[Row, ...], interval: str = "") -> dict[str, list[Point]]:
        """The points of each line in the order of ``rows``; plots of one series have the same lines.

        ``interval`` is the key of the values' intervals, if they have some.
        """
        lines: dict[str, list[Point]] = {str(row[self.series]): [] for row in rows}
        for row in rows:
            matches = all(row[name] in allowed for name, allowed in self.where.items())
            if isinstance(row[self.y], int | float) and matches:
                point = Point(name=str(row[self.x]), number=row[self.y], interval=row.get(interval))
                lines[str(row[self.series])].append(point)
        return lines


@dataclass(frozen=True, kw_only=True)
class BenchTable(Table):
    """The result of a bench; ``conditions`` are device, versions, weights, repeats and what is timed."""

    name: str  # of its files
    conditions: Mapping[str, Value]
    plots: tuple[Plot, ...] = ()
    answers: tuple[str, ...] = ()  # what was found, in sentences
    notes: tuple[str, ...] = ()  # such as what was not measured and why
    details: tuple[Table, ...] = ()  # below the rows, not in the CSV
    # of the columns, those on a terminal, where that is not the whole table with ``details``
    shown: int | None = None

    def __post_init__(self) -> None:
        names = keys(self.columns)
        assert all(list(row) == names for row in self.rows), "rows have the columns' keys, in their order"
        for plot in self.plots:
            assert {plot.x, plot.y, plot.series, *plot.where} <= set(names), plot

    def parts(self) -> Iterator[Part]:
        """Title, conditions, table, answers and notes, for the terminal."""
        yield "\n".join([self.title, *(f"{name}: {value}" for name, value in self.conditions.items())])
        if self.shown is None:
            yield from (self, *self.details)
        else:
            shown = self.columns[: self.shown]
            yield Table(title=self.title, columns=shown, rows=self.rows, num_keys=self.num_keys)
        yield "\n".join([*self.answers, *self.notes])

    def to_csv(self) -> str:
        rows = [self._flat(row) for row in self.rows]
        return csv_text(self._flat(dict.fromkeys(keys(self.columns))), rows)

    def _flat(self, row: Row) -> dict[str, Value]:
        """``row`` with the ends of an interval as two values."""
        found: dict[str, Value] = {}
        for column in self.columns:
            found[column.name] = row[column.name]
            if column.interval:
                low, high = row[column.interval] or (None, None)
                found |= {f"{column.interval}_low": low, f"{column.interval}_high": high}
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "head": dict(self.conditions),
            "columns": [
                {
                    name: getattr(column, name)
                    for name in ("name", "unit", "interval")
                    if getattr(column, name)
                }
                for column in self.columns
            ],
            "rows": [dict(row) for row in self.rows],
            "details": {each.title: [dict(row) for row in each.rows] for each in self.details},
            "notes": [*self.answers, *self.notes],
            "text": render(self.parts(), _WIDTH),  # for `specgen report` to print again
        }

    def to_html(self) -> str:
        """A self-contained page: what was measured, answers, plots, table and notes, and last how."""
        every = Table(title="Every row", columns=self.columns, rows=self.rows)
        conditions = {name: str(value) for name, value in self.conditions.items()}
        return Page(
            title=self.title,
            settings={name: text for name, text in conditions.items() if name in _WHAT},
            notes={name: text for name, text in conditions.items() if name not in _WHAT},
            notes_title="How it was measured",
            tables=[*self._plotted(), *self.details, every],
            sentence="\n".join(self.answers),
            findings=self.notes,
            # the device is one of the conditions, and the load is the bench's own by now
            origin=origin({**now("cpu"), "state": {}}),
        ).to_html()

    def write(self, directory: Path) -> None:
        """Write ``NAME.csv``, ``NAME.json`` and ``NAME.html`` to ``directory``, replacing existing ones."""
        directory.mkdir(parents=True, exist_ok=True)
        contents = {"csv": self.to_csv(), "json": json.dumps(self.to_json()) + "\n", "html": self.to_html()}
        for suffix, content in contents.items():
            write_text(directory / f"{self.name}.{suffix}", content)

    def _plotted(self) -> Iterator[Table]:
        by_name = {column.name: column for column in self.columns}
        for plot in self.plots:
            x, y = by_name[plot.x], by_name[plot.y]
            lines = plot.points(self.rows, y.interval)
            seen = [point for points in lines.values() for point in points]
            numbers = [each for point in seen for each in (point.number or 0.0, *(point.interval or ()))]
            if numbers:
                chart = Lines(
                    title=plot.title,
                    label=x.heading,
                    ticks=ticks_to(max(*numbers, plot.reference or 0.0)),
                    show=y.show,
                    lines=lines,
                    reference=plot.reference,
                )
                note = f"{y.heading}, one line per {plot.series}"
                yield Table(title=plot.title, note=note, columns=(), rows=(), lines=chart)


def selected(columns: Sequence[Column], rows: Iterable[Row]) -> tuple[Row, ...]:
    """The cells of ``rows`` that a table of these ``columns`` has."""
    return tuple({key: row[key] for key in keys(columns)} for row in rows)
