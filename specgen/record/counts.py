"""Verify steps counted by draft position, and by the part of the text that they are of."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from specgen.config import require

PARTS = ("reasoning", "answer")


class Step(NamedTuple):
    """One verify step of one request: its drafts, how many the target accepted, how many tokens became output.

    ``emitted`` is ``accepted + 1`` unless the text ended within the step. Plain decoding has no drafts.
    """

    number: int  # of its pass
    drafts: Sequence[int]
    accepted: int
    emitted: int


class StepCounts:
    """The verify steps of a request, or of several, by draft position: lists of ``[K]``, the histogram ``[K + 1]``."""

    def __init__(self, num_spec_tokens: int) -> None:
        self.drafted = [0] * num_spec_tokens
        self.reached = [0] * num_spec_tokens
        self.accepted = [0] * num_spec_tokens
        self.histogram = [0] * (num_spec_tokens + 1)
        self.without_drafts = 0

    @classmethod
    def of(cls, steps: Iterable[Step], num_spec_tokens: int) -> Self:
        """The counts of ``steps``; ``UserError`` for one that cannot belong to a run with this K."""
        counts = cls(num_spec_tokens)
        for (drafted, accepted), number in Counter(
            (len(step.drafts), step.accepted) for step in steps
        ).items():
            counts.add(drafted, accepted, number)
        return counts

    def add(self, drafted: int, accepted: int, number: int = 1) -> None:
        """Count ``number`` equal steps; ``UserError`` for what cannot belong to this run."""
        most = len(self.drafted)
        require(drafted <= most, f"a step has {drafted} drafts but K is {most}: give the run's K")
        require(
            0 <= accepted <= drafted,
            f"a step accepted {accepted} of {drafted} drafts: the rows are corrupt, run again",
        )
        if drafted == 0:
            self.without_drafts += number
            return
        for position in range(drafted):
            self.drafted[position] += number
            self.reached[position] += number * (accepted >= position)
            self.accepted[position] += number * (accepted > position)
        self.histogram[accepted] += number

    def __add__(self, other: "StepCounts") -> "StepCounts":
        """The counts of both, as of one run."""
        found = StepCounts(len(self.drafted))
        for name in ("drafted", "reached", "accepted", "histogram"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(found, name, [ours + theirs for ours, theirs in pairs])
        found.without_drafts = self.without_drafts + other.without_drafts
        return found

    @classmethod
    def of_row(cls, row: Mapping[str, Any], num_spec_tokens: int) -> Self:
        """The counts whose ``vars`` are ``row``, of at most K drafts; ``UserError`` where they are of more."""
        most = len(row["drafted"])
        require(
            most <= num_spec_tokens, f"a step has {most} drafts but K is {num_spec_tokens}: give the run's K"
        )
        counts, more = cls(num_spec_tokens), [0] * (num_spec_tokens - most)
        for name, value in row.items():
            setattr(counts, name, value if name == "without_drafts" else value + more)
        return counts

    @property
    def num_steps(self) -> int:
        """Steps with drafts."""
        return sum(self.histogram)


def count_parts(
    switches: Sequence[tuple[int, str]],
    steps: Sequence[Step],
    num_output_tokens: int,
    most: int,
) -> dict[str, Any]:
    """The steps and tokens of one text by part: a step belongs to the part of its first token.

    ``switches`` has the output token from which on the text is of a part, an answer before the first;
    other tokens than those of ``steps``, which have at most ``most`` drafts, came before them. ``part`` is the last.
    """
    changes = [(0, "answer"), *switches]
    steps_of: dict[str, list[Step]] = {"answer": [], "reasoning": []}
    first = num_output_tokens - sum(step.emitted for step in steps)
    for step in steps:
        steps_of[next(part for at, part in reversed(changes) if at <= first)].append(step)
        first += step.emitted
    starts = [min(at, num_output_tokens) for at, _ in changes]  # the last may be of a token that was dropped
    tokens = dict.fromkeys(PARTS, 0)
    for (_, part), start, end in zip(changes, starts, [*starts[1:], num_output_tokens], strict=True):
        tokens[part] += end - start
    counts = {part: vars(StepCounts.of(each, most)) for part, each in steps_of.items()}
    return {"part": changes[-1][1], "steps": counts, "tokens": tokens}
