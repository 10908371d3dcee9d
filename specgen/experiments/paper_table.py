"""A comparison as a table for a paper: Markdown, LaTeX, or CSV with one line for each data set, head and category."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specgen.config import ExportName
from specgen.display import DASH, between, plain, ratio
from specgen.experiments.head_figures import Comparison, Length
from specgen.experiments.heads_tables import leader, leads, mean_length, notes, settings
from specgen.experiments.speed_rounds import PLAIN
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
    formats: Mapping[ExportName, Callable[[Comparison], str]] = {
        "md": _markdown,
        "latex": _latex,
        "csv": _csv,
    }
    return formats[name](found)


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


def _cells(
    found: Comparison, head: str, bold: Callable[[str], str], small: Callable[[str], str]
) -> Iterator[str]:
    """The cells of a head's row: length and speed for each data set, then the mean."""
    for data in found.runs.data:
        best = leads(found, data) and leader(found, data) == head
        yield _length(found.length(data, head), bold if best else str, small)
        if _with_speed(found):
            times = found.speeds.times(data, head, PLAIN)
            yield ratio(times.median) + small(between(times.ends, ratio)) if times else DASH
    if len(found.runs.data) > 1:
        yield _length(mean_length(found, head), str, small)


def _length(length: Length | None, mark: Callable[[str], str], small: Callable[[str], str]) -> str:
    if length is None:
        return DASH
    return mark(plain(length.value)) + (small(between(length.interval, plain)) if length.interval else "")


def _markdown(found: Comparison) -> str:
    kinds = ("length", "speed") if _with_speed(found) else ("length",)
    names = [f"{data} {kind}" for data in found.runs.data for kind in kinds]
    names += ["mean length"] if len(found.runs.data) > 1 else []
    rows = [["head", *names], ["---", *["---:"] * len(names)]]
    for head in found.runs.heads:
        cells = _cells(found, head, lambda text: f"**{text}**", lambda text: f" {text}")
        rows.append([head, *cells])
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", _note(found)]) + "\n"


def _latex(found: Comparison) -> str:
    """For the package booktabs."""
    speed, several = _with_speed(found), len(found.runs.data) > 1
    width = 2 if speed else 1
    tops = [rf"\multicolumn{{{width}}}{{c}}{{{_escaped(data)}}}" for data in found.runs.data]
    under = [each for _ in found.runs.data for each in (r"$\tau$", "speed")[:width]]
    mean = ["mean"] if several else []
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{$\tau$: {_escaped(_note(found))}}}",
        r"\begin{tabular}{l" + "r" * (len(under) + len(mean)) + "}",
        r"\toprule",
        _line(["", *tops, *mean]),
        _line(["head", *under, *([r"$\tau$"] if several else [])]),
        r"\midrule",
    ]
    for head in found.runs.heads:
        cells = _cells(
            found, head, lambda text: rf"\textbf{{{text}}}", lambda text: rf" {{\scriptsize {text}}}"
        )
        lines.append(_line([_escaped(head), *cells]))
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}", "% needs the package booktabs"]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


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
