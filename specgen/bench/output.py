"""The result of every bench: a table with its conditions, as text, CSV, JSON and an HTML page with plots."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgen.report.charts import Lines, Point, quarters
from specgen.report.origin import origin
from specgen.report.page import Page
from specgen.report.table import Row, Table
from specgen.report.terminal import Part
from specgen.rundir.atomic import write_text
from specgen.rundir.provenance import now

Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Column ``y`` over column ``x``, with a line per value of column ``series``, of rows that match ``where``."""

    title: str
    x: str
    y: str
    series: str
    where: Row = field(default_factory=dict)

    def points(self, rows: tuple[Row, ...]) -> dict[str, list[Point]]:
        """The points of each line in the order of ``rows``; plots of one series have the same lines."""
        lines: dict[str, list[Point]] = {str(row[self.series]): [] for row in rows}
        for row in rows:
            if isinstance(row[self.y], int | float) and self.where.items() <= row.items():
                lines[str(row[self.series])].append(Point(name=str(row[self.x]), number=row[self.y]))
        return lines


@dataclass(frozen=True, kw_only=True)
class BenchTable(Table):
    """The result of a bench; ``conditions`` are device, versions, weights, repeats and what is timed."""

    name: str  # of its files
    conditions: Mapping[str, Value]
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()  # such as what was not measured and why

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        assert all(list(row) == names for row in self.rows), "rows have the columns' names, in their order"
        for plot in self.plots:
            assert {plot.x, plot.y, plot.series, *plot.where} <= set(names), plot

    def parts(self) -> Iterator[Part]:
        """Title, conditions, table and notes, for the terminal."""
        yield "\n".join([self.title, *(f"{name}: {value}" for name, value in self.conditions.items())])
        yield self
        yield "\n".join(self.notes)

    def to_csv(self) -> str:
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
            "head": dict(self.conditions),
            "columns": [{"name": column.name, "unit": column.unit} for column in self.columns],
            "num_keys": self.num_keys,
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_html(self) -> str:
        """A self-contained page: conditions, plots, table and notes."""
        every = Table(title="Every row", columns=self.columns, rows=self.rows)
        return Page(
            title=self.title,
            settings={name: str(value) for name, value in self.conditions.items()},
            tables=[*self._plotted(), every],
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
            lines = plot.points(self.rows)
            numbers = [point.number or 0.0 for points in lines.values() for point in points]
            if numbers:
                x, y = by_name[plot.x], by_name[plot.y]
                chart = Lines(
                    title=plot.title,
                    label=f"{y.heading} over {x.heading}",
                    ticks=quarters(max(numbers)),
                    show=y.show,
                    lines=lines,
                    named=True,
                )
                note = f"one line per {plot.series}"
                yield Table(title=plot.title, note=note, columns=(), rows=(), lines=chart)
