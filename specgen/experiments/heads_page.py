"""``comparison.json`` and ``compare.html`` of a comparison."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specgen.config.json_fields import load_json
from specgen.experiments.head_figures import PLAN, Comparison
from specgen.experiments.heads_tables import notes, settings, tables, terms, verdicts
from specgen.record.files import write_json, write_text
from specgen.report.charts import Lines, Point, lengths
from specgen.report.display import checkpoint_name, plain, several
from specgen.report.origin import origin
from specgen.report.page import Page
from specgen.report.table import Column, Table
from specgen.report.tables import curves

_NAMED = 2  # heads and data sets that a title names


def write_comparison(found: Comparison, path: Path) -> None:
    """Write the page and the figures of ``found`` into the comparison's directory ``path``."""
    record = load_json(path / PLAN, "compare again")
    write_text(path / "compare.html", page(found, record, path))
    write_json(path / "comparison.json", found.to_json())


def page(found: Comparison, record: dict[str, Any], path: Path) -> str:
    """HTML for the directory ``path``; ``record`` says when, where and by which command the comparison was made."""
    return Page(
        title=_title(found),
        settings=settings(found),
        sentence="\n".join(verdicts(found)),
        tables=[*_tables(found), _runs_table(found, path)],
        notes=dict(terms(found)),
        findings=list(notes(found)),
        origin=origin(record),
    ).to_html()


def _title(found: Comparison) -> str:
    """``org/target: head and other on bundled and gsm8k``; of many their number."""
    heads, data = found.heads, found.data
    compared = " and ".join(heads) if len(heads) <= _NAMED else several(len(heads), "drafter")
    sets = " and ".join(data) if len(data) <= _NAMED else several(len(data), "data set")
    return f"{checkpoint_name(found.runs[0].manifest['engine']['model'])}: {compared} on {sets}"


def _tables(found: Comparison) -> Iterator[Table]:
    lengths, positions, *others = tables(found)
    yield replace(lengths, lines=_lengths(found))
    for data in found.data:
        yield _of_data(replace(positions, lines=_curves(found, data)), data)
        yield from (_of_data(table, data) for table in others)


def _of_data(table: Table, data: str) -> Table:
    """The rows of one data set; without rows there is no chart either."""
    rows = tuple(row for row in table.rows if row["data"] == data)
    return replace(
        table,
        title=f"{data}: {table.title[0].lower()}{table.title[1:]}",
        columns=table.columns[1:],
        rows=rows,
        lines=table.lines if rows else None,
    )


def _lengths(found: Comparison) -> Lines:
    """The mean acceptance length on every data set, a mark for each head."""
    lines: dict[str, list[Point]] = {head: [] for head in found.heads}
    for run in found.in_order():
        if length := found.length(run.data, run.head):
            lines[run.head].append(Point(name=run.data, number=length.value, interval=length.interval))
    ticks = lengths(max(run.report.num_spec_tokens for run in found.runs))
    title, label = "Mean acceptance length by data set", "data set"
    return Lines(title=title, label=label, ticks=ticks, show=plain, lines=lines, joined=False)


def _curves(found: Comparison, data: str) -> Lines:
    """Joint acceptance over draft position, a line for each head."""
    lines = {  # one style for one head everywhere
        head: [
            Point(name=str(i), number=each.value, interval=each.interval)
            for of in [found.of(data, head)]
            for i, each in enumerate(of.positions_over_all_steps if of else ())
        ]
        for head in found.heads
    }
    return curves(f"Acceptance by draft position on {data}", lines)


def _runs_table(found: Comparison, path: Path) -> Table:
    """Where each run is, seen from ``path``, with a link to its own report."""
    below = [Path(os.path.relpath(run.directory, path)) for run in found.runs]
    rows = tuple(
        {
            "data": run.data,
            "head": run.head,
            "drafter": checkpoint_name(run.drafter),
            "directory": str(directory),
            "report": quote(os.fsencode(directory / "report.html")),
        }
        for run, directory in zip(found.runs, below, strict=True)
    )
    return Table(
        title="Runs",
        note="each directory holds report.html, completions.jsonl and passes.jsonl of one run",
        columns=(
            Column(name="data"),
            *(Column(name=name, wraps=True) for name in ("head", "drafter")),
            Column(name="directory", wraps=True, link="report"),
        ),
        rows=rows,
    )
