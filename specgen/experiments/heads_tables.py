"""The tables and sentences of a comparison; a table for a paper in Markdown and LaTeX; as CSV every figure."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specgen.config import ExportName
from specgen.config.json_fields import load_json
from specgen.experiments.head_figures import PLAN, Comparison, HeadPair, is_significant
from specgen.experiments.rounds import PLAIN, disturbed
from specgen.record.files import write_json, write_text
from specgen.report.acceptance import Acceptance
from specgen.report.charts import Lines, Point, lengths
from specgen.report.display import (
    DASH,
    checkpoint_name,
    count,
    from_here,
    hundredths,
    p_value,
    percent,
    plain,
    rate,
    ratio,
    several,
)
from specgen.report.grid import Figure, Grid, chosen, field_of
from specgen.report.intervals import Estimate, Interval
from specgen.report.origin import origin
from specgen.report.page import Page
from specgen.report.paired_requests import PairedFigure
from specgen.report.report import DEFINITIONS
from specgen.report.table import Column, Row, Table, csv_text
from specgen.report.tables import curves, empty_texts, failures
from specgen.report.terminal import Part, definitions, heading

_LENGTH = (
    "mean acceptance length",
    "1 + accepted drafts / verify steps, those without drafts too; no prefill, no padding",
)
_PAIRED = (
    "difference",
    "of the mean acceptance length, paired by request; p by t test over conversations, after Holm over its table's "
    "rows; omitted if all differences are equal",
)
_ACCEPTANCE = (
    "acceptance at token i",
    "steps that accepted more than i drafts / verify steps, those without drafts too (joint); 1 + their sum is the "
    "length",
)
_POINTS = (
    "token i",
    "difference of the acceptance at token i in points; * p < 0.05 after Holm over all of them",
)
_SPEED = (
    "tokens/s",
    "the median of rounds in which all took turns; ratios are means within a round, with t intervals, as of tune",
)
_CAPTION = ("model", "draft tokens (K)", "draft sampling", "template", "sampling")  # of the settings
_KEYS = ("data", "head", "category")  # columns that say what a row is of
_SPECIAL = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def of_heads(found: Comparison) -> Iterator[Part]:
    """What the terminal shows of a comparison."""
    yield heading(settings(found))
    paths = {run.head: run.drafter for run in reversed(found.runs)}  # of equal weights the first
    yield "\n".join(f"{head}  {from_here(paths[head])}" for head in found.heads)
    yield "\n".join(notes(found))
    yield from tables(found)
    yield "\n".join(verdicts(found))
    yield definitions(terms(found))


def settings(found: Comparison) -> dict[str, str]:
    """The settings that all runs share, by label."""
    own = {"drafter", "drafter batch", "data", "rows set their own"}
    first, *others = (run.manifest.get("settings", {}) for run in found.runs)
    return {
        name: checkpoint_name(text) if name == "model" else text
        for name, text in first.items()
        if name not in own and all(each.get(name) == text for each in others)
    }


def notes(found: Comparison) -> Iterator[str]:
    """Sentences on what a reader has to know of the runs beyond their numbers."""
    for name, values in found.unlike.items():
        each = dict.fromkeys(map(str, values))
        yield f"The runs also differ in {name}: {', '.join(each)}."
    own = {run.data: run.manifest["data"].get("own_parameters", []) for run in found.runs}
    for data, names in own.items():
        if names:
            yield f"Rows of {data} set their own {', '.join(names)}."
    for run in found.runs:
        if without := run.report.num_steps_without_drafts:
            steps = f"{count(without)} of {count(without + run.report.num_drafts)} steps"
            yield f"{run.head} on {run.data}: {steps} had no drafts and gave one token each."
        if (got := run.report.received) is not None:
            length = "the length also counts drafts accepted behind their ends"
            yield f"{run.head} on {run.data}: texts got {plain(got)} tokens per step ({length})."
        if failed := failures(run.report):
            yield f"{run.head} on {run.data}: {failed}: see its errors.jsonl."
        if number := run.report.num_empty:
            yield f"{run.head} on {run.data}: {empty_texts(number, run.report.num_requests)}"
    yield from _disturbances(found)[1]


def _disturbances(found: Comparison) -> tuple[list[str], list[str]]:
    """What disturbed the rounds of speeds: that the machine was busy, and everything else."""
    each = [
        (data, disturbed(rounds.measured((PLAIN, *found.heads)))) for data, rounds in found.speeds.items()
    ]
    busy, others = (
        [f"Speeds on {data}: {text}." for data, told in each for text in told[at]] for at in (0, 1)
    )
    return busy, others


def terms(found: Comparison) -> list[tuple[str, str]]:
    """Definitions of what the tables name."""
    paired = (_PAIRED, _POINTS) if any(pair.length for pair in found.pairs) else ()
    speeds = (_SPEED,) if any(map(len, found.speeds.values())) else ()
    return [_LENGTH, _ACCEPTANCE, DEFINITIONS[-1], *paired, *speeds]


def tables(found: Comparison) -> Iterator[Table]:
    """Lengths, acceptance by position, paired differences, categories, speeds."""
    yield _lengths_table(found)
    yield _positions_table(found)
    if found.pairs:
        yield _pairs_table(found)
    yield _categories_table(found)
    yield _speeds_table(found)


def _lengths_table(found: Comparison) -> Table:
    """Mean acceptance length: a row for each data set, a column for each head."""
    groups: list[tuple[Row, str | None]] = []
    for data in found.data:
        numbers = dict.fromkeys(count(run.report.num_requests) for run in found.on(data))
        groups.append(({"data": data, "requests": " or ".join(numbers)}, data))
    if len(groups) > 1:
        groups.append(({"data": "mean", "requests": ""}, None))
    lengths = [
        Figure.estimated(f"length of {head}", partial(found.length, head=head), title=head)
        for head in found.heads
    ]
    return Grid(groups=groups, figures=lengths).table(
        [Column(name="data", title="length"), Column(name="requests")],
        "Mean acceptance length",
        note="over all steps, with 95 % intervals; 1 is plain decoding; mean: of the data sets, with equal weights",
        num_keys=1,
    )


def _positions_table(found: Comparison) -> Table:
    """Joint acceptance: a row for each data set and head, a column for each draft position."""
    longest = max(len(run.report.acceptance) for run in found.runs)
    return Grid(
        groups=[
            ({"data": run.data, "head": run.head}, dict(enumerate(run.positions))) for run in found.in_order()
        ],
        figures=[
            Figure.estimated(f"token {i}", methodcaller("get", i), show=percent) for i in range(longest)
        ],
    ).table(
        [Column(name="data", title="acceptance"), Column(name="head", wraps=True)],
        "Acceptance by position",
        note="joint, over all steps, with 95 % intervals",
    )


def _pairs_table(found: Comparison) -> Table:
    """Paired differences: a row for each data set and two heads."""

    def at(position: int) -> Figure:
        return Figure(name=f"token {position}", of=lambda pair: _points(pair, position))

    return Grid(
        groups=[({"data": pair.data, "heads": f"{pair.ours} - {pair.first}"}, pair) for pair in found.pairs],
        figures=[
            Figure(name="requests", of=lambda pair: pair.num_requests),
            Figure(
                name="identical",
                title="same texts",
                # without a step nothing was verified
                of=lambda pair: pair.num_identical if pair.length else None,
            ),
            *_paired(lambda pair: pair.length),
            *(at(i) for i in range(max(len(pair.positions) for pair in found.pairs))),
        ],
    ).table(
        [Column(name="data", title="paired"), Column(name="heads", wraps=True)],
        "Paired differences",
        note="the first head less the second, over the requests that both answered",
    )


def _points(pair: HeadPair, position: int) -> str:
    """The difference at a position in points, with a star if it is significant."""
    if position >= len(pair.positions):
        return DASH
    figure = pair.positions[position]
    return hundredths(figure.paired.difference) + "*" * is_significant(figure)


def _paired(
    of: Callable[[Any], PairedFigure | None], whose: str = "", title: str | None = None
) -> tuple[Figure, Figure]:
    """A difference and its p; ``whose`` they are where a row has several."""
    return (
        Figure.estimated(f"difference{whose}", field_of(of, "difference"), title=title),
        Figure(name=f"p{whose}", title="p", show=p_value, of=field_of(of, "p")),
    )


def _categories_table(found: Comparison) -> Table:
    """Lengths by category, and how each head differs from the first."""
    first, *others = found.heads
    groups = [
        ({"data": data, "category": category}, (data, category))
        for data in found.data
        for category in dict.fromkeys(
            name for run in found.in_order() if run.data == data for name in run.report.categories
        )
    ]

    def difference(head: str) -> tuple[Figure, Figure]:
        def of(group: tuple[str, str]) -> PairedFigure | None:
            return next(iter(found.paired(group[0], head, group[1])), None)

        return _paired(of, f" of {head}", f"{head} - {first}")

    def length(head: str) -> Figure:  # without an interval, which would leave no room for the differences
        of = field_of(lambda group: found.length(group[0], head, group[1]), "value")
        return Figure(name=f"length of {head}", title=head, show=plain, of=of)

    differences = [figure for head in others for figure in difference(head)]
    return Grid(groups=groups, figures=[*map(length, found.heads), *differences]).table(
        [Column(name="data", title="category"), Column(name="category", title="", wraps=True)],
        "By category",
        note="mean acceptance length, and the paired difference from the first head",
        num_keys=2 + len(found.heads),
        group=2,
    )


def _speeds_table(found: Comparison) -> Table:
    """Output tokens per second, and ratios within a round: to plain decoding and to the first head."""
    first = found.heads[0]
    groups = [
        ({"data": data, "arm": arm}, (data, arm))
        for data in found.data
        for arm in (PLAIN, *found.heads)
        if found.rounds(data).speed(arm) is not None
    ]

    def times(group: tuple[str, str], other: str) -> Estimate | None:
        data, arm = group
        drafted = {run.head for run in found.on(data) if run.report.num_drafts}
        return found.rounds(data).speedup(arm, other) if arm in drafted and arm != other else None

    ratios = {"x plain": PLAIN, **({f"x {first}": first} if len(found.heads) > 1 else {})}
    speeds = [
        Figure(name="tokens/s", show=rate, of=lambda group: found.rounds(group[0]).speed(group[1])),
        *(
            Figure.estimated(title, partial(times, other=other), show=ratio)
            for title, other in ratios.items()
        ),
    ]
    return Grid(groups=groups, figures=speeds).table(
        [Column(name="data", title="speed"), Column(name="arm", title="", wraps=True)],
        "Speed",
        note="the median of rounds in which all took turns; ratios within a round, with 95 % intervals",
    )


def ranked(found: Comparison, data: str) -> list[str]:
    """The heads on ``data``, that of the highest mean acceptance length first."""
    lengths = {run.head: found.length(data, run.head) for run in found.on(data)}
    return sorted(lengths, key=lambda head: length.value if (length := lengths[head]) else 1.0, reverse=True)


def leads(found: Comparison, data: str, num_others: int | None = None) -> bool:
    """Whether the best head is significantly better than every other one, or than the best ``num_others`` of them."""
    best, *others = ranked(found, data)

    def is_behind(other: str) -> bool:
        pair = found.pair(data, best, other)
        figure = pair and pair.length
        return bool(
            pair
            and figure
            and is_significant(figure)
            and (figure.paired.difference > 0) == (pair.ours == best)
        )

    return bool(others) and all(map(is_behind, others[:num_others]))


def verdicts(found: Comparison) -> Iterator[str]:
    """A line for each data set of several heads; last, if the machine was busy while speeds were measured, that."""
    for data in found.data:
        best, *others = ranked(found, data)
        if others:
            differs = "differs" if leads(found, data, 1) else "does not differ"
            yield f"{data}, by length: best {best}; second {others[0]}, which {differs} significantly."
    yield from _disturbances(found)[0]


# --- files ----------------------------------------------------------------------------------------


def exported(found: Comparison, name: ExportName) -> str:
    """``found`` in the format ``name``; ends with a line break."""
    if name == "csv":
        return _csv(found)
    papers = [
        _paper(name, table, f"{table.title}: {table.note}." if table.title else _note(found))
        for table in (_heads_table(found), _positions_table(found), _categories_table(found))
        if table.rows
    ]
    start, end = ("% ", "") if name == "latex" else ("<!-- ", " -->")
    comments = [_settings_text(found, in_caption=False), "needs the package booktabs" * (name == "latex")]
    return "\n\n".join([*papers, *(f"{start}{text}{end}" for text in comments if text)]) + "\n"


def _with_speed(found: Comparison) -> bool:
    return any(found.rounds(data).speedup(head, PLAIN) for data in found.data for head in found.heads)


def _note(found: Comparison) -> str:
    speed = (
        "speed: output tokens per second over plain decoding, the mean of rounds in turns, with a t interval; "
        if _with_speed(found)
        else ""
    )
    return (
        "Mean acceptance length over all steps, with 95 % intervals over conversations; "
        f"{'mean: of the data sets, each with the same weight; ' if len(found.data) > 1 else ''}{speed}"
        "bold: leads every other head, paired by request, p < 0.05 after Holm. "
        f"{' '.join((f'{_settings_text(found, in_caption=True)}.', *notes(found), *_disturbances(found)[0]))}"
    )


def _heads_table(found: Comparison) -> Table:
    """Lengths and, if there are some, speeds: a row for each head, which says in which columns it leads."""
    figures, best = list[Figure](), dict[str, str]()
    for at, data in enumerate(found.data):
        length = Figure.estimated(f"length {at}", partial(found.length, data), title=f"{data} length")
        figures.append(length)
        if leads(found, data):
            best[length.name] = ranked(found, data)[0]
        if _with_speed(found):
            times = partial(found.rounds(data).speedup, other=PLAIN)
            figures.append(Figure.estimated(f"speed {at}", times, title=f"{data} speed", show=ratio))
    if len(found.data) > 1:
        figures.append(Figure.estimated("mean", partial(found.length, None), title="mean length of all"))
    groups = [
        ({"head": head, **{f"{name} leads": head == each for name, each in best.items()}}, head)
        for head in found.heads
    ]
    return Grid(groups=groups, figures=figures).table([Column(name="head")], "")


def _settings_text(found: Comparison, *, in_caption: bool) -> str:
    """The settings that a caption has, or the machine's part of them, for a comment."""
    shared = settings(found).items()
    return "; ".join(f"{name} {text}" for name, text in shared if (name in _CAPTION) == in_caption)


def _paper(name: ExportName, table: Table, caption: str) -> str:
    """``table`` in Markdown, or in LaTeX for the package booktabs."""
    latex = name == "latex"

    def escaped(text: str) -> str:
        return "".join(_SPECIAL.get(letter, letter) for letter in text) if latex else text.replace("|", "\\|")

    def cell(column: Column, row: Row) -> str:
        text, ends = escaped(column.text(row)), column.ends(row)
        if row.get(f"{column.name} leads"):
            text = rf"\textbf{{{text}}}" if latex else f"**{text}**"
        if ends in ("", DASH):
            return text
        return text + (rf" {{\scriptsize {ends}}}" if latex else f" {ends}")

    is_key = [each.name in _KEYS for each in table.columns]
    titles = [each.name if key else each.heading for each, key in zip(table.columns, is_key, strict=True)]
    heading = list(map(escaped, titles))
    rows = [[cell(column, row) for column in table.columns] for row in table.rows]
    if not latex:
        lines = (heading, ["---" if key else "---:" for key in is_key], *rows)
        return "\n".join(f"| {' | '.join(row)} |" for row in lines) + f"\n\n{caption}"
    sides = "".join("l" if key else "r" for key in is_key)
    above, *below = (f"{' & '.join(row)} \\\\\n" for row in (heading, *rows))
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{escaped(caption)}}}\n\\begin{{tabular}}{{{sides}}}\n"
        f"\\toprule\n{above}\\midrule\n{''.join(below)}\\bottomrule\n\\end{{tabular}}\n\\end{{table}}"
    )


def _csv(found: Comparison) -> str:
    """A row for each run, each of its categories, and each head's mean over data sets; unknown values are empty."""
    rows: list[dict[str, Any]] = []
    for run in found.runs:
        for category, group in ((None, run.report), *run.report.categories.items()):
            of, paired = run.acceptance.get(category), found.paired(run.data, run.head, category)
            row: dict[str, Any] = {"data": run.data, "category": category or "", "head": run.head}
            row |= {"drafter": run.drafter, "num_spec_tokens": run.report.num_spec_tokens}
            row |= {each.name: each.value(group) for each in chosen("csv", [group])}
            row |= _length_cells(found.length(run.data, run.head, category), of)
            for i, each in enumerate(of.positions_over_all_steps if of else ()):
                row |= _cells(f"acceptance_{i}", each)
            for i, place in enumerate(group.acceptance):
                row |= _cells(f"conditional_{i}", (place.conditional, place.conditional_ci95))
            for level in group.confidence.levels:
                name = f"confidence_{level.at_least:g}"
                row |= {f"{name}_drafts": level.drafts, f"{name}_accepted": level.accepted}
                row |= _cells(name, (level.share, level.ci95))
            row["against"] = found.heads[0] if paired else None
            for i, figure in enumerate(paired, start=-1):
                end = "" if i < 0 else f"_{i}"
                row |= _cells(f"difference{end}", figure.difference)
                row |= {f"p{end}": figure.paired.p, f"p_holm{end}": figure.p}
            speeds, head = found.rounds(run.data), run.head
            row["tokens_per_second"] = None if category else speeds.speed(head)
            row |= _cells("times_plain", None if category else speeds.speedup(head, PLAIN))
            rows.append(row)
    for head in found.heads if len(found.data) > 1 else ():
        cells = _length_cells(found.length(None, head), *(found.of(data, head) for data in found.data))
        rows.append({"data": "(mean of the data sets)", "head": head} | cells)
    return csv_text(dict.fromkeys(name for row in rows for name in row), rows)


def _length_cells(length: Estimate | None, *parts: Acceptance | None) -> dict[str, float | None]:
    """A length, or the mean of those of ``parts``, and of how many conversations."""
    number = sum(part.over_all_steps().groups for part in parts if part)
    cells = _cells("length", length)
    return {"num_conversations": length and number, "length_over_all_steps": cells.pop("length"), **cells}


def _cells(name: str, estimate: tuple[float | None, Interval | None] | None) -> dict[str, float | None]:
    value, interval = estimate or (None, None)
    low, high = interval or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


# --- the page ------------------------------------------------------------------------------------------

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
    lines: dict[str, list[Point]] = {head: [] for head in found.heads}  # one style for one head everywhere
    for run in found.on(data):
        lines[run.head] = [
            Point(name=str(i), number=each.value, interval=each.interval)
            for i, each in enumerate(run.positions)
        ]
    return curves(f"Acceptance by draft position on {data}", lines)


def _runs_table(found: Comparison, path: Path) -> Table:
    """Where each run is, seen from ``path``, with a link to its own report."""
    below = {run.directory: Path(os.path.relpath(run.directory, path)) for run in found.runs}
    return Grid(
        groups=[
            ({"report": quote(os.fsencode(below[run.directory] / "report.html"))}, run) for run in found.runs
        ],
        figures=[
            Figure(name="data"),
            Figure(name="head", wraps=True),
            Figure(name="drafter", wraps=True, of=lambda run: checkpoint_name(run.drafter)),
            Figure(name="directory", wraps=True, link="report", of=lambda run: str(below[run.directory])),
        ],
    ).table(
        [],
        "Runs",
        note="each directory holds report.html, completions.jsonl and passes.jsonl of one run",
    )
