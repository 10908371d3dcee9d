"""A study as one HTML page: accuracy, acceptance and speed by arm, and the samples that differ side by side."""

from collections.abc import Mapping

from specgen.display import count
from specgen.evaluation.audit_table import four_digits, shown_token
from specgen.evaluation.compare import Against, Comparison, Difference
from specgen.evaluation.comparison_tables import NOTES, all_tables
from specgen.report.page import Page, TextCard, Texts

_DIFFERENCES = 20  # shown of an arm


def page(comparison: Comparison, settings: Mapping[str, str], title: str) -> str:
    """The page of ``comparison`` under ``title`` and ``settings``; it opens without a network."""
    return Page(
        title=title,
        settings=settings,
        sentence=comparison.sentence,
        alarming=comparison.alarming,
        tables=list(all_tables(comparison)),
        notes=dict(NOTES),
        cards=[_differing(arm, comparison.reference) for arm in comparison.against if arm.differences],
    ).to_html()


def _differing(arm: Against, reference: str) -> TextCard:
    """The texts of ``arm`` that differ, those that nothing explains first."""
    ordered = sorted(arm.differences, key=lambda each: each.first is None or each.first.explained)
    note = f"{count(len(ordered))} of {count(arm.num_compared)} differ from {reference}"
    shown = f"; {_DIFFERENCES} of them are shown" if len(ordered) > _DIFFERENCES else ""
    texts = [_side_by_side(each, arm.name, reference) for each in ordered[:_DIFFERENCES]]
    return TextCard(title=f"Texts of {arm.name}", note=note + shown, texts=texts)


def _side_by_side(difference: Difference, name: str, reference: str) -> Texts:
    """Both texts, where their tokens part, how close the choice was there, and whether rounding explains it."""
    first, place, note = difference.first, f"{difference.task} {difference.doc_id}", ""
    if first is not None:
        ours = shown_token(first.token, first.text)
        theirs = shown_token(first.reference_token, first.reference_text)
        place += f", at token {count(first.position)}: {ours} instead of {theirs}"
        why = "explained by rounding" if first.explained else "WRONG: more than rounding"
        note = f"gap {four_digits(first.gap)} · bound {four_digits(first.rounding)} · {why}"
    texts = {name: difference.text, reference: difference.reference_text}
    return Texts(place=place, note=note, question=difference.question, texts=texts)
