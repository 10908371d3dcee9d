"""The comparison of a study's arms as tables, for terminal and page."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from statistics import median_low
from typing import Any

from specgen.display import between, count, hundredths, p_value, percent, rate, ratio, seconds
from specgen.evaluation.audit_table import divergences
from specgen.evaluation.compare import Accuracy, ArmComparison, Comparison
from specgen.evaluation.sample_texts import text_list
from specgen.report.charts import quarters
from specgen.report.page import Page
from specgen.report.table import Column, Row, Table
from specgen.report.tables import curve, curves
from specgen.report.terminal import Part, definitions, heading

_POSITIONS = 6  # shown of an acceptance curve; the JSON has all
_DIVERGENCES = 3  # shown per arm; the page has more
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
_LENGTH = Column(
    name="mean_acceptance_length", title="acceptance length", interval="mean_acceptance_length_ci95"
)
_PARTS = (
    _ARM,
    Column(name="part", wraps=True),
    Column(name="num_requests", title="texts"),
    Column(name="num_drafts", title="drafts"),
    _LENGTH,
    Column(name="draft_acceptance_rate", title="drafts accepted", show=percent),
)
_TASKS = (
    Column(name="task", wraps=True),
    _ARM,
    _LENGTH,
    Column(name="draft_acceptance_rate", title="drafts accepted", show=percent),
    Column(name="output_tokens_per_second", title="output tokens/s", show=rate),
    Column(name="ratio", show=ratio),
    Column(name="num_output_tokens", title="output tokens"),
)
_SPEED = (
    _ARM,
    Column(name="output_tokens_per_second", title="output tokens/s", show=rate),
    Column(name="ratio", show=ratio),
    Column(name="num_output_tokens", title="output tokens"),
    Column(name="seconds", title="time", show=seconds),
)


def of_comparison(comparison: Comparison, settings: Mapping[str, str]) -> Iterator[Part]:
    """What the terminal shows of ``comparison`` and its ``settings``, the conclusion at the end."""
    yield heading(settings)
    for accuracy in comparison.arms[0].accuracies:
        table = _accuracy(comparison, accuracy)
        yield f"{table.title}, {count(accuracy.num_samples)} samples"
        yield table
    if comparison.against:
        yield definitions(NOTES.items())
    yield _texts(comparison)
    yield divergences(_worst(comparison))
    yield _acceptance(comparison)
    yield _parts(comparison)
    yield _speed(comparison)
    yield _tasks(comparison)
    yield comparison.sentence


def page(
    comparison: Comparison, settings: Mapping[str, str], title: str, origin: Mapping[str, str] | None = None
) -> str:
    """The same as an HTML page, with the texts side by side."""
    accuracies = [_accuracy(comparison, accuracy) for accuracy in comparison.arms[0].accuracies]
    return Page(
        title=title,
        settings=settings,
        sentence=comparison.sentence,
        alarming=comparison.alarming,
        tables=[
            *accuracies,
            _texts(comparison),
            _acceptance(comparison),
            _parts(comparison),
            _speed(comparison),
            _tasks(comparison),
        ],
        notes=NOTES,
        origin=origin or {},
        texts=text_list(comparison.samples) if comparison.samples else None,
    ).to_html()


def _accuracy(comparison: Comparison, wanted: Accuracy) -> Table:
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


def _texts(comparison: Comparison) -> Table:
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


def _worst(comparison: Comparison) -> Iterator[Row]:
    """A few divergences of each arm, unexplained ones first."""
    for arm in comparison.against:
        for first in sorted(arm.divergences, key=lambda each: each.explained)[:_DIVERGENCES]:
            yield {**asdict(first), "arm": arm.name, "explained": first.explained}


def _acceptance(comparison: Comparison) -> Table:
    drafting = [arm for arm in comparison.arms if arm.acceptance]
    most = max((len(arm.acceptance) for arm in drafting), default=0)
    tokens = {f"token {i}": i for i in range(min(_POSITIONS, most))}
    rows = []
    for arm in drafting:
        rates = [position.rate for position in arm.acceptance] + [None] * most
        rows.append({**asdict(arm), **{token: rates[i] for token, i in tokens.items()}})
    lines = {row["name"]: curve(row["acceptance"], "rate", "ci95") for row in rows}
    return Table(
        title="Acceptance by position",
        note="% of the verify steps, with 95 % intervals",
        columns=(_ARM, _LENGTH, *(Column(name=token, show=percent) for token in tokens)),
        rows=tuple(rows),
        lines=curves("Acceptance by draft position and arm", lines) if lines else None,
    )


def _parts(comparison: Comparison) -> Table:
    """The acceptance of reasoning and answers, of arms with drafts; no rows where no text has reasoning."""
    return Table(
        title="Acceptance by part of the text",
        note="with 95 % intervals; a step belongs to the part of its first token",
        columns=_PARTS,
        rows=tuple(
            {"name": arm.name, "part": part, **asdict(each)}
            for arm in comparison.arms
            for part, each in arm.parts.items()
            if each.num_drafts
        ),
        num_keys=2,
    )


def _speed(comparison: Comparison) -> Table:
    return Table(
        title="Speed",
        note=f"output tokens per second, and their ratio to {comparison.reference}",
        columns=_SPEED,
        rows=tuple(asdict(arm) for arm in comparison.arms),
        bars="output_tokens_per_second",
        ticks=quarters(max(arm.output_tokens_per_second or 0.0 for arm in comparison.arms)),
    )


def _tasks(comparison: Comparison) -> Table:
    """Acceptance and speed by task; no rows for a single task."""
    return Table(
        title="By task",
        note=f"mean acceptance length with 95 % intervals; speed, and its ratio to {comparison.reference}",
        columns=_TASKS,
        rows=tuple(
            {"task": task, "name": arm.name, **asdict(arm.tasks[task])}
            for task in comparison.arms[0].tasks
            for arm in comparison.arms
            if task in arm.tasks
        ),
        num_keys=2,
    )
