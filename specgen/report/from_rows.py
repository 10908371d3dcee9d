"""The report of a run that recorded no events: what its completions say."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from specgen.events import Answered, Event, conversation_of
from specgen.report.acceptance import StepCounts
from specgen.report.report import Report, fold

NONE = "none"  # of ``--events``
# What only events tell; None in the report.
_LACKING = ("wall_seconds", "num_cached_tokens", "num_preemptions", "num_steps_without_drafts")

_LATER = re.compile("(.*)/turn-([0-9]{1,9})", re.DOTALL).fullmatch


def fold_rows(rows: Iterable[Mapping[str, Any]], *, ids: Iterable[str], num_spec_tokens: int) -> Report:
    """The report of the rows of ``completions.jsonl``, all of whose steps with drafts had K = ``num_spec_tokens``.

    ``ids`` are those of all rows, which tell the turns of conversations.
    Counts and acceptance are those of the events. There are no times, no steps, and no parts of texts.
    """
    num_turns: dict[str, int] = {}
    for found in filter(None, map(_LATER, ids)):
        num_turns[found[1]] = max(num_turns.get(found[1], 1), int(found[2]))
    return fold(_answers(rows, num_turns, num_spec_tokens), num_spec_tokens=num_spec_tokens)


def without_events(document: Mapping[str, Any]) -> dict[str, Any]:
    """The ``report.json`` of such a report, with null for what it lacks."""
    lacking = dict.fromkeys(_LACKING)
    return {**document, **lacking, "rows": dict.fromkeys(document["rows"]), "events": NONE}


def _answers(
    rows: Iterable[Mapping[str, Any]], num_turns: Mapping[str, int], num_spec_tokens: int
) -> Iterator[Event]:
    for row in rows:
        yield Answered(
            sequence=row["id"],
            time=0.0,
            reason=row.get("ended_by", row["finish_reason"]),
            num_output_tokens=len(row["token_ids"]),
            submitted=0.0,
            first_token=None,
            num_prompt_tokens=row["num_prompt_tokens"],
            num_cached=0,
            category=row.get("category"),
            turn=row["turn"],
            steps=_steps(row["metrics"], num_spec_tokens),
            reasoning=None,
            num_turns=num_turns.get(conversation_of(row["id"], row["turn"]), 1),
        )


def _steps(metrics: Mapping[str, Any], num_spec_tokens: int) -> dict[str, Any]:
    histogram, steps = list(metrics["acceptance_histogram"]), metrics["num_spec_steps"]
    assert metrics["num_draft_tokens"] == num_spec_tokens * steps, "the number of drafts varied"
    counts = StepCounts(num_spec_tokens)
    at_least = list(accumulate(reversed(histogram)))[::-1]  # [K + 1]: steps that accepted j drafts or more
    counts.histogram = histogram
    counts.drafted = [steps] * num_spec_tokens
    counts.reached, counts.accepted = at_least[:-1], at_least[1:]
    return counts.sums()
