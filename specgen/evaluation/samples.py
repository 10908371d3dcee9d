"""The result of an arm, lm-eval's samples (one per document and metric in [0, 1]), and those of all arms together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specgen.config import SamplingParams
from specgen.report.report import Report

if TYPE_CHECKING:  # which imports torch
    from specgen.evaluation.divergence import Divergence

# what arms change in an answer, the gravest first
CHANGES = ("wrong text", "right to wrong", "wrong to right", "other score", "other text", "same text")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The tokens that the engine generated for a document, greedily or sampled."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one document of a task, scored by one of the task's metrics."""

    task: str
    doc_id: int
    metric: str  # with its filter, as lm-eval names it: "exact_match,strict-match"
    score: float  # in [0, 1]
    text: str
    generated: Generated | None  # None for choices, and for answers from lm-eval's own cache
    question: str


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """The result of one arm: its samples in the order of the documents, and the reports of its rows."""

    name: str
    dtype: str
    seconds: float  # engine time
    report: Report
    samples: tuple[Sample, ...]
    tasks: Mapping[str, Report] = field(default_factory=dict)  # of those that generate texts


def samples(
    logged: Mapping[str, list[dict[str, Any]]], generated: Mapping[tuple[str, int], Generated]
) -> Iterator[Sample]:
    """The samples in ``simple_evaluate``'s log; ``generated`` is by task and document.

    Metrics outside [0, 1], such as perplexity, are left out.
    """
    for task, rows in logged.items():
        for row in rows:
            for metric in row["metrics"]:
                score = row[metric]
                if isinstance(score, int | float) and 0 <= score <= 1:
                    yield Sample(
                        task=task,
                        doc_id=row["doc_id"],
                        metric=f"{metric},{row['filter']}",
                        score=float(score),
                        text=_text(row["resps"]),
                        generated=generated.get((task, row["doc_id"])),
                        question=_question(row),
                    )


def _text(responses: list[list[Any]]) -> str:
    """The generated text, or the most likely choice."""
    first = responses[0][0]
    if isinstance(first, str):
        return first
    likelihoods = [float(response[0][0]) for response in responses]
    return f"choice {likelihoods.index(max(likelihoods))}"


def _question(row: Mapping[str, Any]) -> str:
    """The document's ``question``, or else the whole prompt."""
    own = row["doc"].get("question")
    return own if isinstance(own, str) else str(row["arguments"][0][0])


# --- all arms side by side -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedAnswer:
    """What arms answered alike; ``scores`` are by metric, ``first`` where the text leaves the reference's."""

    arms: tuple[str, ...]
    text: str
    scores: Mapping[str, float]
    first: "Divergence | None"


@dataclass(frozen=True, kw_only=True)
class SampleTexts:
    """The answers to one document, the reference's first."""

    task: str
    doc_id: int
    question: str
    answers: tuple[SharedAnswer, ...]

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
        return min(found, key=CHANGES.index)


def _flip(before: float, after: float) -> str:
    return {(1.0, 0.0): "right to wrong", (0.0, 1.0): "wrong to right"}.get((before, after), "other score")


def side_by_side(
    arms: Sequence[ArmRun],
    reference: ArmRun,
    firsts: "Mapping[str, Mapping[tuple[str, int], Divergence | None]]",
) -> tuple[SampleTexts, ...]:
    """All documents of ``arms``; ``firsts`` has the first divergence by arm and document, where texts differ."""
    ordered = [reference, *(arm for arm in arms if arm is not reference)]
    samples: dict[tuple[str, int], dict[str, list[Sample]]] = {}
    for arm in ordered:
        for sample in arm.samples:
            samples.setdefault((sample.task, sample.doc_id), {}).setdefault(arm.name, []).append(sample)
    found = []
    for (task, doc_id), by_arm in samples.items():
        answers: dict[object, SharedAnswer] = {}
        for name, scored in by_arm.items():
            scores = {sample.metric: sample.score for sample in scored}
            first = firsts.get(name, {}).get((task, doc_id))
            alike = (scored[-1].text, tuple(scores.items()), first)
            names = (*answers[alike].arms, name) if alike in answers else (name,)
            answers[alike] = SharedAnswer(arms=names, text=scored[-1].text, scores=scores, first=first)
        question = next(iter(by_arm.values()))[0].question
        found.append(
            SampleTexts(task=task, doc_id=doc_id, question=question, answers=tuple(answers.values()))
        )
    return tuple(found)
