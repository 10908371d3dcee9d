"""What the arms of a study answered, and how they compare with their reference: accuracy, texts, acceptance, speed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specgen.config import SamplingParams, require
from specgen.report.display import count, hundredths, p_value, same_texts
from specgen.report.intervals import LEVEL, Interval, PairedScores, holm, paired_scores, scores_interval
from specgen.report.report import Report

if TYPE_CHECKING:  # which imports torch
    from specgen.experiments.audit import Divergence, Judge

# what arms change in an answer, the gravest first
CHANGES = ("wrong text", "right to wrong", "wrong to right", "other score", "other text", "same text")
_FLIPS = {(1.0, 0.0): "right to wrong", (0.0, 1.0): "wrong to right"}
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
            document = (task, row["doc_id"])
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
                    question=_question(row),
                )
    return found


def _text(row: Mapping[str, Any]) -> str:
    """The generated text, or the most likely choice."""
    responses = row["resps"]
    first = responses[0][0]
    if isinstance(first, str):
        return first
    likelihoods = [float(response[0][0]) for response in responses]
    if "acc_mutual_info" in row["metrics"]:  # behind the choices are their likelihoods without the question
        del likelihoods[len(likelihoods) // 2 :]
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
            found |= {_FLIPS.get(pair, "other score") for pair in pairs if pair[0] != pair[1]}
        return min(found, key=CHANGES.index)


def side_by_side(
    arms: Sequence[ArmRun], reference: ArmRun, against: Sequence["ArmComparison"]
) -> tuple[SampleTexts, ...]:
    """All documents of ``arms``, which have the same."""
    ordered = [reference, *(arm for arm in arms if arm is not reference)]
    firsts = {(arm.name, each.task, each.doc_id): each.first for arm in against for each in arm.differences}
    found = []
    for (task, doc_id), theirs in reference.answers.items():
        shared: dict[object, SharedAnswer] = {}
        for arm in ordered:
            ours = arm.answers[task, doc_id]
            first = firsts.get((arm.name, task, doc_id))
            alike = (ours.text, tuple(ours.scores.items()), first)
            names = (*shared[alike].arms, arm.name) if alike in shared else (arm.name,)
            shared[alike] = SharedAnswer(arms=names, text=ours.text, scores=ours.scores, first=first)
        answers = tuple(shared.values())
        found.append(SampleTexts(task=task, doc_id=doc_id, question=theirs.question, answers=answers))
    return tuple(found)


# --- every arm against the reference ---------------------------------------------------------------


REFERENCE = "baseline"  # the name of the reference arm


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The mean score of an arm under one metric of a task."""

    task: str
    metric: str
    num_samples: int
    mean: float
    interval: Interval | None  # 95 %


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The report of an arm or of one of its tasks; ``ratio`` is that of its speed to the reference's."""

    report: Report
    ratio: float | None

    @classmethod
    def beside(cls, report: Report, reference: Report | None) -> "Measured":
        """``report`` beside the reference's, if that has one."""
        speed = report.output_tokens_per_second
        verified = report.num_drafts or not report.num_spec_tokens  # else there is nothing that a ratio is of
        base = reference.output_tokens_per_second if reference is not None and verified else None
        return cls(report=report, ratio=speed / base if speed is not None and base else None)

    def to_json(self) -> dict[str, Any]:
        report = self.report
        return {
            "num_requests": report.num_requests,
            "num_output_tokens": report.total_num_output_tokens,
            "output_tokens_per_second": report.output_tokens_per_second,
            "ratio": self.ratio,
            **{name: getattr(report, name) for name in _ACCEPTANCE},
        }


_ACCEPTANCE = (
    *("mean_acceptance_length", "mean_acceptance_length_ci95", "length_over_all_steps"),
    *("draft_acceptance_rate", "received"),
)


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    name: str
    seconds: float
    measured: Measured
    accuracies: tuple[Accuracy, ...]
    num_cut: int  # answers that the token limit has cut
    tasks: Mapping[str, Measured]  # which run one after the other; empty for a single task

    @property
    def report(self) -> Report:
        return self.measured.report

    def to_json(self) -> dict[str, Any]:
        report = self.report
        return {
            **self.measured.to_json(),
            "name": self.name,
            "seconds": self.seconds,
            "acceptance": [asdict(each) for each in report.acceptance],
            "accuracies": [asdict(each) for each in self.accuracies],
            "parts": {part: asdict(each) for part, each in report.parts.items()},
            "ended_in_reasoning": sum(report.ended_in_reasoning.values()),
            "num_empty": report.num_empty,
            "num_cut": self.num_cut,
            "tasks": {task: each.to_json() for task, each in self.tasks.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """The scores of an arm minus the reference's under one metric of a task."""

    task: str
    metric: str
    paired: PairedScores


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A sample whose text differs from the reference's.

    ``first`` is the first divergence of the tokens. It is None if the texts may differ (sampled, or another dtype),
    if only lm-eval's own cache had the text, and if equal tokens were cut differently by a stop string.
    """

    task: str
    doc_id: int
    question: str
    text: str
    reference_text: str
    first: "Divergence | None"


@dataclass(frozen=True, kw_only=True)
class ArmComparison:
    """One arm compared with the reference."""

    name: str
    changes: tuple[Change, ...]
    num_compared: int  # texts
    num_identical: int
    differences: tuple[Difference, ...]

    @property
    def divergences(self) -> "tuple[Divergence, ...]":
        """First divergences of texts that should be equal."""
        return tuple(each.first for each in self.differences if each.first is not None)


@dataclass(frozen=True, kw_only=True)
class StudyComparison:
    """All arms in the order given, their comparisons with the reference, and the conclusion.

    ``num_unexplained`` counts greedy texts that diverge from the reference's by more than rounding explains.
    ``is_tested`` is whether a step had drafts, or no arm was to have any.
    """

    reference: str
    arms: tuple[ArmSummary, ...]
    against: tuple[ArmComparison, ...]
    num_unexplained: int
    alarming: bool  # whether accuracy differs or decoding is wrong
    sentence: str
    samples: tuple[SampleTexts, ...]
    is_tested: bool = True
    busy: str = ""  # what else the machine did, where that makes speeds doubtful

    def to_json(self) -> dict[str, Any]:
        """All but the samples, whose texts are in the files of the arms."""
        found = asdict(replace(self, samples=(), arms=()))
        del found["samples"]
        return found | {"arms": [arm.to_json() for arm in self.arms]}


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
    arms, left_out = _comparable(arms)
    reference = reference_of(arms)
    names = [arm.name for arm in arms]
    for name in names:
        require(names.count(name) == 1, f"two arms are named {name!r}: give every arm its own name")
    others = [arm for arm in arms if arm is not reference]
    level = LEVEL / max(1, len(others) * len(_scores(reference)))
    against = tuple(_against(arm, reference, level, target) for arm in others)
    wrong = sum(not each.explained for arm in against for each in arm.divergences)
    differs = bool(_significant(_tests(against)))
    is_tested = differs or _is_tested(arms)
    return StudyComparison(
        reference=reference.name,
        arms=tuple(_summary(arm, reference) for arm in arms),
        against=against,
        num_unexplained=wrong,
        alarming=wrong > 0 or differs,
        sentence=(conclusion(reference.name, against) if is_tested else _UNTESTED)
        + _other_scales(left_out)
        + _cut(arms)
        + _unanswered(arms)
        + _limited(arms)
        + _empty(arms, template_unused)
        + _alarm(wrong, reference.dtype),
        samples=side_by_side(arms, reference, against),
        is_tested=is_tested,
        busy=next((arm.report.busy for arm in arms if arm.report.busy), ""),
    )


def _is_tested(arms: Sequence[ArmRun]) -> bool:
    """Whether a step had drafts, if there are arms with a drafter that answered questions."""
    drafting = [arm.report for arm in arms if arm.report.num_spec_tokens and arm.report.num_requests]
    return not drafting or any(report.num_drafts for report in drafting)


def _comparable(arms: Sequence[ArmRun]) -> tuple[list[ArmRun], list[tuple[str, str]]]:
    """``arms`` with the metrics that are between 0 and 1 for all documents of all arms, and the others."""
    left_out = {
        key
        for arm in arms
        for key, scores in _scores(arm).items()
        if not all(0 <= score <= 1 for score in scores.values())
    }
    kept = [
        replace(
            arm,
            answers={
                (task, doc_id): replace(
                    answer,
                    scores={
                        metric: score
                        for metric, score in answer.scores.items()
                        if (task, metric) not in left_out
                    },
                )
                for (task, doc_id), answer in arm.answers.items()
            },
        )
        for arm in arms
    ]
    return kept, sorted(left_out)


_Scores = dict[tuple[str, str], dict[int, float]]  # (task, metric): document: score


def _scores(arm: ArmRun) -> _Scores:
    scores: _Scores = {}
    for (task, doc_id), answer in arm.answers.items():
        for metric, score in answer.scores.items():
            scores.setdefault((task, metric), {})[doc_id] = score
    return scores


def _summary(arm: ArmRun, reference: ArmRun) -> ArmSummary:
    return ArmSummary(
        name=arm.name,
        seconds=arm.seconds,
        measured=Measured.beside(arm.report, reference.report),
        accuracies=tuple(
            Accuracy(
                task=task,
                metric=metric,
                num_samples=len(scores),
                mean=fmean(scores.values()),
                interval=scores_interval(list(scores.values())),
            )
            for (task, metric), scores in _scores(arm).items()
        ),
        num_cut=num_cut(arm),
        tasks={
            task: Measured.beside(report, reference.tasks.get(task))
            for task, report in (arm.tasks.items() if len(arm.tasks) > 1 else ())
        },
    )


def _against(arm: ArmRun, reference: ArmRun, level: float, target: "Judge") -> ArmComparison:
    scores, base = _scores(arm), _scores(reference)
    alone = _keys(scores) ^ _keys(base)
    require(
        not alone,
        f"arms {arm.name!r} and {reference.name!r} differ in {len(alone)} samples, the first of them "
        f"{' '.join(map(str, min(alone, default=())))}: evaluate all arms on the same documents",
    )
    changes = [
        Change(
            task=task,
            metric=metric,
            paired=paired_scores(
                [scores[task, metric][i] for i in documents], list(documents.values()), level=level
            ),
        )
        for (task, metric), documents in base.items()
    ]
    judge = target if arm.dtype == reference.dtype else None
    pairs = {document: (arm.answers[document], other) for document, other in reference.answers.items()}
    differences = tuple(
        _difference(document, ours, theirs, judge)
        for document, (ours, theirs) in pairs.items()
        if ours.text != theirs.text
    )
    return ArmComparison(
        name=arm.name,
        changes=tuple(changes),
        num_compared=len(pairs),
        num_identical=len(pairs) - len(differences),
        differences=differences,
    )


def _keys(scores: _Scores) -> set[tuple[str, str, int]]:
    return {(task, metric, doc_id) for (task, metric), documents in scores.items() for doc_id in documents}


def _difference(document: Document, answer: Answer, reference: Answer, target: "Judge | None") -> Difference:
    task, doc_id = document
    ours, theirs, first = answer.generated, reference.generated, None
    if (
        target is not None
        and ours
        and theirs
        and ours.sampling.temperature == theirs.sampling.temperature == 0
    ):
        first = target.first_divergence(
            f"{task} {doc_id}", theirs.prompt_token_ids, theirs.token_ids, ours.token_ids, theirs.sampling
        )
    return Difference(
        task=task,
        doc_id=doc_id,
        question=answer.question,
        text=answer.text,
        reference_text=reference.text,
        first=first,
    )


# --- what the data show ---------------------------------------------------------------------------


def conclusion(reference: str, against: Sequence[ArmComparison]) -> str:
    """One sentence: whether the data show a difference in accuracy, and what difference is detectable.

    The family-wise error rate is 5 %.
    """
    tests = _tests(against)
    if not tests:
        what = "no score between 0 and 1" if against else "one arm only"
        return f"There is {what}, so there is nothing to compare."
    shown = _significant(tests)
    if shown:
        found = ", and ".join(_finding(name, change) for name, change in shown)
        return f"The data show a difference in accuracy from {reference}: {found}; {_power(tests)}."
    least = min((change.paired.p for _, change in tests if change.paired.p is not None), default=None)
    smallest = (
        "too few samples for a test, or all differ alike" if least is None else f"smallest p {p_value(least)}"
    )
    many = f" of {count(len(tests))} tests" if len(tests) > 1 and least is not None else ""
    compared = sum(arm.num_compared for arm in against)
    texts = same_texts(sum(arm.num_identical for arm in against) / compared, compared)
    return (
        f"The data show no difference in accuracy from {reference} ({smallest}{many}, {texts}); "
        f"{_power(tests)}."
    )


def _tests(against: Sequence[ArmComparison]) -> list[tuple[str, Change]]:
    return [(arm.name, change) for arm in against for change in arm.changes]


def _other_scales(left_out: Sequence[tuple[str, str]]) -> str:
    """The metrics that are not compared."""
    if not left_out:
        return ""
    named = ", ".join(f"{metric} of {task}" for task, metric in left_out)
    return f" Not compared, as they are not between 0 and 1: {named}."


def _cut(arms: Sequence[ArmRun]) -> str:
    """How many prompts lost their start; the same of all arms."""
    cut = sorted(next((arm.cut for arm in arms if arm.cut), {}).items())
    numbers = {f"{task} to {count(left)} tokens": number for task, (number, left) in cut}
    return _counted("Prompts too long for the context lost their start", numbers, "; lower --num-fewshot")


def _unanswered(arms: Sequence[ArmRun]) -> str:
    """How many texts of each arm have no answer to score, because they ended while reasoning."""
    numbers = {arm.name: sum(arm.report.ended_in_reasoning.values()) for arm in arms}
    return _counted("Answers that ended while reasoning", numbers, "; raise --max-new-tokens")


def _limited(arms: Sequence[ArmRun]) -> str:
    """How many answers of each arm the token limit has cut, but for those that ``_unanswered`` names."""
    numbers = {f"{count(arm.report.num_requests)} of {arm.name}": num_cut(arm) for arm in arms}
    return _counted("Answers cut at the token limit", numbers, "; raise --max-new-tokens")


def num_cut(arm: ArmRun) -> int:
    """The answers that the token limit has cut."""
    report = arm.report
    return report.finish_reasons.get("length", 0) - report.ended_in_reasoning.get("length", 0)


def _empty(arms: Sequence[ArmRun], template_unused: bool) -> str:
    """How many texts of each arm are empty, and the likely remedy."""
    numbers = {f"{count(arm.report.num_requests)} of {arm.name}": arm.report.num_empty for arm in arms}
    remedy = "; the model has a chat template: add --apply-chat-template" if template_unused else ""
    return _counted("Empty answers", numbers, remedy)


def _counted(what: str, numbers: Mapping[str, int], remedy: str) -> str:
    """A sentence with the numbers that are not 0, each of what is named, and a remedy; empty without one."""
    found = ", ".join(f"{count(number)} of {name}" for name, number in numbers.items() if number)
    return f" {what}: {found}{remedy}." if found else ""


def _alarm(num_unexplained: int, dtype: str) -> str:
    """The sentence after the conclusion if decoding itself is wrong."""
    if num_unexplained == 0:
        return ""
    texts = "text diverges" if num_unexplained == 1 else "texts diverge"
    return (
        f" {count(num_unexplained)} {texts} from the reference where rounding to {dtype} cannot explain it: "
        "decoding is wrong there."
    )


def _significant(tests: Sequence[tuple[str, Change]]) -> list[tuple[str, Change]]:
    """The tests that are significant after Holm's correction, the smallest p first."""
    corrected = holm([change.paired.p for _, change in tests])
    shown = [test for p, test in zip(corrected, tests, strict=True) if p is not None and p < LEVEL]
    return sorted(shown, key=lambda test: test[1].paired.p or 0.0)


def _finding(name: str, change: Change) -> str:
    result = change.paired
    side = "higher" if result.difference > 0 else "lower"
    interval = ""
    if result.interval is not None:
        low, high = (f"{100 * end:+z.1f}" for end in result.interval)
        interval = f", 95 % {low} to {high}"
    assert result.p is not None
    points = hundredths(abs(result.difference))
    return (
        f"{name} is {points} points {side} on {change.task} {change.metric} (p {p_value(result.p)}{interval})"
    )


def _power(tests: Sequence[tuple[str, Change]]) -> str:
    """The smallest difference that every one of the tests detects."""
    detectable = [change.paired.detectable for _, change in tests]
    known = [difference for difference in detectable if difference is not None]
    if len(known) < len(detectable):
        return "these samples are too few or too similar to detect even a large one"
    fewest = min(change.paired.num_samples for _, change in tests)
    points = hundredths(max(known))
    return f"{count(fewest)} samples detect a difference of {points} points or more with 80 % power"
