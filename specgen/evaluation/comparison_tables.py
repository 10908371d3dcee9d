"""The comparison of a study's arms as tables; terminal and page show the same."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from statistics import median_low
from typing import Any

from specgen.display import DASH, between, count, hundredths, percent, rate, ratio, seconds
from specgen.evaluation.audit_table import shown_token
from specgen.evaluation.compare import Accuracy, Against, Comparison, p_value
from specgen.evaluation.divergence import Divergence
from specgen.report.charts import Bars, Point, number_axis, share_axis
from specgen.report.table import Column, Row, Table
from specgen.report.tables import acceptance_lines, curve
from specgen.report.terminal import Part, definitions, heading

_POSITIONS = 6  # shown of an acceptance curve; the JSON has all
_DIVERGENCES = 3  # shown of an arm; the page has more
NOTES = (
    (
        "score",
        "mean over samples; interval of Wilson, or of t where scores are not all 0 or 1",
    ),
    (
        "difference",
        "score less the reference's, in points; interval of Tango, or paired t",
    ),
    (
        "p",
        "McNemar's exact test, or paired t; more cautious than an interval that just leaves out 0",
    ),
    ("could see", "smallest true difference that a test of these samples finds in 4 cases of 5"),
)


def _points(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:+.1f}"


def _two_digits(number: float | None) -> str:
    return DASH if number is None else f"{number:.2g}"


_ARM = Column(name="name", title="arm")
_ACCURACY = (
    _ARM,
    Column(name="mean", title="score", show=percent, interval="interval"),
    Column(name="difference", show=_points),
    Column(name="ends", title="95 %"),
    Column(name="p"),
    Column(name="detectable", title="could see", show=hundredths),
)
_TEXTS = (
    _ARM,
    Column(name="same", title="same texts"),
    Column(name="share", show=percent),
    Column(name="first", title="first part at"),
    Column(name="median"),
    Column(name="widest", title="widest gap"),
    Column(name="unexplained"),
)
_PLACES = (
    Column(name="sample", title="texts part in"),
    Column(name="name", title="arm", wraps=True),
    Column(name="position", title="at"),
    Column(name="reference"),
    Column(name="instead"),
    Column(name="gap", show=_two_digits),
    Column(name="rounding", title="bound", show=_two_digits),
    Column(name="why", title=""),
)
_SPEED = (
    _ARM,
    Column(name="output_tokens_per_second", title="output tokens/s", show=rate),
    Column(name="ratio", show=ratio),
    Column(name="num_output_tokens", title="output tokens"),
    Column(name="seconds", title="time", show=seconds),
)


def of_comparison(comparison: Comparison, settings: Mapping[str, str]) -> Iterator[Part]:
    """What a terminal shows of ``comparison`` under its ``settings``, the conclusion at the end."""
    yield heading(settings)
    for accuracy in comparison.arms[0].accuracies:
        table = _accuracy(comparison, accuracy)
        yield f"{table.title}, {count(accuracy.num_samples)} samples"
        yield table
    if comparison.against:
        yield definitions(NOTES)
    texts, *others = _of_texts(comparison)
    yield texts
    yield Table(title="Texts part in", columns=_PLACES, rows=tuple(_places(comparison)), num_keys=2)
    yield from others
    yield comparison.sentence


def all_tables(comparison: Comparison) -> Iterator[Table]:
    """What a page shows."""
    for accuracy in comparison.arms[0].accuracies:
        yield _accuracy(comparison, accuracy)
    yield from _of_texts(comparison)


def _of_texts(comparison: Comparison) -> tuple[Table, Table, Table]:
    return _texts(comparison), _acceptance(comparison), _speed(comparison)


def _accuracy(comparison: Comparison, wanted: Accuracy) -> Table:
    """The arms on the task and metric of ``wanted``."""
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
            row |= {"p": DASH if change.p is None else p_value(change.p), "detectable": change.detectable}
        rows.append(row)
    return Table(
        title=f"{wanted.task} {wanted.metric}",
        note=f"{count(wanted.num_samples)} samples, with 95 % intervals; differences from {comparison.reference}, "
        "in points",
        columns=_ACCURACY,
        rows=tuple(rows),
        chart=Bars(
            title=f"{wanted.task} {wanted.metric}",
            label="score",
            axis=share_axis(),
            show=percent,
            points=[Point(name=name, number=a.mean, interval=a.interval) for name, a in found.items()],
        ),
    )


def _texts(comparison: Comparison) -> Table:
    return Table(
        title="Texts",
        note=f"against {comparison.reference}; places are counted in tokens, gaps are in logits",
        columns=_TEXTS,
        rows=tuple(map(_text_row, comparison.against)),
    )


def _text_row(arm: Against) -> Row:
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


def _places(comparison: Comparison) -> Iterator[Row]:
    """A few places of each arm where texts part."""
    for arm in comparison.against:
        for task, doc_id, first in _worst(arm):
            yield {
                "sample": f"{task} {doc_id}",
                "name": arm.name,
                "position": first.position,
                "reference": shown_token(first.reference_token, first.reference_text),
                "instead": shown_token(first.token, first.text),
                "gap": first.gap,
                "rounding": first.rounding,
                "why": "rounding" if first.explained else "WRONG",
            }


def _worst(arm: Against) -> list[tuple[str, int, Divergence]]:
    """The first divergences of ``arm``; those that nothing explains before all others."""
    found = [(each.task, each.doc_id, each.first) for each in arm.differences if each.first is not None]
    return sorted(found, key=lambda each: each[2].explained)[:_DIVERGENCES]


def _acceptance(comparison: Comparison) -> Table:
    drafting = [arm for arm in comparison.arms if arm.acceptance]
    most = max((len(arm.acceptance) for arm in drafting), default=0)
    shown = [f"token {i}" for i in range(min(_POSITIONS, most))]
    rows = []
    for arm in drafting:
        rates = [position.rate for position in arm.acceptance] + [None] * most
        rows.append({**asdict(arm), **dict(zip(shown, rates, strict=False))})
    lines = {arm.name: curve([asdict(p) for p in arm.acceptance], "rate", "ci95") for arm in drafting}
    length = Column(
        name="mean_acceptance_length", title="acceptance length", interval="mean_acceptance_length_ci95"
    )
    return Table(
        title="Acceptance by position",
        note="% of the verify steps, with 95 % intervals",
        columns=(_ARM, length, *(Column(name=name, show=percent) for name in shown)),
        rows=tuple(rows),
        chart=acceptance_lines("Acceptance by draft position and arm", lines) if lines else None,
    )


def _speed(comparison: Comparison) -> Table:
    speeds = [Point(name=arm.name, number=arm.output_tokens_per_second) for arm in comparison.arms]
    return Table(
        title="Speed",
        note=f"output tokens per second, and their ratio to {comparison.reference}",
        columns=_SPEED,
        rows=tuple(asdict(arm) for arm in comparison.arms),
        chart=Bars(
            title="Output tokens per second",
            label="output tokens per second",
            axis=number_axis(max(point.number or 0.0 for point in speeds)),
            show=rate,
            points=speeds,
        ),
    )
