"""The result of an arm, and lm-eval's samples: one per document and metric in [0, 1]."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specgen.config import SamplingParams
from specgen.report.report import Report


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
    """The result of one arm: its samples in the order of the documents, and the reports of its events."""

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
