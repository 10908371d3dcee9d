"""``comparison.json`` and ``compare.html`` of a comparison."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from specgen.config.json_fields import load_json
from specgen.experiments.head_figures import PLAN, Comparison, HeadPair
from specgen.experiments.heads_tables import notes, settings, tables, terms, verdicts
from specgen.record.files import Rows, write_json, write_text
from specgen.record.record_rows import RequestRow
from specgen.report.charts import Lines, Point, lengths
from specgen.report.display import checkpoint_name, plain, several
from specgen.report.origin import origin
from specgen.report.page import Page
from specgen.report.run_texts import keys_of, known_tokenizer, texts_of
from specgen.report.table import Column, Table
from specgen.report.tables import curves
from specgen.report.text_list import Entry, ShownText, TextList, sources, within
from specgen.text.tokenizer import Tokenizer

_NAMED = 2  # heads and data sets that a title names
_SHOWN = 5  # of the requests that moved most, on either side
_PROMPT = 80  # characters of one
_SPECIAL = re.compile(r"<[|/\w]+>")  # tokens of chat templates
_PAGE_BYTES = 2_000_000  # of texts


def write_comparison(found: Comparison, path: Path) -> None:
    """Write the page and the figures of ``found`` into the comparison's directory ``path``."""
    record = load_json(path / PLAN, "compare again")
    texts = moved_texts(found, known_tokenizer(found.runs[0].manifest["engine"]["model"]))
    write_text(path / "compare.html", page(found, record, path, texts))
    write_json(path / "comparison.json", found.to_json())


def page(found: Comparison, record: dict[str, Any], path: Path, texts: TextList | None = None) -> str:
    """The comparison as HTML for the directory ``path``, ``texts`` last.

    ``record`` says when, where and by which command it was made.
    """
    return Page(
        title=_title(found),
        settings=settings(found),
        sentence="\n".join(verdicts(found)),
        tables=[*_tables(found), _runs_table(found, path)],
        notes=dict(terms(found)),
        findings=list(notes(found)),
        origin=origin(record),
        texts=texts,
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


def last_words(prompt: object) -> str:
    """The end of a prompt as the model saw it, without the tokens of chat templates; cut between words."""
    words = " ".join(_SPECIAL.sub(" ", str(prompt)).split())
    if len(words) <= _PROMPT:
        return words
    end = words[-_PROMPT:]
    return f"… {end.partition(' ')[2] or end}"


def moved_texts(found: Comparison, tokenizer: Tokenizer | None) -> TextList | None:
    """The texts of the requests whose acceptance length differs most from the first head's, the largest gap first.

    A few longer and a few shorter ones of every other head. Without ``tokenizer`` texts have one colour. None where no
    request has moved.
    """
    shown: list[tuple[float, HeadPair, str, list[str]]] = []  # gap, heads, request, what is said of each head
    for pair in found.pairs:
        if pair.first != found.heads[0]:
            continue
        both = pair.requests.with_steps()
        sides = {pair.first: both.first.counts, pair.ours: both.ours.counts}
        by_head = {head: 1 + each.num_accepted / each.num_steps for head, each in sides.items()}
        gain = by_head[pair.ours] - by_head[pair.first]
        order = np.argsort(-gain, kind="stable").tolist()
        gains = [row for row in order[:_SHOWN] if gain[row] > 0]
        losses = [row for row in order[-_SHOWN:] if gain[row] < 0]
        for row in (*gains, *losses):
            notes = [
                f"{head} {plain(float(by_head[head][row]))} in {several(int(each.num_steps[row]), 'step')}"
                for head, each in sides.items()
            ]
            shown.append((abs(float(gain[row])), pair, both.ours.names[row], notes))
    if not shown:
        return None
    shown.sort(key=lambda each: -each[0])
    rows = {(run.data, run.head): Rows(run.directory / "completions.jsonl") for run in found.runs}
    entries = within(
        (_entry(pair, name, notes, rows, tokenizer) for _, pair, name, notes in shown), _PAGE_BYTES
    )
    return TextList(
        title="The requests that moved most",
        note="both heads' tokens by how they came, the largest differences of their acceptance lengths first",
        entries=entries,
        keys=keys_of(entries),
    )


def _entry(
    pair: HeadPair,
    name: str,
    notes: Sequence[str],
    rows: Mapping[tuple[str, str], Rows],
    tokenizer: Tokenizer | None,
) -> Entry:
    answers = {head: rows[pair.data, head][name] for head in (pair.first, pair.ours)}
    category = answers[pair.ours].get("category")
    labels = {"heads": f"{pair.ours} against {pair.first}", "data": pair.data}
    return Entry(
        title=f"{pair.data} {name}",
        labels=labels | ({} if category is None else {"category": category}),
        note=", ".join(notes),
        question=last_words(answers[pair.ours]["prompt"]),
        texts=[
            ShownText(name=", ".join(filter(None, (head, text.name))), spans=text.spans)
            for head, row in answers.items()
            for text in texts_of(row, sources(RequestRow.of_row(row)), tokenizer)
        ],
    )
