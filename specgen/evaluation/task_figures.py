"""Acceptance and speed of each task of an evaluation, which runs its tasks one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from specgen.report.intervals import Interval
from specgen.report.report import Report


@dataclass(frozen=True, kw_only=True)
class TaskFigures:
    """One task in one arm; ``ratio`` is its output tokens per second over the reference's."""

    num_requests: int
    num_output_tokens: int
    output_tokens_per_second: float | None
    ratio: float | None
    mean_acceptance_length: float | None
    mean_acceptance_length_ci95: Interval | None
    draft_acceptance_rate: float | None


def figures_of(tasks: Mapping[str, Report], reference: Mapping[str, Report]) -> dict[str, TaskFigures]:
    """The figures of an arm by task; empty for a single task, whose figures are the arm's."""
    if len(tasks) < 2:
        return {}
    return {task: _figures(report, reference.get(task)) for task, report in tasks.items()}


def _figures(report: Report, reference: Report | None) -> TaskFigures:
    speculation, speed = report.speculation, report.output_tokens_per_second
    base = None if reference is None else reference.output_tokens_per_second
    return TaskFigures(
        num_requests=speculation.num_requests,
        num_output_tokens=speculation.total_num_output_tokens,
        output_tokens_per_second=speed,
        ratio=speed / base if speed is not None and base else None,
        mean_acceptance_length=speculation.mean_acceptance_length,
        mean_acceptance_length_ci95=speculation.mean_acceptance_length_ci95,
        draft_acceptance_rate=speculation.draft_acceptance_rate,
    )
