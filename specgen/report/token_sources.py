"""How each token of a text came to be: accepted draft, the target's own choice, or the prefill's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from specgen.record.record_rows import RequestRow

Kind = Literal["prefill", "draft", "correction", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a token came from.

    ``prefill``: of the prompt's pass; ``draft``: accepted, at ``position`` of its step; ``correction``: the target's
    token in place of draft ``position``, ``rejected``; ``bonus``: the target's behind drafts that were all accepted;
    ``plain``: of a step without drafts.
    """

    kind: Kind
    position: int = 0
    rejected: int | None = None  # a token id


def sources(row: RequestRow) -> list[Source]:
    """The source of every token of a request; empty where its steps were not kept."""
    if row.steps is None:
        return []
    found = [Source("prefill")] * (row.num_output_tokens - sum(step.emitted for step in row.steps))
    for step in row.steps:
        found += islice(sources_of(step.drafts, step.accepted), step.emitted)
    return found


def sources_of(drafts: Sequence[int], accepted: int) -> Iterator[Source]:
    """The sources of the tokens of one verify step, the last of which the target chose."""
    for position in range(accepted):
        yield Source("draft", position)
    if accepted < len(drafts):
        yield Source("correction", accepted, drafts[accepted])
    else:
        yield Source("bonus" if drafts else "plain", accepted)
