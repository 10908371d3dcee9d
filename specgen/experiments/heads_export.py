"""A comparison as a table for a paper, in Markdown and LaTeX, and as CSV with every figure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from specgen.config import ExportName
from specgen.experiments.head_figures import Comparison, Length
from specgen.experiments.heads_tables import (
    categories_table,
    disturbances,
    leader,
    leads,
    mean_length,
    notes,
    positions_table,
    settings,
)
from specgen.experiments.rounds import PLAIN
from specgen.report.acceptance import Speculation
from specgen.report.display import DASH, between, plain, ratio
from specgen.report.paired_requests import PairedFigure
from specgen.report.table import csv_text

_CAPTION = ("model", "draft tokens (K)", "draft sampling", "template", "sampling")  # of the settings
_KEYS = ("data", "head", "category")  # columns that say what a row is of
_COUNTED = ("num_requests", "num_drafts", "num_steps_without_drafts", "num_accepted_tokens")
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
    shared = "; ".join(f"{name} {text}" for name, text in settings(found).items() if name in _CAPTION)
    return (
        "Mean acceptance length over all steps, with 95 % intervals over conversations; "
        f"{'mean: of the data sets, each with the same weight; ' if len(found.data) > 1 else ''}{speed}"
        "bold: leads every other head, paired by request, p < 0.05 after Holm. "
        f"{' '.join((f'{shared}.', *notes(found), *disturbances(found)[0]))}"
    )


def _table(
    found: Comparison, bold: Callable[[str], str], small: Callable[[str], str]
) -> tuple[list[tuple[str | None, str]], dict[str, list[str]]]:
    """Columns (data set, or None for their mean, and figure), and the cells of each head."""
    kinds = ("length", "speed") if _with_speed(found) else ("length",)
    several = len(found.data) > 1
    names: list[tuple[str | None, str]] = [(data, kind) for data in found.data for kind in kinds]
    names += [(None, "length")] * several

    def cells(head: str) -> Iterator[str]:
        for data in found.data:
            best = leads(found, data) and leader(found, data) == head
            yield _cell(found.length(data, head), bold if best else str, small)
            if "speed" in kinds:
                times = found.rounds(data).times(head, PLAIN)
                yield ratio(times.median) + small(between(times.ends, ratio)) if times else DASH
        if several:
            yield _cell(mean_length(found, head), str, small)

    return names, {head: list(cells(head)) for head in found.heads}


def _cell(length: Length | None, mark: Callable[[str], str], small: Callable[[str], str]) -> str:
    if length is None:
        return DASH
    return mark(plain(length.value)) + (small(between(length.interval, plain)) if length.interval else "")


def _details(found: Comparison) -> str:
    """The machine's part of the settings, for a comment."""
    return "; ".join(f"{name} {text}" for name, text in settings(found).items() if name not in _CAPTION)


def _others(
    found: Comparison, escaped: Callable[[str], str], small: Callable[[str], str]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The tables by position and by category: what a caption says, headings, cells."""
    for table in (positions_table(found), categories_table(found)):
        headings = [each.name if each.name in _KEYS else each.heading for each in table.columns]
        cells = [
            [
                escaped(each.text(row)) + (small(ends) if (ends := each.ends(row)) not in ("", DASH) else "")
                for each in table.columns
            ]
            for row in table.rows
        ]
        if cells:
            yield f"{table.title}: {table.note}.", headings, cells


def _markdown(found: Comparison) -> str:
    names, cells = _table(found, lambda text: f"**{text}**", lambda text: f" {text}")
    headings = ["head", *(f"{data or 'mean'} {kind}" for data, kind in names)]
    parts = [_grid(headings, [[head, *each] for head, each in cells.items()]), _note(found)]
    for caption, names_of_others, rows in _others(found, str, lambda text: f" {text}"):
        parts += [_grid(names_of_others, rows), caption]
    parts += [f"<!-- {details} -->" for details in [_details(found)] if details]
    return "\n\n".join(parts) + "\n"


def _grid(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    sides = ["---" if name in _KEYS else "---:" for name in headings]
    rows = (headings, sides, *cells)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _latex(found: Comparison) -> str:
    """For the package booktabs."""

    def small(text: str) -> str:
        return rf" {{\scriptsize {text}}}"

    names, cells = _table(found, lambda text: rf"\textbf{{{text}}}", small)
    over = [""]  # the data sets, each over its columns
    for data, each in groupby(names, key=itemgetter(0)):
        title, num = _escaped(data) if data else r"\emph{mean}", len(list(each))
        over.append(title if num == 1 else rf"\multicolumn{{{num}}}{{c}}{{{title}}}")
    headings = ["head", *({"length": r"$\tau$"}.get(kind, kind) for _, kind in names)]
    rows = [[_escaped(head), *each] for head, each in cells.items()]
    tables = [_tabular([over, headings], rows, rf"$\tau$: {_escaped(_note(found))}")]
    for caption, headings, rows in _others(found, _escaped, small):
        tables.append(_tabular([list(map(_escaped, headings))], rows, _escaped(caption)))
    details = [f"% {text}\n" for text in [_details(found)] if text]
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
            row = {
                "data": run.data,
                "category": category or "",
                "head": run.head,
                "drafter": run.drafter,
                "num_spec_tokens": run.report.num_spec_tokens,
                **{name: getattr(group, name) for name in _COUNTED},
                **_length_cells(length),
                **_acceptance_cells(length, group),
                "against": first if figure else None,
                **_difference_cells("", figure),
            }
            if category is None:
                for i, each in enumerate(pair.positions if pair else ()):
                    row |= _difference_cells(f"_{i}", each)
                row |= _speed(found, run.data, run.head)
            yield row
    for head in found.heads if len(found.data) > 1 else ():
        yield {"data": "(mean of the data sets)", "head": head, **_length_cells(mean_length(found, head))}


def _length_cells(length: Length | None) -> dict[str, Any]:
    return {
        "num_conversations": length and length.num_conversations,
        "length_over_all_steps": length and length.value,
        **_ends("length", length.interval if length else None),
    }


def _acceptance_cells(length: Length | None, group: Speculation) -> dict[str, Any]:
    """By position, over all steps and (conditional) over those that accepted all before; and by confidence."""
    row: dict[str, Any] = {}
    for i, each in enumerate(length.positions if length else ()):
        row |= {f"acceptance_{i}": each.rate, **_ends(f"acceptance_{i}", each.share_interval())}
    for place in group.acceptance:
        name = f"conditional_{place.position}"
        row |= {name: place.conditional, **_ends(name, place.conditional_ci95)}
    row |= {"auc": group.confidence.auc, "ece": group.confidence.ece}
    for level in group.confidence.levels:
        name = f"confidence_{level.at_least:g}"
        row |= {f"{name}_drafts": level.drafts, f"{name}_accepted": level.accepted, **_ends(name, level.ci95)}
    return row


def _difference_cells(end: str, figure: PairedFigure | None) -> dict[str, Any]:
    """Of a paired figure; ``end`` tells that of a position from that of the length."""
    name = f"difference{end}"
    return {
        name: figure and figure.paired.difference,
        **_ends(name, figure.paired.interval if figure else None),
        f"p{end}": figure and figure.paired.p,
        f"p_holm{end}": figure and figure.p,
    }


def _ends(name: str, interval: Sequence[float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _speed(found: Comparison, data: str, head: str) -> dict[str, float | None]:
    row: dict[str, float | None] = {}
    spreads = {
        "tokens_per_second": found.rounds(data).speed(head),
        "times_plain": found.rounds(data).times(head, PLAIN),
    }
    for name, spread in spreads.items():
        row[name] = spread.median if spread else None
        row |= _ends(name, spread.ends if spread else None)
    return row
