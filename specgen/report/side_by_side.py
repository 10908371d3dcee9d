"""Several runs: what differs in their settings, one column each with the ratio to the first, paired differences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.report.display import (
    DASH,
    Show,
    between,
    count,
    ends,
    from_here,
    hundredths,
    p_value,
    percent,
    plain,
    rate,
    ratio,
    same_texts,
    seconds,
)
from specgen.report.paired_requests import LENGTH, PairedFigure, SharedRequests
from specgen.report.report import DEFINITIONS, draft_lengths, unfinished
from specgen.report.table import Column, Row, Table
from specgen.report.tables import remarks
from specgen.report.terminal import Part, definitions

_NAME = 12  # characters of a run's name in a heading; runs with longer names are numbered
_LENGTHS = 4  # most frequent K shown
_ONE_RUN = (
    "Speeds are of one run each, so they have no ratio: `specgen bench` measures in turns, with a spread."
)
_PAIRED = (
    "paired difference",
    "this run minus the first over their shared requests, rates in points; p by t test over conversations, after Holm "
    "over the lengths of all runs, those of positions among themselves; omitted if all differences are equal",
)
_ALL_STEPS = (
    LENGTH,
    "1 + accepted / verify steps, those without drafts too: elsewhere the mean acceptance length",
)

_ALL = "length_over_all_steps"
_Metric = tuple[str, tuple[str | int, ...], Show]  # label, path in report.json, how to show it
_COUNTED: tuple[_Metric, ...] = (
    *((name, (name,), count) for name in ("num_requests", "total_num_output_tokens", "num_drafts")),
    *((name, (name,), count) for name in ("num_draft_tokens", "num_accepted_tokens")),
    ("mean acceptance length", ("mean_acceptance_length",), plain),
    ("  95 %", ("mean_acceptance_length_ci95",), lambda interval: between(interval, plain)),
    ("  mean over requests", ("mean_acceptance_length_per_request",), plain),
    *((f"  of {part}", ("parts", part, "mean_acceptance_length"), plain) for part in ("reasoning", "answer")),
)
_ROWS: tuple[_Metric, ...] = (
    ("target rows", ("rows", "target"), count),
    ("  rejected drafts", ("rows", "target_rejected"), count),
    ("drafter KV fill", ("rows", "first_pass"), count),
    ("  padding", ("rows", "first_pass_wasted"), count),
    ("draft loop rows", ("rows", "loop"), count),
)
_TIMED: tuple[_Metric, ...] = (  # of one run each, whose spread nobody knows
    ("output tokens/s", ("output_tokens_per_second",), rate),
    ("time to first token", ("ttft_seconds", "mean"), seconds),
    ("time per output token", ("tpot_seconds", "mean"), seconds),
    ("decode step", ("steps", "decode", "mean_seconds"), seconds),
    ("against plain decoding", ("baseline", "ratio"), ratio),
)


def of_runs(
    runs: Sequence[tuple[str, Mapping[str, Any]]],
    settings: Mapping[str, Sequence[Any]],
    shared: Sequence[SharedRequests],
) -> Iterator[Part]:
    """What the terminal shows of ``(name, report.json)`` pairs.

    ``settings`` (from ``unlike_settings``) are those in which the runs differ; ``shared`` (from ``shared_requests``)
    has one entry for each run but the first.
    """
    assert len(shared) == len(runs) - 1
    if any(len(name) > _NAME for name, _ in runs):
        yield "\n".join(f"run {number}  {name}" for number, (name, _) in enumerate(runs, start=1))
        runs = [(f"run {number}", report) for number, (_, report) in enumerate(runs, start=1)]
    names = [name for name, _ in runs]
    if len(runs) > 1:
        yield "The runs differ in:" if settings else "The runs have the same settings."
        yield _settings(names, settings)
    yield _table(runs)
    if len(runs) > 1:
        yield _ONE_RUN
    for name, each in zip(names[1:], shared, strict=True):
        yield from _paired(name, names[0], each)
    for name, report in runs:
        if draft_lengths(report):
            yield f"{name}: K by step: {_lengths(report)}"
        for sentence in filter(None, (unfinished(report), *remarks(report))):
            yield f"{name}: {sentence}"
    paired = any(each.figures and not each.same_acceptance for each in shared)
    yield definitions((*DEFINITIONS, *((_ALL_STEPS, _PAIRED) if paired else ())))


def _settings(names: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> Table:
    columns = (Column(name=f"run {at}", title=name, wraps=True) for at, name in enumerate(names))
    return Table(
        title="Settings that differ",
        columns=(Column(name="setting", title=""), *columns),
        rows=tuple(
            {"setting": name, **{f"run {at}": _setting(value) for at, value in enumerate(values)}}
            for name, values in settings.items()
        ),
    )


def _setting(value: object) -> str:
    return DASH if value is None else from_here(str(value))


def _paired(name: str, first: str, shared: SharedRequests) -> Iterator[Part]:
    """The shared requests of the run ``name`` and the ``first``, and what differs."""
    if not shared.num_requests:
        yield f"{name} and {first} have no request in common (the same id and prompt), so nothing is paired."
        return
    texts = same_texts(shared.num_identical / shared.num_requests, shared.num_requests)
    head = f"{name} against {first} on the {count(shared.num_requests)} requests of both: {texts}"
    if not shared.figures:
        yield f"{head}."
    elif shared.same_acceptance:
        yield f"{head}; the acceptance of every request is the same."
    else:
        yield f"{head}. Paired differences:"
        yield Table(
            title=f"{name} against {first}, paired by request",
            columns=(
                Column(name="figure", title=""),
                Column(name="first", title=first),
                Column(name="ours", title=name),
                *(Column(name=each) for each in ("difference", "95 %", "p")),
            ),
            rows=tuple(map(_difference, shared.figures)),
        )


def _difference(each: PairedFigure) -> Row:
    show = plain if each.figure == LENGTH else percent
    return {
        "figure": each.figure,
        "first": show(each.first),
        "ours": show(each.ours),
        "difference": (plain if show is plain else hundredths)(each.paired.difference),
        "95 %": ends(each.paired.interval, show),
        "p": p_value(each.p),
    }


def _table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    (first, _), *others = runs
    ratios = [f"ratio {at}" for at in range(len(runs))]
    reports = [_over_all_steps(report) for _, report in runs]
    positions = range(max(len(report["acceptance"]) for report in reports))
    accepted = [(f"acceptance at token {i}", ("acceptance", i, "rate"), percent) for i in positions]
    own = [("  over all steps", (_ALL,), plain)] if any(map(_drafts_at_times, reports)) else []
    rows = [_row(metric, reports) for metric in (*_COUNTED, *own, *accepted, *_ROWS)]
    rows += [{**_row(metric, reports), **dict.fromkeys(ratios, "")} for metric in _TIMED]
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


def _drafts_at_times(report: Mapping[str, Any]) -> bool:
    """Whether a drafter had drafts in some steps and in others none."""
    return bool(report["num_drafts"] and report.get("num_steps_without_drafts"))


def _over_all_steps(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """``report`` with its length over all steps; it is the mean acceptance length where all had drafts."""
    length = report["mean_acceptance_length"]
    if _drafts_at_times(report):
        length = 1 + report["num_accepted_tokens"] / (
            report["num_drafts"] + report["num_steps_without_drafts"]
        )
    return {**report, _ALL: length}


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
