"""Arms of a study: those with a name on the command line, and what the run of one gave."""

from dataclasses import dataclass

from specgen.config import require
from specgen.evaluation.studies import Arm
from specgen.report.report import Report

_NAMED = {
    "padded": Arm(name="padded", drafter_batch="padded"),
    "non-padded": Arm(name="non-padded", drafter_batch="non-padded"),
    "baseline": Arm(name="baseline", num_spec_tokens=0),
}
ALL_NAMED = ",".join(_NAMED)


def named_arms(text: str) -> tuple[Arm, ...]:
    """The arms that ``text`` names with commas between; ``UserError`` for an unknown name."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require(name in _NAMED, f"arm {name!r} is unknown: use {', '.join(_NAMED)}, or --study for others")
    return tuple(_NAMED[name] for name in names)


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
