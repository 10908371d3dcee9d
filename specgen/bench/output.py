"""What every bench gives: a table that knows what it ran on, as text, CSV, JSON and a page with its plots."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from specgen import display
from specgen.display import Show
from specgen.report import charts, page
from specgen.rundir.atomic import write_text

Value = str | int | float | bool | None
Row = Mapping[str, Value]  # the name of each column: its value; None where nothing was measured


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column; ``show`` is for people, files hold the value itself."""

    name: str  # a key of every row, such as trtllm_mean
    unit: str = ""  # us, TB/s, tokens/s; empty for names and counts
    show: Show = display.plain  # for floats; whole numbers are counts

    @property
    def title(self) -> str:
        """Name and unit, as a heading."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    def text(self, value: Value) -> str:
        """``value`` as people read it."""
        if isinstance(value, str | bool):
            return str(value)
        return display.count(value) if isinstance(value, int) else self.show(value)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Column ``y`` over column ``x``, a line for each value of column ``series``, of rows that agree with ``where``."""

    title: str
    x: str
    y: str
    series: str
    where: Row = field(default_factory=dict)

    def lines(self, rows: Sequence[Row]) -> charts.Lines:
        """The points of each line, in the order of ``rows``; rows without a number for ``y`` give none."""
        lines: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            y = row[self.y]
            if isinstance(y, int | float) and self.where.items() <= row.items():
                lines.setdefault(str(row[self.series]), []).append((str(row[self.x]), y))
        return lines


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a bench found. ``head`` says under which conditions: device, versions, weights, repeats, what is timed."""

    name: str  # of its files
    title: str
    head: Mapping[str, Value]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()  # what was not measured, and why

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        assert all(list(row) == names for row in self.rows), "rows have the columns' names, in their order"
        for plot in self.plots:
            assert {plot.x, plot.y, plot.series, *plot.where} <= set(names), plot

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """The columns under their names."""
        return {column.name: column for column in self.columns}

    def to_text(self) -> str:
        """The title, the head, the table and the notes, for a terminal."""
        head = [f"{name}: {value}" for name, value in self.head.items()]
        lines = [self.title, *head, "", *display.table(self._titles(), self._cells()), *self.notes]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """The rows under the columns' names, a comma between."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [column.name for column in self.columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Everything but the plots."""
        return {
            "name": self.name,
            "title": self.title,
            "head": dict(self.head),
            "columns": [{"name": column.name, "unit": column.unit} for column in self.columns],
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_html(self) -> str:
        """A page that opens without a network: the head, every plot, the table, the notes."""
        body = [
            f"<h1>{escape(self.title)}</h1>",
            page.pairs("settings", {name: str(value) for name, value in self.head.items()}),
            f'<div class="columns">{"".join(self._cards())}</div>',
            page.card("Every row", "", body=page.table(self.title, self._titles(), self._cells())),
            *(f'<p class="finding">{escape(note)}</p>' for note in self.notes),
        ]
        return page.document(self.title, body)

    def write(self, directory: Path) -> None:
        """``NAME.csv``, ``NAME.json`` and ``NAME.html`` in ``directory``, which is made; such files are replaced."""
        directory.mkdir(parents=True, exist_ok=True)
        contents = {"csv": self.to_csv(), "json": json.dumps(self.to_json()) + "\n", "html": self.to_html()}
        for suffix, content in contents.items():
            write_text(directory / f"{self.name}.{suffix}", content)

    def _titles(self) -> list[str]:
        return [column.title for column in self.columns]

    def _cells(self) -> list[list[str]]:
        return [[column.text(row[column.name]) for column in self.columns] for row in self.rows]

    def _cards(self) -> Iterator[str]:
        for index, plot in enumerate(self.plots):
            lines = plot.lines(self.rows)
            if lines:
                x, y = self.by_name[plot.x], self.by_name[plot.y]
                chart = charts.lines_chart(f"plot-{index}", plot.title, x.title, y.title, lines, y.show)
                yield page.card(plot.title, f"a line for each {escape(plot.series)}", body=chart)
