"""What the run of an arm gave, and lm-eval's samples as its own: one for every metric that is a share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specgen.report.report import Report


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the engine generated for a document; ``greedy``, or drawn."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    greedy: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one document of a task, scored by one of the task's metrics."""

    task: str
    doc_id: int
    metric: str  # with its filter, as lm-eval names it: "exact_match,strict-match"
    score: float  # in [0, 1]
    text: str
    written: Written | None  # None for choices, and for answers from lm-eval's own cache
    question: str


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm after its run: every sample in the order of the documents, and the report of its events."""

    name: str
    dtype: str
    seconds: float  # that the engine has worked
    report: Report
    samples: tuple[Sample, ...]


def samples(
    logged: Mapping[str, list[dict[str, Any]]], written: Mapping[tuple[str, int], Written]
) -> Iterator[Sample]:
    """The samples that ``simple_evaluate`` logged, by task; ``written`` is by task and document.

    Perplexities are no shares of right answers and are left out: they compare by themselves.
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
                        written=written.get((task, row["doc_id"])),
                        question=_question(row),
                    )


def _text(responses: list[list[Any]]) -> str:
    """What was written, or which choice was the likeliest."""
    first = responses[0][0]
    if isinstance(first, str):
        return first
    likelihoods = [float(response[0][0]) for response in responses]
    return f"choice {likelihoods.index(max(likelihoods))}"


def _question(row: Mapping[str, Any]) -> str:
    """The document's own question where it has one, else the whole prompt."""
    own = row["doc"].get("question")
    return own if isinstance(own, str) else str(row["arguments"][0][0])
