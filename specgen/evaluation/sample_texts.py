"""The samples of all arms side by side: those that speculation turned from right to wrong come first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specgen.display import count, plain
from specgen.evaluation.audit_table import four_digits, shown_token
from specgen.evaluation.divergence import Divergence
from specgen.evaluation.samples import ArmRun, Sample
from specgen.report.text_list import Entry, ShownText, Span, TextList, within

_PAGE_BYTES = 3_500_000
_OPEN = 5  # samples shown open, of those that differ
_CHANGES = (
    "wrong text",
    "right to wrong",
    "wrong to right",
    "other score",
    "other text",
    "same text",
)  # in this order


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What arms answered alike; ``scores`` are by metric, ``first`` where the text leaves the reference's."""

    arms: tuple[str, ...]
    text: str
    scores: Mapping[str, float]
    first: Divergence | None


@dataclass(frozen=True, kw_only=True)
class SampleTexts:
    """The answers to one document, the reference's first."""

    task: str
    doc_id: int
    question: str
    answers: tuple[Answer, ...]

    @property
    def change(self) -> str:
        """The gravest of what the other arms changed."""
        reference, *others = self.answers
        found = {"same text"}
        for other in others:
            if other.first is not None and not other.first.explained:
                found.add("wrong text")
            if other.text != reference.text:
                found.add("other text")
            pairs = ((reference.scores[metric], score) for metric, score in other.scores.items())
            found |= {_flip(before, after) for before, after in pairs if before != after}
        return min(found, key=_CHANGES.index)


def _flip(before: float, after: float) -> str:
    return {(1.0, 0.0): "right to wrong", (0.0, 1.0): "wrong to right"}.get((before, after), "other score")


def side_by_side(
    arms: Sequence[ArmRun],
    reference: ArmRun,
    firsts: Mapping[str, Mapping[tuple[str, int], Divergence | None]],
) -> tuple[SampleTexts, ...]:
    """All documents of ``arms``; ``firsts`` has the first divergence by arm and document, where texts differ."""
    ordered = [reference, *(arm for arm in arms if arm is not reference)]
    samples: dict[tuple[str, int], dict[str, list[Sample]]] = {}
    for arm in ordered:
        for sample in arm.samples:
            samples.setdefault((sample.task, sample.doc_id), {}).setdefault(arm.name, []).append(sample)
    found = []
    for (task, doc_id), by_arm in samples.items():
        answers: dict[object, Answer] = {}
        for name, scored in by_arm.items():
            scores = {sample.metric: sample.score for sample in scored}
            first = firsts.get(name, {}).get((task, doc_id))
            alike = (scored[-1].text, tuple(scores.items()), first)
            names = (*answers[alike].arms, name) if alike in answers else (name,)
            answers[alike] = Answer(arms=names, text=scored[-1].text, scores=scores, first=first)
        question = next(iter(by_arm.values()))[0].question
        found.append(
            SampleTexts(task=task, doc_id=doc_id, question=question, answers=tuple(answers.values()))
        )
    return tuple(found)


def text_list(samples: Sequence[SampleTexts]) -> TextList:
    """The samples on a page: wrong texts first, then flips of the score, then other texts."""
    ordered = sorted(samples, key=lambda each: _CHANGES.index(each.change))  # stable: else as asked
    entries = within(map(_entry, ordered), _PAGE_BYTES)
    changes = [each.change for each in samples]
    numbers = ", ".join(f"{count(changes.count(each))} {each}" for each in _CHANGES if each in changes)
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
    equal = [_num_equal(reference.text, other.text) for other in others]
    cuts = [min(equal, default=len(reference.text)), *equal]
    texts = [
        ShownText(name=_name(answer), spans=_marked(answer.text, cut))
        for answer, cut in zip(sample.answers, cuts, strict=True)
    ]
    labels = {"task": sample.task, "change": sample.change}
    return Entry(
        title=f"{sample.task} {sample.doc_id}",
        labels=labels,
        note=f"{reference.arms[0]} {_score(reference.scores)}",
        question=sample.question,
        texts=texts,
    )


def _name(answer: Answer) -> str:
    parts = [", ".join(answer.arms), _score(answer.scores)]
    if answer.first is not None:
        first = answer.first
        ours = shown_token(first.token, first.text)
        theirs = shown_token(first.reference_token, first.reference_text)
        why = "explained by rounding" if first.explained else "WRONG: more than rounding"
        parts += [f"at token {count(first.position)}: {ours} instead of {theirs}"]
        parts += [f"gap {four_digits(first.gap)}", f"bound {four_digits(first.rounding)}", why]
    return " · ".join(parts)


def _score(scores: Mapping[str, float]) -> str:
    words = {
        metric: {1.0: "right", 0.0: "wrong"}.get(score, plain(score)) for metric, score in scores.items()
    }
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{metric}: {word}" for metric, word in words.items())


def _num_equal(one: str, other: str) -> int:
    """Length of the common prefix in characters."""
    pairs = enumerate(zip_longest(one, other))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), len(one))


def _marked(text: str, at: int) -> list[Span]:
    rest = [Span(text[at:], "changed")] if at < len(text) else []
    return [Span(text[:at]), *rest] if at else rest
