"""An arm of a study: what its run gave, as the comparison reads it."""

from dataclasses import dataclass

from specgen.report import Report


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one document of a task, scored by one of the task's metrics."""

    task: str
    doc_id: int
    metric: str  # with its filter, as lm-eval names it: "exact_match,strict-match"
    score: float  # in [0, 1]
    text: str
    token_ids: tuple[int, ...]
    question: str


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm after its run: every sample in the order of the documents, and the report of its events."""

    name: str
    seconds: float
    report: Report
    samples: tuple[Sample, ...]
