"""Several runs: what differs in their settings, one column each with the ratio to the first, paired differences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen.report.display import (
    DASH,
    count,
    ends,
    from_here,
    hundredths,
    p_value,
    percent,
    plain,
    same_texts,
)
from specgen.report.grid import Grid, by_position, chosen
from specgen.report.paired_requests import LENGTH, PairedFigure, SharedRequests
from specgen.report.report import DEFINITIONS, RECEIVED_TERM, Report
from specgen.report.table import Column, Row, Table
from specgen.report.tables import failures, remarks
from specgen.report.terminal import Part, definitions

_NAME = 12  # characters of a run's name in a heading; runs with longer names are numbered
_LENGTHS = 4  # most frequent K shown
_ONE_RUN = (
    "Speeds are of one run each, so they have no ratio: `specgen tune` measures in turns, with a spread."
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
    reports = [report for _, report in runs]
    positions = by_position(reports, title="acceptance at token")
    shown = chosen("runs", reports)
    rows = next(at for at, each in enumerate(shown) if each.name.startswith("rows_"))
    grid = Grid(
        groups=[({"arm": name}, report) for name, report in runs],
        figures=[*shown[:rows], *positions, *shown[rows:]],
    )
    yield grid.across("Runs side by side")
    if len(runs) > 1:
        yield _ONE_RUN
    for name, each in zip(names[1:], shared, strict=True):
        yield from _paired(name, names[0], each)
    for name, report in runs:
        if report.draft_lengths:
            yield f"{name}: K by step: {_lengths(report)}"
        failed, unlike = failures(report), report.unlike_work
        found = (failed and f"{failed}.", unlike and f"Against plain decoding {unlike}.")
        for sentence in filter(None, (report.unfinished, *found, *remarks(report))):
            yield f"{name}: {sentence}"
    paired = any(each.figures and not each.same_acceptance for each in shared)
    received = any(report.received is not None for _, report in runs)
    terms = (*((RECEIVED_TERM,) if received else ()), *((_ALL_STEPS, _PAIRED) if paired else ()))
    yield definitions((*DEFINITIONS, *terms))


def _settings(names: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> Table:
    columns = (Column(name=f"run {at}", title=name, wraps=True) for at, name in enumerate(names))
    rows = []
    for name, values in settings.items():
        shown = (DASH if value is None else from_here(str(value)) for value in values)
        rows.append({"setting": name} | {f"run {at}": text for at, text in enumerate(shown)})
    return Table(
        title="Settings that differ", columns=(Column(name="setting", title=""), *columns), rows=tuple(rows)
    )


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
        rows = [_difference(each) for each in shared.figures]
        titles = {"figure": "", "first": first, "ours": name, "difference": None, "95 %": None, "p": None}
        columns = tuple(Column(name=key, title=title) for key, title in titles.items())
        yield Table(title=f"{name} against {first}, paired by request", columns=columns, rows=tuple(rows))


def _difference(each: PairedFigure) -> Row:
    show, points = (plain, plain) if each.figure == LENGTH else (percent, hundredths)
    return {
        "figure": each.figure,
        "first": show(each.first),
        "ours": show(each.ours),
        "difference": points(each.paired.difference),
        "95 %": ends(each.paired.interval, show),
        "p": p_value(each.p),
    }


def _lengths(report: Report) -> str:
    """``4 in 300, 2 in 25 steps``: the most frequent K, and the others summed."""
    lengths = list(report.draft_lengths.items())
    parts = [f"{k} in {count(number)}" for k, number in lengths[:_LENGTHS]]
    rest = [f"others in {count(sum(number for _, number in lengths[_LENGTHS:]))}"]
    return f"{', '.join(parts + rest * (len(lengths) > _LENGTHS))} steps"
