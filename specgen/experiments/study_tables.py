"""What `specgen eval` and `specgen verify` show: arms against their reference, divergences, texts side by side."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from os.path import commonprefix
from statistics import median_low
from typing import Any

from specgen.config import DraftLength
from specgen.experiments.study_comparison import (
    CHANGES,
    Accuracy,
    ArmComparison,
    Measured,
    SampleTexts,
    SharedAnswer,
    StudyComparison,
)
from specgen.report.charts import quarters
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
_OPEN = 5  # samples shown open, of those that differ
NOTES = {
    "score": "mean over samples; interval of Wilson, or of t where scores are not all 0 or 1",
    "difference": "score less the reference's, in points; interval of Tango, or paired t",
    "p": "McNemar's exact test, or paired t; more cautious than an interval that just leaves out 0",
    "detectable": "smallest true difference that a test of these samples detects with 80 % power",
}
_ARM = Column(name="name", title="arm")
_ACCURACY = (
    _ARM,
    Column(name="mean", title="score", show=percent, interval="interval"),
    Column(name="difference", show=lambda share: f"{100 * share:+z.1f}"),
    Column(name="ends", title="95 %"),
    Column(name="p"),
    Column(name="detectable", show=hundredths),
)
_TEXTS = (
    _ARM,
    Column(name="same", title="same texts"),
    Column(name="share", show=percent),
    Column(name="first", title="first divergence"),
    Column(name="median"),
    Column(name="widest", title="widest gap"),
    Column(name="unexplained"),
)
_NAMED = {each.name: each for each in FIGURES}
_LENGTH = replace(_NAMED["mean_acceptance_length"], title="acceptance length", short=None)
_RATE = replace(_NAMED["draft_acceptance_rate"], title="drafts accepted", short=None)
_PARTS = (
    _ARM,
    Column(name="part", wraps=True),
    Column(name="num_requests", title="texts"),
    Column(name="num_drafts", title="drafts"),
    _LENGTH,
    _RATE,
)
_SPEED = (
    Column(name="output_tokens_per_second", title="output tokens/s", show=rate),
    Column(name="ratio", show=ratio),
    Column(name="total_num_output_tokens", title="output tokens"),
)


def of_comparison(comparison: StudyComparison, settings: Mapping[str, str]) -> Iterator[Part]:
    """What the terminal shows of ``comparison`` and its ``settings``, the conclusion at the end."""
    yield heading(settings)
    for accuracy in comparison.arms[0].accuracies:
        table = _accuracy(comparison, accuracy)
        yield f"{table.title}, {count(accuracy.num_samples)} samples"
        yield table
    if comparison.against:
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
    """The same as an HTML page, with the texts side by side."""
    accuracies = [_accuracy(comparison, accuracy) for accuracy in comparison.arms[0].accuracies]
    return Page(
        title=title,
        settings=settings,
        sentence=comparison.sentence,
        alarming=comparison.alarming,
        tables=[*accuracies, *_tables(comparison)],
        notes=NOTES,
        findings=_busy(comparison),
        origin=origin or {},
        texts=_text_list(comparison.samples) if comparison.samples else None,
    ).to_html()


def _tables(comparison: StudyComparison) -> tuple[Table, ...]:
    """Those behind the accuracies: texts, acceptance, speed; one without rows is not shown."""
    return tuple(show(comparison) for show in (_texts, _acceptance, _parts, _speed, _tasks))


def _accuracy(comparison: StudyComparison, wanted: Accuracy) -> Table:
    """The accuracies of all arms on the task and metric of ``wanted``."""
    key = (wanted.task, wanted.metric)
    found = {arm.name: a for arm in comparison.arms for a in arm.accuracies if (a.task, a.metric) == key}
    paired = {
        arm.name: c.paired for arm in comparison.against for c in arm.changes if (c.task, c.metric) == key
    }
    rows = []
    for name, accuracy in found.items():
        row: dict[str, Any] = {"name": name, "mean": accuracy.mean, "interval": accuracy.interval}
        row |= dict.fromkeys(("difference", "ends", "p", "detectable"), "")
        if change := paired.get(name):
            row |= {"difference": change.difference, "ends": between(change.interval, hundredths)}
            row |= {"p": p_value(change.p), "detectable": change.detectable}
        rows.append(row)
    differences = f"differences from {comparison.reference}, in points"
    return Table(
        title=f"{wanted.task} {wanted.metric}",
        note=f"{count(wanted.num_samples)} samples, with 95 % intervals; {differences}",
        columns=_ACCURACY,
        rows=tuple(rows),
        bars="mean",
    )


def _texts(comparison: StudyComparison) -> Table:
    return Table(
        title="Texts",
        note=f"against {comparison.reference}; positions are counted in tokens, gaps are in logits",
        columns=_TEXTS,
        rows=tuple(map(_text_row, comparison.against)),
    )


def _text_row(arm: ArmComparison) -> Row:
    where = [each.position for each in arm.divergences]
    return {
        "name": arm.name,
        "same": f"{count(arm.num_identical)} of {count(arm.num_compared)}",
        "share": arm.num_identical / arm.num_compared if arm.num_compared else None,
        "first": min(where, default=None),
        "median": median_low(where) if where else None,
        "widest": max((each.gap for each in arm.divergences if each.gap is not None), default=None),
        "unexplained": sum(not each.explained for each in arm.divergences),
    }


def _worst(comparison: StudyComparison) -> Iterator[Row]:
    """A few divergences of each arm, unexplained ones first."""
    for arm in comparison.against:
        for first in sorted(arm.divergences, key=lambda each: each.explained)[:_WORST]:
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


def _parts(comparison: StudyComparison) -> Table:
    """The acceptance of reasoning and answers, of arms with drafts; no rows where no text has reasoning."""
    return Table(
        title="Acceptance by part of the text",
        note="with 95 % intervals; a step belongs to the part of its first token",
        columns=_PARTS,
        rows=tuple(
            {"name": arm.name, "part": part, **vars(each)}
            for arm in comparison.arms
            for part, each in arm.report.parts.items()
            if each.num_drafts
        ),
        num_keys=2,
    )


def _speed(comparison: StudyComparison) -> Table:
    return Table(
        title="Speed",
        note=f"output tokens per second, and their ratio to {comparison.reference}; the time is that of scores too",
        columns=(_ARM, *_SPEED, Column(name="seconds", title="time", show=seconds)),
        rows=tuple(
            {"name": arm.name, "seconds": arm.seconds, **_speeds(arm.measured)} for arm in comparison.arms
        ),
        bars="output_tokens_per_second",
        ticks=quarters(max(arm.report.output_tokens_per_second or 0.0 for arm in comparison.arms)),
    )


def _speeds(measured: Measured) -> Row:
    names = ("output_tokens_per_second", "total_num_output_tokens")
    return {"ratio": measured.ratio, **{name: getattr(measured.report, name) for name in names}}


def _tasks(comparison: StudyComparison) -> Table:
    """Acceptance and speed by task; no rows for a single task."""
    found = [
        (task, arm.name, arm.tasks[task])
        for task in comparison.arms[0].tasks
        for arm in comparison.arms
        if task in arm.tasks
    ]
    others = _other_lengths(each.report for *_, each in found)
    figures = Grid(
        groups=[({"task": task, "name": name, **_speeds(each)}, each.report) for task, name, each in found],
        figures=[_LENGTH, _RATE, *others],
    ).table(
        (Column(name="task", wraps=True), _ARM),
        "By task",
        note=f"mean acceptance length with 95 % intervals; speed, and its ratio to {comparison.reference}",
    )
    return replace(figures, columns=(*figures.columns, *_SPEED))


# --- texts side by side ---------------------------------------------------------------------------


def _text_list(samples: Sequence[SampleTexts]) -> TextList:
    """The samples on a page: wrong texts first, then flips of the score, then other texts."""
    ordered = sorted(samples, key=lambda each: CHANGES.index(each.change))  # stable: else as asked
    entries = within(map(_entry, ordered), _PAGE_BYTES)
    changes = [each.change for each in samples]
    numbers = ", ".join(f"{count(changes.count(each))} {each}" for each in CHANGES if each in changes)
    shown = (
        "" if len(entries) == len(samples) else f"; {count(len(entries))} of {count(len(samples))} are shown"
    )
    return TextList(
        title="Samples side by side",
        note=f"{numbers}{shown}; texts are marked from the first difference to the reference's",
        entries=entries,
        num_open=min(_OPEN, sum(change != "same text" for change in changes)),
        keys={},
    )


def _entry(sample: SampleTexts) -> Entry:
    reference, *others = sample.answers
    equal = [len(commonprefix([reference.text, other.text])) for other in others]  # noqa: RUF071, it is meant
    cuts = [min(equal, default=len(reference.text)), *equal]
    texts = [
        ShownText(name=_name(answer), spans=_marked(answer.text, cut))
        for answer, cut in zip(sample.answers, cuts, strict=True)
    ]
    return Entry(
        title=f"{sample.task} {sample.doc_id}",
        labels={"task": sample.task, "change": sample.change},
        note=f"{reference.arms[0]} {_score(reference.scores)}",
        question=sample.question,
        texts=texts,
    )


def _name(answer: SharedAnswer) -> str:
    parts = [", ".join(answer.arms), _score(answer.scores)]
    if answer.first is not None:
        first = answer.first
        ours = _token(first.token, first.text)
        theirs = _token(first.reference_token, first.reference_text)
        why = "explained by rounding" if first.explained else "WRONG: more than rounding"
        parts += [f"at token {count(first.position)}: {ours} instead of {theirs}"]
        parts += [f"gap {_four_digits(first.gap)}", f"bound {_four_digits(first.rounding)}", why]
    return " · ".join(parts)


def _score(scores: Mapping[str, float]) -> str:
    words = {
        metric: {1.0: "right", 0.0: "wrong"}.get(score, plain(score)) for metric, score in scores.items()
    }
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{metric}: {word}" for metric, word in words.items())


def _marked(text: str, at: int) -> list[Span]:
    return [span for span in (Span(text[:at]), Span(text[at:], "changed")) if span.text]


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
    rows = _places(audit["arms"])
    rows.sort(key=lambda row: row["explained"])  # unexplained ones first
    yield divergences(rows[:_SHOWN])
    if (more := len(rows) - _SHOWN) > 0:
        yield f"and {count(more)} more; --json and --output have all"
    if number := audit["num_empty"]:
        yield empty_texts(number, next(arm["num_requests"] for arm in audit["arms"]))
    yield verdict(audit)


def _places(arms: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every place where arms diverge in the same way, which have one context and so one gap."""
    places: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, list[str]]]] = {}
    for arm in arms:
        for each in arm["divergences"]:
            place = tuple(each[name] for name in ("request", "position", "reference_token", "token"))
            _, batches = places.setdefault(place, (each, {}))
            batches.setdefault(arm["name"], []).append(str(arm["batch_size"]))
    return [
        {**each, "arm": "; ".join(f"{name} {', '.join(sizes)}" for name, sizes in batches.items())}
        for each, batches in places.values()
    ]


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
