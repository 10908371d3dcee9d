"""A study as one HTML page: accuracy, acceptance and speed by arm, and the samples that differ side by side."""

from collections.abc import Mapping
from dataclasses import asdict
from html import escape

from specgen.display import DASH, between, count, hundredths, plain, rate, ratio, seconds
from specgen.evaluation.audit_table import shown_token
from specgen.evaluation.compare import Accuracy, Against, Comparison, Difference, p_value
from specgen.evaluation.comparison_tables import NOTES, text_numbers
from specgen.evaluation.divergence import Divergence
from specgen.report.charts import ARM_STYLES, arms_chart, bars_chart
from specgen.report.page import Cell, card, document, legend, pairs, table

_DIFFERENCES = 20  # shown of an arm
_POSITIONS = 4  # in the table under the curves, so that it fits a phone


def render(comparison: Comparison, settings: Mapping[str, str], title: str) -> str:
    """The page of ``comparison`` under ``title`` and ``settings``; it opens without a network."""
    accuracies = comparison.arms[0].accuracies
    cards = [
        *(_accuracy(comparison, accuracy, index) for index, accuracy in enumerate(accuracies)),
        _texts(comparison),
        _acceptance(comparison),
        _speed(comparison),
    ]
    style = "alert" if comparison.alarming else "finding"
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            pairs("settings", settings),
            f'<p class="{style}">{escape(comparison.sentence)}</p>',
            f'<div class="columns">{"".join(cards)}</div>',
            pairs("notes card", dict(NOTES)),
            *(_differing(arm, comparison.reference) for arm in comparison.against),
        ],
    )


def _accuracy(comparison: Comparison, wanted: Accuracy, index: int) -> str:
    """The arms on the task and metric of ``wanted``; ``index`` tells its chart from the others."""
    key = (wanted.task, wanted.metric)
    found = [(arm.name, a) for arm in comparison.arms for a in arm.accuracies if (a.task, a.metric) == key]
    name = f"{wanted.task} {wanted.metric}"
    bars = bars_chart(
        f"accuracy-{index}", name, [(arm, score.mean, score.interval) for arm, score in found], hundredths
    )
    rows: list[tuple[Cell, ...]] = []
    for arm in comparison.against:
        result = next(c.paired for c in arm.changes if (c.task, c.metric) == key)
        difference = (f"{100 * result.difference:+.1f}", between(result.interval, hundredths))
        p = DASH if result.p is None else p_value(result.p)
        rows.append((arm.name, difference, p, hundredths(result.detectable)))
    numbers = table(name, (f"from {comparison.reference}", "difference", "p", "could see"), rows)
    note = f"% of {count(wanted.num_samples)} samples, with 95 % intervals; differences are in points"
    return card(name, note, body=bars + numbers)


def _acceptance(comparison: Comparison) -> str:
    drafting = [arm for arm in comparison.arms if arm.acceptance]
    if not drafting:
        return ""
    chart = arms_chart({arm.name: [asdict(position) for position in arm.acceptance] for arm in drafting})
    styles = {arm.name: ARM_STYLES[index % len(ARM_STYLES)] for index, arm in enumerate(drafting)}
    note = "% of the verify steps, with 95 % intervals; in the table length, then % by token"
    rows: list[tuple[Cell, ...]] = [
        (
            arm.name,
            plain(arm.mean_acceptance_length),
            *(hundredths(position.rate) for position in arm.acceptance[:_POSITIONS]),
        )
        for arm in drafting
    ]
    columns = max(map(len, rows))
    filled = [(*row, *[DASH] * (columns - len(row))) for row in rows]
    header = ("arm", "length", *map(str, range(columns - 2)))
    numbers = table("Acceptance by arm", header, filled)
    return card("Acceptance by position", legend(styles, note), body=chart + numbers)


def _speed(comparison: Comparison) -> str:
    arms = comparison.arms
    bars = [(arm.name, arm.output_tokens_per_second, None) for arm in arms]
    chart = bars_chart("speed", "Output tokens a second", bars, rate)
    rows = [(arm.name, ratio(arm.ratio), count(arm.num_output_tokens), seconds(arm.seconds)) for arm in arms]
    numbers = table("Speed by arm", ("arm", "ratio", "tokens", "time"), rows)
    note = f"output tokens a second, and their ratio to {comparison.reference}"
    return card("Speed", escape(note), body=chart + numbers)


# --- texts ----------------------------------------------------------------------------------------


def _texts(comparison: Comparison) -> str:
    rows: list[tuple[Cell, ...]] = []
    for arm in comparison.against:
        same, _, first, _, widest, wrong = text_numbers(arm)
        rows.append((arm.name, same, first, widest, wrong))
    if not rows:
        return ""
    numbers = table("Texts by arm", ("arm", "same texts", "first part at", "widest gap", "unexplained"), rows)
    note = f"against {comparison.reference}; places are counted in tokens, gaps are in logits"
    return card("Texts", escape(note), body=numbers)


def _differing(arm: Against, reference: str) -> str:
    """The texts of ``arm`` that differ, those that nothing explains first."""
    if not arm.differences:
        return ""
    ordered = sorted(arm.differences, key=lambda each: each.first is None or each.first.explained)
    note = f"{count(len(ordered))} of {count(arm.num_compared)} differ from {reference}"
    shown = f"; {_DIFFERENCES} of them are shown" if len(ordered) > _DIFFERENCES else ""
    body = "".join(_side_by_side(each, arm.name, reference) for each in ordered[:_DIFFERENCES])
    return card(f"Texts of {arm.name}", escape(note + shown), body=body)


def _side_by_side(difference: Difference, name: str, reference: str) -> str:
    """Both texts of a sample, marked from the first character that differs."""
    text, other = difference.text, difference.reference_text
    alike = (ours == theirs for ours, theirs in zip(text, other, strict=False))
    same = next((i for i, equal in enumerate(alike) if not equal), min(len(text), len(other)))
    where = f"{escape(f'{difference.task} {difference.doc_id}')}{_place(difference.first)}"
    question = f'<p class="question">{where}\n{escape(difference.question)}</p>'
    return f'<div class="texts">{question}{_text(name, text, same)}{_text(reference, other, same)}</div>'


def _place(first: Divergence | None) -> str:
    """Where the tokens part, how close the choice was there, and whether rounding explains it."""
    if first is None:
        return ""
    ours = shown_token(first.token, first.text)
    theirs = shown_token(first.reference_token, first.reference_text)
    gap = DASH if first.gap is None else f"{first.gap:.4g}"
    why = "explained by rounding" if first.explained else "WRONG: more than rounding"
    place = f", at token {count(first.position)}: {ours} instead of {theirs}"
    return f"{escape(place)}\n<small>gap {gap} · bound {first.rounding:.4g} · {why}</small>"


def _text(name: str, text: str, same: int) -> str:
    marked = f"{escape(text[:same])}<mark>{escape(text[same:])}</mark>"
    return f"<div><small>{escape(name)}</small><p>{marked}</p></div>"
