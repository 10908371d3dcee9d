"""A comparison as a table for a paper: Markdown, LaTeX, or CSV with one line for each data set, head and category."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specgen.config import ExportName
from specgen.experiments.head_figures import Comparison, Length
from specgen.experiments.heads_tables import leader, leads, mean_length, notes, settings
from specgen.experiments.rounds import PLAIN
from specgen.report.display import DASH, between, plain, ratio
from specgen.report.table import csv_text

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
    return any(found.speeds.times(data, head, PLAIN) for data in found.runs.data for head in found.runs.heads)


def _note(found: Comparison) -> str:
    speed = (
        "speed: output tokens per second over plain decoding, the median of rounds in turns [lowest, highest]; "
        if _with_speed(found)
        else ""
    )
    shared = "; ".join(f"{name} {text}" for name, text in settings(found).items())
    return (
        "Mean acceptance length over all steps, with 95 % intervals over conversations; "
        f"{'mean: of the data sets, each with the same weight; ' if len(found.runs.data) > 1 else ''}{speed}"
        "bold: leads every other head, paired by request, p < 0.05 after Holm. "
        f"{' '.join((f'{shared}.', *notes(found)))}"
    )


def _table(
    found: Comparison, bold: Callable[[str], str], small: Callable[[str], str]
) -> tuple[list[tuple[str | None, str]], dict[str, list[str]]]:
    """Columns (data set, or None for their mean, and figure), and the cells of each head."""
    kinds = ("length", "speed") if _with_speed(found) else ("length",)
    several = len(found.runs.data) > 1
    names: list[tuple[str | None, str]] = [(data, kind) for data in found.runs.data for kind in kinds]
    names += [(None, "length")] * several

    def cells(head: str) -> Iterator[str]:
        for data in found.runs.data:
            best = leads(found, data) and leader(found, data) == head
            yield _length(found.length(data, head), bold if best else str, small)
            if "speed" in kinds:
                times = found.speeds.times(data, head, PLAIN)
                yield ratio(times.median) + small(between(times.ends, ratio)) if times else DASH
        if several:
            yield _length(mean_length(found, head), str, small)

    return names, {head: list(cells(head)) for head in found.runs.heads}


def _length(length: Length | None, mark: Callable[[str], str], small: Callable[[str], str]) -> str:
    if length is None:
        return DASH
    return mark(plain(length.value)) + (small(between(length.interval, plain)) if length.interval else "")


def _markdown(found: Comparison) -> str:
    names, cells = _table(found, lambda text: f"**{text}**", lambda text: f" {text}")
    rows = [["head", *(f"{data or 'mean'} {kind}" for data, kind in names)], ["---", *["---:"] * len(names)]]
    rows += [[head, *each] for head, each in cells.items()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", _note(found)]) + "\n"


def _latex(found: Comparison) -> str:
    """For the package booktabs."""
    from pandas import DataFrame, MultiIndex  # takes half a second

    names, cells = _table(found, lambda text: rf"\textbf{{{text}}}", lambda text: rf" {{\scriptsize {text}}}")
    columns = [
        (_escaped(data) if data else r"\emph{mean}", {"length": r"$\tau$"}.get(kind, kind))
        for data, kind in names
    ]
    table = DataFrame(
        list(cells.values()),
        index=list(map(_escaped, cells)),
        columns=MultiIndex.from_tuples(columns, names=["", "head"]),
    )
    text: str = table.style.to_latex(
        hrules=True,
        multicol_align="c",
        column_format="l" + "r" * len(names),
        position_float="centering",
        caption=rf"$\tau$: {_escaped(_note(found))}",
    )
    return text + "% needs the package booktabs\n"


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


# --- CSV ------------------------------------------------------------------------------------------


def _csv(found: Comparison) -> str:
    rows = list(_rows(found))
    names = dict.fromkeys(name for row in rows for name in row)
    return csv_text(names, rows)


def _rows(found: Comparison) -> Iterator[dict[str, Any]]:
    """A row for each run, and for each of its categories; unknown values are empty."""
    first = found.runs.heads[0]
    for run in found.runs.runs:
        pair = found.of(run.data, run.head, first) if run.head != first else None
        groups = {None: run.report, **run.report["categories"]}
        for category, group in groups.items():
            figure = (
                None
                if pair is None
                else pair.categories.get(category)
                if category is not None
                else pair.length
            )
            length = found.length(run.data, run.head, category)
            yield {
                "data": run.data,
                "category": category or "",
                "head": run.head,
                "drafter": run.drafter,
                "num_spec_tokens": run.report["num_spec_tokens"],
                **{name: group[name] for name in _COUNTED},
                "length_over_all_steps": length.value if length else None,
                **_ends("length", length.interval if length else None),
                **{f"acceptance_{i}": each["rate"] for i, each in enumerate(group["acceptance"])},
                "against": first if figure else None,
                "difference": figure.paired.difference if figure else None,
                **_ends("difference", figure.paired.interval if figure else None),
                "p": figure.paired.p if figure else None,
                "p_holm": figure.p if figure else None,
                **(_speed(found, run.data, run.head) if category is None else {}),
            }


def _ends(name: str, interval: Sequence[float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _speed(found: Comparison, data: str, head: str) -> dict[str, float | None]:
    row: dict[str, float | None] = {}
    spreads = {
        "tokens_per_second": found.speeds.speed(data, head),
        "times_plain": found.speeds.times(data, head, PLAIN),
    }
    for name, spread in spreads.items():
        row[name] = spread.median if spread else None
        row |= _ends(name, spread.ends if spread else None)
    return row
