"""Several runs: what differs in their settings, one column each with the ratio to the first, paired differences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.record.record_rows import PARTS
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
from specgen.report.report import DEFINITIONS, RECEIVED_TERM, Report
from specgen.report.table import Column, Row, Table
from specgen.report.tables import failures, remarks
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

_Figure = tuple[str, Any, Show]  # label, value (None if the run has none), how to show it
_COUNTERS = (
    *("num_requests", "total_num_output_tokens", "num_drafts"),
    *("num_draft_tokens", "num_accepted_tokens"),
)


def of_runs(
    runs: Sequence[tuple[str, Report]],
    settings: Mapping[str, Sequence[Any]],
    shared: Sequence[SharedRequests],
) -> Iterator[Part]:
    """What the terminal shows of runs by name.

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
        if report.draft_lengths:
            yield f"{name}: K by step: {_lengths(report)}"
        for sentence in filter(None, (report.unfinished, *_failures(report), *remarks(report))):
            yield f"{name}: {sentence}"
    paired = any(each.figures and not each.same_acceptance for each in shared)
    received = any(report.received is not None for _, report in runs)
    terms = (*((RECEIVED_TERM,) if received else ()), *((_ALL_STEPS, _PAIRED) if paired else ()))
    yield definitions((*DEFINITIONS, *terms))


def _failures(report: Report) -> Iterator[str]:
    if failed := failures(report):
        yield f"{failed}."
    if unlike := report.unlike_work:
        yield f"Against plain decoding {unlike}."


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


def _table(runs: Sequence[tuple[str, Report]]) -> Table:
    (first, _), *others = runs
    reports = [report for _, report in runs]
    num_positions = max(len(report.acceptance) for report in reports)
    at_times = any(report.num_drafts and report.num_steps_without_drafts for report in reports)
    received = any(report.received is not None for report in reports)
    rows = [
        _row(*of_all)
        for of_all in zip(
            *(_counted(each, num_positions, at_times, received) for each in reports), strict=True
        )
    ]
    for of_all in zip(*map(_timed, reports), strict=True):  # of one run each, whose spread nobody knows
        rows.append({**_row(*of_all), **dict.fromkeys((f"ratio {at}" for at in range(len(runs))), "")})
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


def _counted(report: Report, num_positions: int, at_times: bool, received: bool) -> Iterator[_Figure]:
    """Counts and acceptance; where some run drafted ``at_times`` only, the length over all steps too.

    ``received``: of some run the tokens per step are less.
    """
    for name in _COUNTERS:
        yield name, getattr(report, name), count
    length, interval = report.mean_acceptance_length, report.mean_acceptance_length_ci95
    yield "mean acceptance length", length, plain
    yield "  95 %", interval, lambda interval: between(interval, plain)
    yield "  mean over requests", report.mean_acceptance_length_per_request, plain
    for part in PARTS:
        found = report.parts.get(part)
        yield f"  of {part}", found and found.mean_acceptance_length, plain
    yield "  over all steps", report.length_over_all_steps if at_times else None, plain
    yield RECEIVED_TERM[0], report.tokens_per_step if received else None, plain
    rates = [position.rate for position in report.acceptance] + [None] * num_positions
    for i in range(num_positions):
        yield f"acceptance at token {i}", rates[i], percent
    rows = report.rows()
    yield "target rows", rows["target"], count
    yield "  rejected drafts", rows["target_rejected"], count
    yield "drafter KV fill", rows["first_pass"], count
    yield "  padding", rows["first_pass_wasted"], count
    yield "draft loop rows", rows["loop"], count


def _timed(report: Report) -> Iterator[_Figure]:
    ttft, tpot, decode = report.ttft_seconds, report.tpot_seconds, report.steps.get("decode")
    yield "output tokens/s", report.output_tokens_per_second, rate
    yield "time to first token", ttft and ttft.mean, seconds
    yield "time per output token", tpot and tpot.mean, seconds
    yield "decode step", decode and decode.mean_seconds, seconds
    yield "against plain decoding", report.baseline and report.baseline.ratio, ratio


def _row(*of_all: _Figure) -> Row:
    """One figure of all runs, each with its ratio to the first, where both are numbers and that is not 0."""
    label, first, show = of_all[0]
    row = {"metric": label}
    for at, (_, value, _) in enumerate(of_all):
        are_numbers = isinstance(value, int | float) and isinstance(first, int | float) and first
        row |= {f"run {at}": show(value), f"ratio {at}": ratio(value / first) if are_numbers else ""}
    return row


def _lengths(report: Report) -> str:
    """``4 in 300, 2 in 25 steps``: the most frequent K, and the others summed."""
    lengths = list(report.draft_lengths.items())
    parts = [f"{k} in {count(number)}" for k, number in lengths[:_LENGTHS]]
    rest = [f"others in {count(sum(number for _, number in lengths[_LENGTHS:]))}"]
    return f"{', '.join(parts + rest * (len(lengths) > _LENGTHS))} steps"
