"""What the arms of a study answered, and how they compare with their reference: accuracy, texts, acceptance, speed."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specgen.config import SamplingParams, require
from specgen.report.display import between, count, hundredths, p_value, same_texts
from specgen.report.intervals import LEVEL, Interval, PairedScores, holm, paired_scores, scores_interval
from specgen.report.report import Report

if TYPE_CHECKING:  # which imports torch
    from specgen.experiments.audit import Divergence, Judge

Document = tuple[str, int]  # a task and the number of one of its documents

_UNTESTED = "Nothing was tested: no step had drafts, so these answers say nothing of speculation."


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The tokens that the engine generated for a document, greedily or sampled."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Answer:
    scores: Mapping[str, float]  # by metric with its filter: "exact_match,strict-match"
    text: str
    generated: Generated | None  # None for choices, and for answers from lm-eval's own cache
    question: str


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """The result of one arm: its answers in the order of the documents, and the reports of its rows."""

    name: str
    dtype: str
    seconds: float  # engine time
    report: Report
    answers: Mapping[Document, Answer]
    tasks: Mapping[str, Report] = field(default_factory=dict)  # of those that generate texts
    results: Mapping[str, Any] = field(default_factory=dict)  # lm-eval's document, samples included
    # by task: prompts that were cut at their start, and the tokens that are left of them
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def answers(
    logged: Mapping[str, list[dict[str, Any]]], generated: Mapping[Document, Generated]
) -> dict[Document, Answer]:
    """The answers in the samples that lm-eval logs, a row for each document and filter.

    What is no number for each document, such as perplexity, is left out.
    """
    found: dict[Document, Answer] = {}
    for task, rows in logged.items():
        for row in rows:
            document, own = (task, row["doc_id"]), row["doc"].get("question")
            scores = {f"{metric},{row['filter']}": row[metric] for metric in row["metrics"]}
            known = {
                metric: float(score) for metric, score in scores.items() if isinstance(score, int | float)
            }
            earlier = found[document].scores if document in found else {}
            require(
                known.keys().isdisjoint(earlier),
                f"document {row['doc_id']} of {task} is there twice: score every document once",
            )
            if known:
                found[document] = Answer(
                    scores={**earlier, **known},
                    text=_text(row),
                    generated=generated.get(document),
                    question=own if isinstance(own, str) else str(row["arguments"][0][0]),  # or the prompt
                )
    return found


def _text(row: Mapping[str, Any]) -> str:
    """The generated text, of several samples all of them, or the most likely choice."""
    responses = row["resps"]
    if isinstance(responses[0][0], str):
        return "\n\n".join(responses[0])
    likelihoods = [float(response[0][0]) for response in responses]
    if "acc_mutual_info" in row["metrics"]:  # behind the choices are their likelihoods without the question
        del likelihoods[len(likelihoods) // 2 :]
    return f"choice {likelihoods.index(max(likelihoods))}"


# --- every arm against the reference ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score:
    """An arm's scores under one metric of a task; ``paired`` less the reference's, None of the reference itself."""

    task: str
    metric: str
    num_samples: int
    mean: float
    interval: Interval | None  # 95 %
    paired: PairedScores | None


@dataclass(frozen=True, kw_only=True)
class Compared(ArmRun):
    """One arm beside the reference; ``firsts`` are the first divergences of texts that should be equal, if any.

    They may differ if they are sampled, of another dtype, or of a text that only lm-eval's own cache had; and equal
    tokens may have been cut differently by a stop string. ``tasks`` has the reports of several tasks, as they run one
    after the other; it is empty for a single one.
    """

    reference: ArmRun
    metrics: tuple[Score, ...]
    firsts: "Mapping[Document, Divergence]"

    @property
    def differing(self) -> list[Document]:
        """The documents whose text is not the reference's."""
        theirs = self.reference.answers
        return [document for document, ours in self.answers.items() if ours.text != theirs[document].text]

    @property
    def num_identical(self) -> int:
        return len(self.answers) - len(self.differing)

    @property
    def positions(self) -> list[int]:
        """Where the texts in ``firsts`` diverge, in tokens."""
        return [first.position for first in self.firsts.values()]

    @property
    def num_cut(self) -> int:
        """Answers that the token limit has cut, but for those that ended while reasoning."""
        report = self.report
        return report.finish_reasons.get("length", 0) - report.ended_in_reasoning.get("length", 0)

    def times(self, task: str | None = None) -> float | None:
        """The speed over the reference's; None where no step had drafts though there was a drafter."""
        ours, theirs = (
            each.report if task is None else each.tasks.get(task) for each in (self, self.reference)
        )
        if ours is None or theirs is None or (ours.num_spec_tokens and not ours.num_drafts):
            return None
        speed, base = ours.output_tokens_per_second, theirs.output_tokens_per_second
        return speed / base if speed is not None and base else None

    def to_json(self) -> dict[str, Any]:
        """The arm's report, its scores with their paired differences, and both speeds."""
        return {
            **self.report.to_json(),
            "name": self.name,
            "seconds": self.seconds,
            "ratio": self.times(),
            "num_cut": self.num_cut,
            "accuracies": [asdict(each) for each in self.metrics],
            "tasks": {
                task: {**each.to_json(), "ratio": self.times(task)} for task, each in self.tasks.items()
            },
        }

    def against(self) -> dict[str, Any]:
        """The differences from the reference, for ``comparison.json``."""
        ours, theirs = self.answers, self.reference.answers
        differences = [
            {
                "task": document[0],
                "doc_id": document[1],
                "question": ours[document].question,
                "text": ours[document].text,
                "reference_text": theirs[document].text,
                "first": asdict(self.firsts[document]) if document in self.firsts else None,
            }
            for document in self.differing
        ]
        return {
            "name": self.name,
            "num_compared": len(ours),
            "num_identical": self.num_identical,
            "differences": differences,
        }


@dataclass(frozen=True, kw_only=True)
class StudyComparison:
    """All arms in the order given, and the conclusion.

    ``num_unexplained`` counts greedy texts that diverge from the reference's by more than rounding explains.
    ``is_tested`` is whether a step had drafts, or no arm was to have any.
    """

    reference: str
    arms: tuple[Compared, ...]
    num_unexplained: int
    alarming: bool  # whether accuracy differs or decoding is wrong
    sentence: str
    is_tested: bool = True

    @property
    def others(self) -> list[Compared]:
        """The arms but the reference."""
        return [arm for arm in self.arms if arm.name != self.reference]

    @property
    def busy(self) -> str:
        """What else the machine did, where that makes speeds doubtful."""
        return next((arm.report.busy for arm in self.arms if arm.report.busy), "")

    def to_json(self) -> dict[str, Any]:
        """The content of ``comparison.json``: all but equal texts, which are in the files of the arms."""
        return {
            "reference": self.reference,
            "arms": [arm.to_json() for arm in self.arms],
            "against": [arm.against() for arm in self.others],
            "num_unexplained": self.num_unexplained,
            "alarming": self.alarming,
            "sentence": self.sentence,
            "is_tested": self.is_tested,
            "busy": self.busy,
        }


REFERENCE = "baseline"  # the name of the reference arm


def reference_of(arms: Sequence[ArmRun]) -> ArmRun:
    """The arm named baseline, or else the first; ``UserError`` without arms."""
    require(len(arms) > 0, "there are no arms to compare: name one or more")
    return next((arm for arm in arms if arm.name == REFERENCE), arms[0])


def compare(arms: Sequence[ArmRun], target: "Judge", *, template_unused: bool = False) -> StudyComparison:
    """Compare ``arms`` with the reference sample by sample; ``target`` judges where their texts diverge.

    ``template_unused`` is whether prompts were raw text though the model has a chat template. Answers pair by
    task, document and metric, of metrics between 0 and 1. ``UserError`` for no arm, two of one name, and arms with
    different samples.
    """
    reference = reference_of(arms)
    left_out = {
        (task, metric)
        for arm in arms
        for (task, _), answer in arm.answers.items()
        for metric, score in answer.scores.items()
        if not 0 <= score <= 1
    }
    kept = {arm.name: _scores(arm, left_out) for arm in arms}
    names, base = [arm.name for arm in arms], kept[reference.name]
    metrics = dict.fromkeys((task, metric) for task, metric, _ in base)
    for name in names:
        require(names.count(name) == 1, f"two arms are named {name!r}: give every arm its own name")
        alone = kept[name].keys() ^ base.keys()
        require(
            not alone,
            f"arms {name!r} and {reference.name!r} differ in {len(alone)} samples, the first of them "
            f"{' '.join(map(str, min(alone, default=())))}: evaluate all arms on the same documents",
        )
    found = [
        Compared(
            **vars(arm) | {"tasks": arm.tasks if len(arm.tasks) > 1 else {}},
            reference=reference,
            metrics=tuple(
                _score(*each, kept[arm.name], None if arm is reference else base) for each in metrics
            ),
            firsts=dict(_divergences(arm, reference, target)),
        )
        for arm in arms
    ]
    others = [arm for arm in found if arm.name != reference.name]
    wrong = sum(not each.explained for arm in others for each in arm.firsts.values())
    accuracy, differs = conclusion(reference.name, others)
    drafting = [arm.report for arm in arms if arm.report.num_spec_tokens and arm.report.num_requests]
    is_tested = differs or not drafting or any(report.num_drafts for report in drafting)
    sentences = [accuracy if is_tested else _UNTESTED]
    sentences += _remarks(found, sorted(left_out), template_unused)
    if wrong:
        sentences.append(
            f"{count(wrong)} text{' diverges' if wrong == 1 else 's diverge'} from the reference where rounding to "
            f"{reference.dtype} cannot explain it: decoding is wrong there."
        )
    return StudyComparison(
        reference=reference.name,
        arms=tuple(found),
        num_unexplained=wrong,
        alarming=wrong > 0 or differs,
        sentence=" ".join(sentences),
        is_tested=is_tested,
    )


_Scores = Mapping[tuple[str, str, int], float]  # by task, metric and document


def _scores(arm: ArmRun, left_out: Set[tuple[str, str]]) -> _Scores:
    return {
        (task, metric, doc_id): score
        for (task, doc_id), answer in arm.answers.items()
        for metric, score in answer.scores.items()
        if (task, metric) not in left_out
    }


def _score(task: str, metric: str, ours: _Scores, theirs: _Scores | None) -> Score:
    keys = [key for key in ours if key[:2] == (task, metric)]
    scores = [ours[key] for key in keys]
    return Score(
        task=task,
        metric=metric,
        num_samples=len(scores),
        mean=fmean(scores),
        interval=scores_interval(scores),
        paired=None if theirs is None else paired_scores(scores, [theirs[key] for key in keys]),
    )


def _divergences(arm: ArmRun, reference: ArmRun, target: "Judge") -> "Iterator[tuple[Document, Divergence]]":
    for document, other in reference.answers.items() if arm.dtype == reference.dtype else ():
        answer = arm.answers[document]
        ours, theirs = answer.generated, other.generated
        if answer.text == other.text or ours is None or theirs is None:
            continue
        if ours.sampling.temperature == theirs.sampling.temperature == 0:
            name, prompt = " ".join(map(str, document)), theirs.prompt_token_ids
            first = target.first_divergence(name, prompt, theirs.token_ids, ours.token_ids, theirs.sampling)
            if first is not None:
                yield document, first


# --- what the data show ---------------------------------------------------------------------------


def conclusion(reference: str, others: Sequence[Compared]) -> tuple[str, bool]:
    """In a line, how many differences in accuracy are significant, and the surest of them; and whether one is.

    The family-wise error rate is 5 %.
    """
    tests = [(arm.name, each, each.paired) for arm in others for each in arm.metrics if each.paired]
    if not tests:
        return (
            f"Accuracy is not compared: {'no score is between 0 and 1' if others else 'there is one arm'}.",
            False,
        )
    # 2: no test is possible
    corrected = [2.0 if p is None else p for p in holm([paired.p for *_, paired in tests])]
    number, least = sum(p < LEVEL for p in corrected), min(corrected)
    name, score, paired = tests[corrected.index(least)]
    compared = sum(len(arm.answers) for arm in others)
    texts = same_texts(sum(arm.num_identical for arm in others) / compared, compared)
    surest = f"{name} {100 * paired.difference:+z.1f} points {between(paired.interval, hundredths)}"
    return (
        f"Significant differences in accuracy from {reference}: {count(number)} of {count(len(tests))} (smallest p "
        f"after Holm {p_value(paired.p and least)}: {surest} on {score.task} {score.metric}); {texts}."
    ), number > 0


def _remarks(
    arms: Sequence[Compared], left_out: Sequence[tuple[str, str]], template_unused: bool
) -> Iterator[str]:
    """Sentences on scores and answers beside the conclusion."""
    if left_out:
        named = ", ".join(f"{metric} of {task}" for task, metric in left_out)
        yield f"Not compared, as they are not between 0 and 1: {named}."
    cut = sorted(next((arm.cut for arm in arms if arm.cut), {}).items())  # the same of all arms
    prompts = {f"{task} to {count(left)} tokens": number for task, (number, left) in cut}
    reasoning = {arm.name: sum(arm.report.ended_in_reasoning.values()) for arm in arms}
    names = [f"{count(arm.report.num_requests)} of {arm.name}" for arm in arms]
    limited = dict(zip(names, (arm.num_cut for arm in arms), strict=True))
    empty = dict(zip(names, (arm.report.num_empty for arm in arms), strict=True))
    raise_it = "; raise --max-new-tokens"
    chat = "; the model has a chat template: add --apply-chat-template" if template_unused else ""
    for what, numbers, remedy in (
        ("Prompts too long for the context lost their start", prompts, "; lower --num-fewshot"),
        ("Answers that ended while reasoning", reasoning, raise_it),
        ("Answers cut at the token limit", limited, raise_it),
        ("Empty answers", empty, chat),
    ):
        if found := ", ".join(f"{count(number)} of {name}" for name, number in numbers.items() if number):
            yield f"{what}: {found}{remedy}."
