"""What `specgen eval` and `specgen verify` show: arms against their reference, divergences, texts that changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from os.path import commonprefix
from statistics import median_low
from typing import Any

from specgen.config import DraftLength
from specgen.experiments.study_comparison import Answer, Compared, Document, StudyComparison
from specgen.report.charts import ticks_to
from specgen.report.display import (
    DASH,
    between,
    clip,
    count,
    devices,
    hundredths,
    p_value,
    percent,
    plain,
    rate,
    ratio,
    seconds,
    several,
)
from specgen.report.grid import FIGURES, Figure, Grid, by_position, chosen
from specgen.report.intervals import PairedScores
from specgen.report.page import Page
from specgen.report.report import Report
from specgen.report.table import Column, Row, Table
from specgen.report.tables import curve, curves, empty_texts
from specgen.report.terminal import ALARMING, Part, definitions, heading
from specgen.report.text_list import Entry, ShownText, Span, TextList, within

_POSITIONS = 6  # shown of an acceptance curve; the JSON has all
_WORST = 3  # divergences shown per arm; the page has more
_SHOWN = 20  # divergences shown of an audit; its JSON has all
_PAGE_BYTES = 3_500_000
_OPEN = 5  # texts shown open
NOTES = {
    "score": "mean over samples; interval of Wilson, or of t where scores are not all 0 or 1",
    "difference": "score less the reference's, in points; interval of Tango, or paired t",
    "p": "McNemar's exact test, or paired t; more cautious than an interval that just leaves out 0",
}
_ARM = Column(name="name", title="arm")


def _difference(name: str, of: Callable[[PairedScores], object], **fields: Any) -> Figure:  # noqa: ANN401, of a column
    """One of the differences from the reference, which has none itself."""
    return Figure(name=name, of=lambda score: "" if score.paired is None else of(score.paired), **fields)


_ACCURACY = (  # of a ``Score``
    Figure(name="mean", title="score", show=percent, interval="interval"),
    _difference("difference", lambda change: change.difference, show=lambda share: f"{100 * share:+z.1f}"),
    _difference("ends", lambda change: between(change.interval, hundredths), title="95 %"),
    _difference("p", lambda change: p_value(change.p)),
)
_TEXTS = (  # of an arm
    Figure(name="same texts", of=lambda arm: f"{count(arm.num_identical)} of {count(len(arm.answers))}"),
    Figure(
        name="share",
        show=percent,
        of=lambda arm: arm.num_identical / len(arm.answers) if arm.answers else None,
    ),
    Figure(name="first divergence", of=lambda arm: min(arm.positions, default=None)),
    Figure(name="median", of=lambda arm: median_low(arm.positions) if arm.positions else None),
    Figure(
        name="widest gap",
        of=lambda arm: max((each.gap for each in arm.firsts.values() if each.gap is not None), default=None),
    ),
    Figure(name="unexplained", of=lambda arm: sum(not each.explained for each in arm.firsts.values())),
)
_SPEED = (
    Column(name="output_tokens_per_second", title="output tokens/s", show=rate),
    Column(name="ratio", show=ratio),
    Column(name="total_num_output_tokens", title="output tokens"),
)
_NAMED = {each.name: each for each in FIGURES}
_LENGTH = replace(_NAMED["mean_acceptance_length"], title="acceptance length", short=None)
_RATE = replace(_NAMED["draft_acceptance_rate"], title="drafts accepted", short=None)


def of_comparison(comparison: StudyComparison, settings: Mapping[str, str]) -> Iterator[Part]:
    """What the terminal shows of ``comparison`` and its ``settings``, the conclusion at the end."""
    yield heading(settings)
    for table in _accuracies(comparison):
        yield f"{table.title}, {table.note.partition(',')[0]}"
        yield table
    if comparison.others:
        yield definitions(NOTES.items())
    texts, *others = _tables(comparison)
    yield from (texts, divergences(_worst(comparison)), *others)
    yield "\n".join([*_busy(comparison), comparison.sentence])


def _busy(comparison: StudyComparison) -> list[str]:
    return [f"BUSY: {comparison.busy}, so speeds are doubtful."] if comparison.busy else []


def page(
    comparison: StudyComparison,
    settings: Mapping[str, str],
    title: str,
    origin: Mapping[str, str] | None = None,
) -> str:
    """The HTML page of ``comparison``, with the texts side by side."""
    return Page(
        title=title,
        settings=settings,
        sentence=comparison.sentence,
        alarming=comparison.alarming,
        tables=[*_accuracies(comparison), *_tables(comparison)],
        notes=NOTES,
        findings=_busy(comparison),
        origin=origin or {},
        texts=_text_list(comparison),
    ).to_html()


def _tables(comparison: StudyComparison) -> tuple[Table, ...]:
    """The tables behind the accuracies: texts, acceptance, speed; one without rows is not shown."""
    return tuple(show(comparison) for show in (_texts, _acceptance, _speed, _tasks))


def _accuracies(comparison: StudyComparison) -> Iterator[Table]:
    """A table for each metric of each task, with a row for each arm."""
    for of_metric in zip(*(arm.metrics for arm in comparison.arms), strict=True):
        first = of_metric[0]
        yield Grid(
            groups=[
                ({"name": arm.name}, score) for arm, score in zip(comparison.arms, of_metric, strict=True)
            ],
            figures=_ACCURACY,
        ).table(
            [_ARM],
            f"{first.task} {first.metric}",
            note=f"{count(first.num_samples)} samples, with 95 % intervals; differences from {comparison.reference}, "
            "in points",
            bars="mean",
        )


def _texts(comparison: StudyComparison) -> Table:
    return Grid(groups=[({"name": arm.name}, arm) for arm in comparison.others], figures=_TEXTS).table(
        [_ARM],
        "Texts",
        note=f"against {comparison.reference}; positions are counted in tokens, gaps are in logits",
    )


def _worst(comparison: StudyComparison) -> Iterator[Row]:
    """A few divergences of each arm, unexplained ones first."""
    for arm in comparison.others:
        for first in sorted(arm.firsts.values(), key=lambda each: each.explained)[:_WORST]:
            yield {**asdict(first), "arm": arm.name, "explained": first.explained}


def _acceptance(comparison: StudyComparison) -> Table:
    drafting = {arm.name: arm.report for arm in comparison.arms if arm.report.acceptance}
    lines = {name: curve(report.acceptance) for name, report in drafting.items()}
    reports = drafting.values()
    return Grid(
        groups=[({"name": name}, report) for name, report in drafting.items()],
        figures=[_LENGTH, *_other_lengths(reports), *by_position(reports, _POSITIONS)],
    ).table(
        [_ARM],
        "Acceptance by position",
        note="% of the verify steps, with 95 % intervals",
        lines=curves("Acceptance by draft position and arm", lines) if lines else None,
    )


def _other_lengths(reports: Iterable[Report]) -> list[Figure]:
    """The length over all steps and the tokens per step, where some are not the acceptance length."""
    return [each for each in chosen("arm", reports) if each.name != _LENGTH.name]


def _speed(comparison: StudyComparison) -> Table:
    return Table(
        title="Speed",
        note=f"output tokens per second, and their ratio to {comparison.reference}; the time is that of scores too",
        columns=(_ARM, *_SPEED, Column(name="seconds", title="time", show=seconds)),
        rows=tuple(
            {"name": arm.name, "seconds": arm.seconds, **_speeds(arm.report, arm.times())}
            for arm in comparison.arms
        ),
        bars="output_tokens_per_second",
        ticks=ticks_to(max(arm.report.output_tokens_per_second or 0.0 for arm in comparison.arms)),
    )


def _speeds(report: Report, times: float | None) -> Row:
    names = ("output_tokens_per_second", "total_num_output_tokens")
    return {"ratio": times, **{name: getattr(report, name) for name in names}}


def _tasks(comparison: StudyComparison) -> Table:
    """Acceptance and speed by task; no rows for a single task."""
    groups = [
        ({"task": task, "name": arm.name, **_speeds(arm.tasks[task], arm.times(task))}, arm.tasks[task])
        for task in comparison.arms[0].tasks
        for arm in comparison.arms
        if task in arm.tasks
    ]
    others = _other_lengths(report for _, report in groups)
    figures = Grid(groups=groups, figures=[_LENGTH, _RATE, *others]).table(
        (Column(name="task", wraps=True), _ARM),
        "By task",
        note=f"mean acceptance length with 95 % intervals; speed, and its ratio to {comparison.reference}",
    )
    return replace(figures, columns=(*figures.columns, *_SPEED))


# --- texts that changed ---------------------------------------------------------------------------


def _text_list(comparison: StudyComparison) -> TextList | None:
    """Every text that an arm changed beside the reference's: wrong ones first, then those of another score."""
    changed = [(arm, document) for arm in comparison.others for document in arm.differing]
    entries = [_entry(*each) for each in changed]
    entries.sort(key=lambda each: (each.labels["change"] != "wrong", each.labels["score"] == "same score"))
    shown = within(iter(entries), _PAGE_BYTES)
    if not changed:
        return None
    return TextList(
        title="Texts that changed",
        note=f"{count(len(shown))} of {count(len(entries))}, marked from the first difference to the reference's",
        entries=shown,
        num_open=_OPEN,
        keys={},
    )


def _entry(arm: Compared, document: Document) -> Entry:
    ours, theirs, first = arm.answers[document], arm.reference.answers[document], arm.firsts.get(document)
    cut = len(commonprefix([ours.text, theirs.text]))  # noqa: RUF071, it is meant
    where, is_wrong = "", first is not None and not first.explained
    if first is not None:
        instead = f"{_token(first.token, first.text)} instead of {_token(first.reference_token, first.reference_text)}"
        where = f"at token {count(first.position)}: {instead}, gap {_four_digits(first.gap)}"
        where += f", bound {_four_digits(first.rounding)}: {'WRONG' if is_wrong else 'rounding'}"
    return Entry(
        title=" ".join(map(str, document)),
        labels={
            "task": document[0],
            "arm": arm.name,
            "change": "wrong" if is_wrong else "other text",
            "score": "same score" if ours.scores == theirs.scores else "other score",
        },
        note=where,
        question=ours.question,
        texts=[
            ShownText(
                name=f"{run.name}: {_scores(run.answers[document])}",
                spans=[span for span in (Span(text[:cut]), Span(text[cut:], "changed")) if span.text],
            )
            for run, text in ((arm.reference, theirs.text), (arm, ours.text))
        ],
    )


def _scores(answer: Answer) -> str:
    return ", ".join(f"{metric} {plain(score)}" for metric, score in answer.scores.items())


# --- the audit ------------------------------------------------------------------------------------


def _four_digits(number: float | None) -> str:
    """``0.01234``"""
    return DASH if number is None else f"{number:.4g}"


_ARMS = (
    Column(name="name", title="arm"),
    Column(name="batch_size", title="batch"),
    Column(name="num_requests", title="requests"),
    Column(name="num_identical", title="identical"),
    Column(name="identical", title="share", show=percent),
    Column(name="mean_acceptance_length", title="acceptance length", show=plain),
)
_DIVERGENCES = (
    Column(name="request"),
    Column(name="arm", wraps=True),
    Column(name="position", title="at"),
    Column(name="reference"),
    Column(name="reference_logit", title="logit", show=_four_digits),
    Column(name="instead"),
    Column(name="logit", show=_four_digits),
    Column(name="gap", show=_four_digits),
    Column(name="rounding", show=_four_digits),
    Column(name="why", title=""),
)


def of_audit(audit: Mapping[str, Any]) -> Iterator[Part]:
    """What the terminal shows of the document ``audit``, the verdict at the end."""
    yield _heading(audit)
    yield Table(title="Arms", columns=_ARMS, rows=tuple(audit["arms"]))
    rows = [
        {**each, "arm": f"{arm['name']} {arm['batch_size']}"}
        for arm in audit["arms"]
        for each in arm["divergences"]
    ]
    rows.sort(key=lambda row: row["explained"])  # unexplained ones first
    yield divergences(rows[:_SHOWN])
    if (more := len(rows) - _SHOWN) > 0:
        yield f"and {count(more)} more; --json and --output have all"
    if number := audit["num_empty"]:
        yield empty_texts(number, next(arm["num_requests"] for arm in audit["arms"]))
    yield verdict(audit)


def divergences(found: Iterable[Row]) -> Table:
    """A table of ``Divergence`` fields with ``explained`` and ``arm``."""
    rows = [
        {
            **row,
            "reference": _token(row["reference_token"], row["reference_text"]),
            "instead": _token(row["token"], row["text"]),
            "why": "rounding" if row["explained"] else "WRONG",
            ALARMING: not row["explained"],
        }
        for row in found
    ]
    columns = tuple(column for column in _DIVERGENCES if all(column.name in row for row in rows))
    return Table(title="Divergences", columns=columns, rows=tuple(rows), num_keys=2)


def verdict(audit: Mapping[str, Any]) -> str:
    """One sentence: did any text change, and does rounding explain it."""
    total = sum(arm["num_requests"] for arm in audit["arms"])
    differ = total - sum(arm["num_identical"] for arm in audit["arms"])
    if not audit["num_unexplained"] and not is_tested(audit):
        return "Nothing was tested: no step had drafts, so these texts say nothing of speculation."
    if differ == 0:
        return f"Nothing changed: all {count(total)} texts are those of the reference, token for token."
    found = f"{count(differ)} of {count(total)} texts differ from the reference"
    if (wrong := audit["num_unexplained"]) == 0:
        return f"{found}, each first where the two tokens are so close that rounding to {audit['dtype']} decides."
    return (
        f"{found}, {count(wrong)} of them where rounding to {audit['dtype']} cannot explain it: "
        "decoding is wrong there."
    )


def is_tested(audit: Mapping[str, Any]) -> bool:
    """Whether a step of any arm had drafts."""
    return any(arm["mean_acceptance_length"] is not None for arm in audit["arms"])


def _heading(audit: Mapping[str, Any]) -> str:
    engine, reference, failures = audit["manifest"]["engine"], audit["reference"], audit["failures"]
    drafts = DraftLength(most=engine["num_spec_tokens"], kind=engine["spec_length"])
    where = devices(engine["device"], engine.get("tensor_parallel", 1))
    lines = [
        f"model {engine['model']}",
        f"drafter {engine['drafter']}, draft tokens (K) {drafts}",
        f"runs on {where}, {audit['dtype']}, attention {engine['attention']}",
        f"compared with {reference['name']} decoding, batch {reference['batch_size']}, greedy",
    ]
    lines += [f"{several(len(failures), 'prompt')} could not be run, not compared"] if failures else []
    return "\n".join(lines)


def _token(token: int | None, text: str) -> str:
    """``464 'The'``, or ``(ended)`` after the end of the text."""
    return "(ended)" if token is None else f"{token} {clip(repr(text), 12)}"
