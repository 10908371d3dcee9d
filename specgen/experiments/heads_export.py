"""A comparison as a table for a paper, in Markdown and LaTeX, and as CSV with every figure."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from specgen.config import ExportName
from specgen.experiments.head_figures import Comparison
from specgen.experiments.heads_tables import (
    categories_table,
    disturbances,
    leader,
    leads,
    mean_of,
    notes,
    positions,
    positions_table,
    settings,
)
from specgen.experiments.rounds import PLAIN
from specgen.report.acceptance import Acceptance, Speculation
from specgen.report.display import DASH, ratio
from specgen.report.grid import Figure, Grid, chosen, field_of
from specgen.report.intervals import Estimate, Interval
from specgen.report.paired_requests import PairedFigure
from specgen.report.table import Column, Row, Table, csv_text

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


def exported(found: Comparison, name: ExportName) -> str:
    """``found`` in the format ``name``; ends with a line break."""
    return {"md": _markdown, "latex": _latex, "csv": _csv}[name](found)


def _with_speed(found: Comparison) -> bool:
    return any(found.rounds(data).times(head, PLAIN) for data in found.data for head in found.heads)


def _note(found: Comparison) -> str:
    speed = (
        "speed: output tokens per second over plain decoding, the median of rounds in turns [lowest, highest]; "
        if _with_speed(found)
        else ""
    )
    return (
        "Mean acceptance length over all steps, with 95 % intervals over conversations; "
        f"{'mean: of the data sets, each with the same weight; ' if len(found.data) > 1 else ''}{speed}"
        "bold: leads every other head, paired by request, p < 0.05 after Holm. "
        f"{' '.join((f'{_said(found, in_caption=True)}.', *notes(found), *disturbances(found)[0]))}"
    )


def _heads_table(found: Comparison) -> Table:
    """Lengths and, if there are some, speeds: a row for each head, which says in which columns it leads."""
    figures, best = list[Figure](), dict[str, str]()
    for at, data in enumerate(found.data):
        length = Figure.estimated(f"length {at}", partial(found.length, data), title=f"{data} length")
        figures.append(length)
        if leads(found, data):
            best[length.name] = leader(found, data)
        if _with_speed(found):
            times = field_of(partial(found.rounds(data).times, other=PLAIN), "estimate")
            figures.append(Figure.estimated(f"speed {at}", times, title=f"{data} speed", show=ratio))
    if len(found.data) > 1:
        figures.append(Figure.estimated("mean", partial(mean_of, found), title="mean length"))
    groups = [
        ({"head": head, **{f"{name} leads": head == each for name, each in best.items()}}, head)
        for head in found.heads
    ]
    return Grid(groups=groups, figures=figures).table([Column(name="head")], "")


def _said(found: Comparison, *, in_caption: bool) -> str:
    """The settings that a caption has, or the machine's part of them, for a comment."""
    said = settings(found).items()
    return "; ".join(f"{name} {text}" for name, text in said if (name in _CAPTION) == in_caption)


def _tables(
    found: Comparison, escaped: Callable[[str], str], bold: str, small: str
) -> Iterator[tuple[list[str], list[list[str]], str]]:
    """Headings, cells and caption of the table of heads, then of those by position and by category."""

    def cell(column: Column, row: Row) -> str:
        text, ends = escaped(column.text(row)), column.ends(row)
        text = bold.format(text) if row.get(f"{column.name} leads") else text
        return text + (small.format(ends) if ends not in ("", DASH) else "")

    for table in (_heads_table(found), positions_table(found), categories_table(found)):
        headings = [each.name if each.name in _KEYS else each.heading for each in table.columns]
        cells = [[cell(column, row) for column in table.columns] for row in table.rows]
        if cells:
            yield headings, cells, f"{table.title}: {table.note}." if table.title else _note(found)


def _markdown(found: Comparison) -> str:
    parts = []
    for headings, cells, caption in _tables(found, str, "**{}**", " {}"):
        sides = ["---" if name in _KEYS else "---:" for name in headings]
        rows = (headings, sides, *cells)
        lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        parts += ["\n".join(lines), caption]
    parts += [f"<!-- {details} -->" for details in [_said(found, in_caption=False)] if details]
    return "\n\n".join(parts) + "\n"


def _latex(found: Comparison) -> str:
    """For the package booktabs."""
    main, *others = _tables(found, _escaped, r"\textbf{{{}}}", r" {{\scriptsize {}}}")
    kinds, several = [r"$\tau$", "speed"][: 1 + _with_speed(found)], len(found.data) > 1
    over = [_escaped(data) for data in found.data]  # each over its columns
    if len(kinds) > 1:
        over = [rf"\multicolumn{{{len(kinds)}}}{{c}}{{{title}}}" for title in over]
    headings = [
        ["", *over, *([r"\emph{mean}"] * several)],
        ["head", *kinds * len(over), *kinds[:1] * several],
    ]
    tables = [_tabular(headings, main[1], rf"$\tau$: {_escaped(main[2])}")]
    tables += [_tabular([list(map(_escaped, each))], cells, _escaped(text)) for each, cells, text in others]
    details = [f"% {text}\n" for text in [_said(found, in_caption=False)] if text]
    return "".join([*tables, *details, "% needs the package booktabs\n"])


def _tabular(headings: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], caption: str) -> str:
    sides = "".join("l" if name in _KEYS else "r" for name in headings[-1])
    above, below = ("".join(f"{' & '.join(row)} \\\\\n" for row in part) for part in (headings, rows))
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n\\begin{{tabular}}{{{sides}}}\n"
        f"\\toprule\n{above}\\midrule\n{below}\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


# --- CSV ------------------------------------------------------------------------------------------


def _csv(found: Comparison) -> str:
    rows = list(_rows(found))
    names = dict.fromkeys(name for row in rows for name in row)
    return csv_text(names, rows)


def _rows(found: Comparison) -> Iterator[dict[str, Any]]:
    """A row for each run, each of its categories, and each head's mean over data sets; unknown values are empty."""
    first = found.heads[0]
    for run in found.runs:
        pair = found.pair(run.data, run.head, first) if run.head != first else None
        groups: list[tuple[str | None, Speculation]] = [(None, run.report), *run.report.categories.items()]
        for category, group in groups:
            figure = None
            if pair is not None:
                figure = pair.length if category is None else pair.categories.get(category)
            length = found.length(run.data, run.head, category)
            acceptance = found.of(run.data, run.head, category)
            row = {
                "data": run.data,
                "category": category or "",
                "head": run.head,
                "drafter": run.drafter,
                "num_spec_tokens": run.report.num_spec_tokens,
                **{each.name: each.value(group) for each in chosen("csv", [group])},
                **_length_cells(length, acceptance),
                **_acceptance_cells(acceptance, group),
                "against": first if figure else None,
                **_difference_cells("", figure),
            }
            if category is None:
                for i, each in enumerate(pair.positions if pair else ()):
                    row |= _difference_cells(f"_{i}", each)
                rounds = found.rounds(run.data)
                speed, times = rounds.speed(run.head), rounds.times(run.head, PLAIN)
                row |= _cells("tokens_per_second", None if speed is None else speed.estimate)
                row |= _cells("times_plain", None if times is None else times.estimate)
            yield row
    for head in found.heads if len(found.data) > 1 else ():
        parts = [found.of(data, head) for data in found.data]
        cells = _length_cells(mean_of(found, head), *parts)
        yield {"data": "(mean of the data sets)", "head": head, **cells}


def _length_cells(length: Estimate | None, *parts: Acceptance | None) -> Row:
    """A length, or the mean of those of ``parts``."""
    numbers = [part.over_all_steps().groups for part in parts if part]
    cells = _cells("length", length)
    return {
        "num_conversations": length and sum(numbers),
        "length_over_all_steps": cells.pop("length"),
        **cells,
    }


def _acceptance_cells(acceptance: Acceptance | None, group: Speculation) -> Row:
    """By position, over all steps and (conditional) over those that accepted all before; and by confidence."""
    row: dict[str, Any] = {}
    for i, each in enumerate(positions(acceptance)):
        row |= _cells(f"acceptance_{i}", each)
    for place in group.acceptance:
        row |= _cells(f"conditional_{place.position}", (place.conditional, place.conditional_ci95))
    for level in group.confidence.levels:
        name = f"confidence_{level.at_least:g}"
        ends = _cells(name, (None, level.ci95))
        del ends[name]
        row |= {f"{name}_drafts": level.drafts, f"{name}_accepted": level.accepted, **ends}
    return row


def _difference_cells(end: str, figure: PairedFigure | None) -> Row:
    """Of a paired figure; ``end`` tells that of a position from that of the length."""
    cells = _cells(f"difference{end}", None if figure is None else figure.difference)
    return {**cells, f"p{end}": figure and figure.paired.p, f"p_holm{end}": figure and figure.p}


def _cells(name: str, estimate: tuple[float | None, Interval | None] | None) -> dict[str, float | None]:
    value, interval = estimate or (None, None)
    low, high = interval or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}
