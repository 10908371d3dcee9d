"""A table of several runs: one column each, with the ratio to the first."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.display import DASH, Show, between, count, percent, plain, rate, ratio, seconds
from specgen.report.remarks import remarks
from specgen.report.report import DEFINITIONS, draft_lengths
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import Part, definitions

_NAME = 12  # characters of a run's name in a heading; runs with longer names are numbered
_LENGTHS = 4  # most frequent K shown

_Metric = tuple[str, tuple[str | int, ...], Show]  # label, path in report.json, how to show it
_COUNTED: tuple[_Metric, ...] = (
    *((name, (name,), count) for name in ("num_requests", "total_num_output_tokens", "num_drafts")),
    *((name, (name,), count) for name in ("num_draft_tokens", "num_accepted_tokens")),
    ("mean acceptance length", ("mean_acceptance_length",), plain),
    ("  95 %", ("mean_acceptance_length_ci95",), lambda interval: between(interval, plain)),
    ("  mean over requests", ("mean_acceptance_length_per_request",), plain),
    *((f"  of {part}", ("parts", part, "mean_acceptance_length"), plain) for part in ("reasoning", "answer")),
)
_TIMED: tuple[_Metric, ...] = (
    ("output tokens/s", ("output_tokens_per_second",), rate),
    ("time to first token", ("ttft_seconds", "mean"), seconds),
    ("time per output token", ("tpot_seconds", "mean"), seconds),
    ("decode step", ("steps", "decode", "mean_seconds"), seconds),
    ("target rows", ("rows", "target"), count),
    ("  rejected drafts", ("rows", "target_rejected"), count),
    ("drafter KV fill", ("rows", "first_pass"), count),
    ("  padding", ("rows", "first_pass_wasted"), count),
    ("draft loop rows", ("rows", "loop"), count),
    ("against plain decoding", ("baseline", "ratio"), ratio),
)


def of_runs(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Part]:
    """What the terminal shows of ``(name, report.json)`` pairs."""
    assert runs
    if any(len(name) > _NAME for name, _ in runs):
        yield "\n".join(f"run {number}  {name}" for number, (name, _) in enumerate(runs, start=1))
        runs = [(f"run {number}", report) for number, (_, report) in enumerate(runs, start=1)]
    yield _table(runs)
    for name, report in runs:
        if draft_lengths(report):
            yield f"{name}: K by step: {_lengths(report)}"
        for sentence in remarks(report):
            yield f"{name}: {sentence}"
    yield definitions(DEFINITIONS)


def _table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    (first, _), *others = runs
    reports = [report for _, report in runs]
    positions = range(max(len(report["acceptance"]) for report in reports))
    accepted = [(f"acceptance at token {i}", ("acceptance", i, "rate"), percent) for i in positions]
    rows = [_row(metric, reports) for metric in (*_COUNTED, *accepted, *_TIMED)]
    columns = [Column(name="metric", title=""), Column(name="run 0", title=first)]
    for at, (name, _) in enumerate(others, start=1):
        columns += [Column(name=f"run {at}", title=name), Column(name=f"ratio {at}", title="ratio")]
    return Table(
        title="Runs side by side",
        columns=tuple(columns),
        rows=tuple(row for row in rows if set(row.values()) - {row["metric"], DASH, ""}),
        num_keys=2,
        group=2,
    )


def _row(metric: _Metric, reports: Sequence[Mapping[str, Any]]) -> Row:
    label, path, show = metric
    first, *_ = found = [_at(report, path) for report in reports]
    row = {"metric": label}
    for at, value in enumerate(found):
        row |= {f"run {at}": show(value), f"ratio {at}": _ratio(value, first)}
    return row


def _ratio(value: object, first: object) -> str:
    """Empty unless both are numbers and ``first`` is not 0."""
    if isinstance(value, int | float) and isinstance(first, int | float) and first:
        return ratio(value / first)
    return ""


def _at(report: Mapping[str, Any], path: Sequence[str | int]) -> object:
    """The value at ``path``; None if the run has none."""
    value: Any = report
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _lengths(report: Mapping[str, Any]) -> str:
    """``4 in 300, 2 in 25 steps``: the most frequent K, and the others summed."""
    lengths = list(draft_lengths(report).items())
    parts = [f"{k} in {count(number)}" for k, number in lengths[:_LENGTHS]]
    rest = [f"others in {count(sum(number for _, number in lengths[_LENGTHS:]))}"]
    return f"{', '.join(parts + rest * (len(lengths) > _LENGTHS))} steps"
