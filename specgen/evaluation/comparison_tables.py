"""The comparison of a study's arms as plain text for a terminal."""

import textwrap
from collections.abc import Mapping
from statistics import median_low

from specgen.display import (
    DASH,
    between,
    clip,
    count,
    hundredths,
    percent,
    plain,
    rate,
    ratio,
    seconds,
    table,
)
from specgen.evaluation.audit_table import shown_token
from specgen.evaluation.compare import Accuracy, Against, Comparison, p_value
from specgen.evaluation.divergence import Divergence
from specgen.report.acceptance import Position
from specgen.report.tables import heading, joined

_WIDTH = 100  # columns
_NAME = 24  # of an arm
_SHORT_NAME = 14
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


def render(comparison: Comparison, settings: Mapping[str, str]) -> str:
    """``comparison`` at 100 columns under its ``settings``, the conclusion at the end; ends with a line break."""
    sections = [
        heading(settings),
        *(_accuracy(comparison, index) for index in range(len(comparison.arms[0].accuracies))),
        _notes() if comparison.against else [],
        _texts(comparison),
        _divergences(comparison),
        _acceptance(comparison),
        _speed(comparison),
        textwrap.wrap(comparison.sentence, _WIDTH),
    ]
    return joined(sections)


def _accuracy(comparison: Comparison, index: int) -> list[str]:
    """The arms on the task and metric that stand at ``index`` in the first one."""
    wanted = comparison.arms[0].accuracies[index]
    changes = {
        arm.name: next(c.paired for c in arm.changes if (c.task, c.metric) == (wanted.task, wanted.metric))
        for arm in comparison.against
    }
    rows = []
    for arm in comparison.arms:
        accuracy = next(a for a in arm.accuracies if _same(a, wanted))
        row = [clip(arm.name, _NAME), percent(accuracy.mean), between(accuracy.interval, hundredths)]
        if change := changes.get(arm.name):
            low_high = between(change.interval, hundredths)
            p = DASH if change.p is None else p_value(change.p)
            row += [f"{100 * change.difference:+.1f}", low_high, p, hundredths(change.detectable)]
        else:
            row += ["", "", "", ""]
        rows.append(row)
    heading = f"{wanted.task} {wanted.metric}, {count(wanted.num_samples)} samples"
    header = ("arm", "score", "95 %", "difference", "95 %", "p", "could see")
    return [heading, *table(header, rows)]


def _notes() -> list[str]:
    lines = (textwrap.wrap(f"{term} = {text}", _WIDTH, subsequent_indent="  ") for term, text in NOTES)
    return [line for wrapped in lines for line in wrapped]


def _same(accuracy: Accuracy, other: Accuracy) -> bool:
    return (accuracy.task, accuracy.metric) == (other.task, other.metric)


def _texts(comparison: Comparison) -> list[str]:
    rows = [(clip(arm.name, _NAME), *text_numbers(arm)) for arm in comparison.against]
    header = (
        *("arm", "same texts", "share", "first part at", "median", "widest gap"),
        "unexplained",
    )
    return table(header, rows) if rows else []


def text_numbers(arm: Against) -> tuple[str, str, str, str, str, str]:
    """The same texts and their share, the first and the median place of parting, the widest gap, and how many
    places nothing explains."""
    where = [each.position for each in arm.divergences]
    first, middle = (min(where), median_low(where)) if where else (None, None)
    return (
        f"{count(arm.num_identical)} of {count(arm.num_compared)}",
        percent(arm.num_identical / arm.num_compared if arm.num_compared else None),
        count(first),
        count(middle),
        plain(max((each.gap for each in arm.divergences if each.gap is not None), default=None)),
        count(sum(not each.explained for each in arm.divergences)),
    )


def _divergences(comparison: Comparison) -> list[str]:
    """A few places of each arm where texts part."""
    rows = [
        (
            f"{clip(task, _SHORT_NAME)} {doc_id}",
            clip(arm.name, _SHORT_NAME),
            count(first.position),
            shown_token(first.reference_token, first.reference_text),
            shown_token(first.token, first.text),
            _short(first.gap),
            _short(first.rounding),
            "rounding" if first.explained else "WRONG",
        )
        for arm in comparison.against
        for task, doc_id, first in _worst(arm)
    ]
    header = ("texts part in", "arm", "at", "reference", "instead", "gap", "bound", "")
    return table(header, rows) if rows else []


def _worst(arm: Against) -> list[tuple[str, int, Divergence]]:
    """The first divergences of ``arm``; those that nothing explains before all others."""
    found = [(each.task, each.doc_id, each.first) for each in arm.differences if each.first is not None]
    return sorted(found, key=lambda each: each[2].explained)[:_DIVERGENCES]


def _short(number: float | None) -> str:
    return DASH if number is None else f"{number:.2g}"


def _acceptance(comparison: Comparison) -> list[str]:
    drafting = [arm for arm in comparison.arms if arm.acceptance]
    positions = range(min(_POSITIONS, max((len(arm.acceptance) for arm in drafting), default=0)))
    rows = [
        (
            clip(arm.name, _NAME),
            plain(arm.mean_acceptance_length),
            between(arm.mean_acceptance_length_ci95, plain),
            *(_rate(arm.acceptance, i) for i in positions),
        )
        for arm in drafting
    ]
    header = ("arm", "acceptance length", "95 %", *(f"token {i}" for i in positions))
    return table(header, rows) if rows else []


def _rate(acceptance: tuple[Position, ...], index: int) -> str:
    return percent(acceptance[index].rate) if index < len(acceptance) else DASH


def _speed(comparison: Comparison) -> list[str]:
    rows = [
        (
            clip(arm.name, _NAME),
            rate(arm.output_tokens_per_second),
            ratio(arm.ratio),
            count(arm.num_output_tokens),
            seconds(arm.seconds),
        )
        for arm in comparison.arms
    ]
    return table(("arm", "output tokens/s", "ratio", "output tokens", "time"), rows)
