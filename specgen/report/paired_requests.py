"""The requests that two runs share: the same id and the same prompt, with paired differences of acceptance.

Turns of a conversation have its earlier answers in their context, so conversations are the independent units; those
that begin with the same prompt are one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from sys import intern
from typing import Any

from specgen.config import UserError, first_line
from specgen.record.files import whole_lines
from specgen.record.record_rows import conversation_of, units_of
from specgen.report.intervals import (
    Interval,
    PairedRatio,
    Ratio,
    clustered_mean_interval,
    holm,
    paired_ratio,
)

LENGTH = "length over all steps"
POSITION = "acceptance at token "
_NO_PROMPT = hash(None)
# of an evaluation, whose ids are hashes of prompts
_NO_STEPS = {"acceptance_histogram": [0], "num_draft_tokens": 0, "num_steps_without_drafts": 0}


@dataclass(frozen=True, kw_only=True)
class PairedFigure:
    """One figure of the shared requests; ``p`` is corrected by Holm's method, see ``corrected_by_kind``."""

    figure: str
    ours: float
    first: float  # of the first run
    paired: PairedRatio
    p: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure,
            "ours": self.ours,
            "first": self.first,
            "num_conversations": self.paired.num_groups,
            "difference": self.paired.difference,
            "ci95": self.paired.interval,
            "p": self.paired.p,
            "p_holm": self.p,
        }


@dataclass(frozen=True, kw_only=True)
class SharedRequests:
    """The requests of a run that the first run has too; ``num_identical`` of them have the same tokens.

    ``figures`` cover those with steps in two runs that draft, and are over all steps.
    """

    num_requests: int
    num_identical: int
    figures: tuple[PairedFigure, ...]

    @property
    def same_acceptance(self) -> bool:
        """Whether no request differs in any figure."""
        return all(each.paired.difference == 0 and each.paired.interval is None for each in self.figures)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"figures": [each.to_json() for each in self.figures]}


@dataclass(frozen=True, slots=True)
class Answer:
    """What is kept of a row: its id, hashes of its texts, and its steps."""

    name: str
    conversation: str  # that it is a turn of, or the first with its first prompt
    prompt: int
    tokens: int
    num_steps: int  # with and without drafts; none in plain decoding
    num_drafts: int  # steps with drafts
    accepted: tuple[int, ...]  # [K]: steps that accepted more than i drafts
    whole: bool  # every step drafted K tokens
    category: str | None

    @property
    def length(self) -> float:
        """The mean acceptance length of the request over all steps, of which it has some."""
        return 1 + sum(self.accepted) / self.num_steps


Answers = Mapping[str, Answer]  # of a run, by id
Pair = tuple[Answer, Answer]  # of one request, ours and the first run's
Figures = Sequence[tuple[str, PairedRatio]]  # by name


def shared_requests(directories: Sequence[Path]) -> tuple[SharedRequests, ...]:
    """The requests of each directory but the first that the first has too; a run without rows shares none."""
    if len(directories) < 2:
        return ()
    first = read_answers(directories[0])
    found = [pair_up(read_answers(directory) if first else {}, first) for directory in directories[1:]]
    return tuple(
        SharedRequests(num_requests=len(pairs), num_identical=num_identical(pairs), figures=figures)
        for pairs, figures in zip(found, corrected_by_kind(found), strict=True)
    )


def pair_up(ours: Answers, first: Answers) -> list[Pair]:
    """The requests of both: the same id and prompt."""
    return [
        (answer, first[name])
        for name, answer in ours.items()
        if name in first and first[name].prompt == answer.prompt
    ]


def num_identical(pairs: Sequence[Pair]) -> int:
    """How many have the same tokens in both runs."""
    return sum(ours.tokens == first.tokens for ours, first in pairs)


def corrected(families: Sequence[Figures]) -> list[tuple[PairedFigure, ...]]:
    """``families`` with their p corrected by Holm's method over all figures of all of them."""
    tests = iter(holm([paired.p for figures in families for _, paired in figures]))
    return [tuple(_figure(name, paired, next(tests)) for name, paired in figures) for figures in families]


def corrected_by_kind(found: Sequence[Sequence[Pair]]) -> list[tuple[PairedFigure, ...]]:
    """Of each pair of runs the mean acceptance length, then acceptance by position.

    Lengths are one family of tests over all of ``found`` and positions another, in `report` as in `compare`: how many
    positions there are changes nothing in what is said of a length.
    """
    figures = [list(_paired_figures(pairs)) for pairs in found]
    kinds = (corrected([each[part] for each in figures]) for part in (slice(1), slice(1, None)))
    return [length + positions for length, positions in zip(*kinds, strict=True)]


def _figure(name: str, paired: PairedRatio, p: float | None) -> PairedFigure:
    tokens = 0 if name.startswith(POSITION) else 1  # the target's own
    return PairedFigure(
        figure=name, ours=paired.rate + tokens, first=paired.other_rate + tokens, paired=paired, p=p
    )


def _paired_figures(pairs: Sequence[Pair]) -> Iterator[tuple[str, PairedRatio]]:
    if (length := paired_length(pairs)) is not None:
        yield LENGTH, length
        yield from _positions(with_steps(pairs))


def with_steps(pairs: Sequence[Pair]) -> list[Pair]:
    """Those with steps in both runs."""
    return [(ours, first) for ours, first in pairs if ours.num_steps and first.num_steps]


def paired_length(pairs: Sequence[Pair]) -> PairedRatio | None:
    """Accepted drafts per step; None if no request has steps in both runs."""
    drafted = with_steps(pairs)
    return _paired(drafted, slice(None)) if drafted else None


def _paired(pairs: Sequence[Pair], positions: slice) -> PairedRatio:
    """Accepted drafts at ``positions`` per step, conversation by conversation."""
    return paired_ratio(_by_conversation(pairs, positions))


def length_of(answers: Iterable[Answer], positions: slice = slice(None)) -> Ratio:
    """Accepted drafts at ``positions`` per step, by conversation."""
    found = Ratio()
    for hits, trials in _by_conversation(((answer,) for answer in answers), positions):
        found.add(hits, trials)
    return found


def _by_conversation(requests: Iterable[tuple[Answer, ...]], positions: slice) -> list[list[int]]:
    """Accepted drafts at ``positions`` and steps, each of all runs, summed over a conversation's ``requests``."""
    units: dict[str, list[int]] = {}
    for answers in requests:
        numbers = [n for answer in answers for n in (sum(answer.accepted[positions]), answer.num_steps)]
        earlier = units.get(answers[0].conversation, [0] * len(numbers))
        units[answers[0].conversation] = list(map(sum, zip(earlier, numbers, strict=True)))
    return list(units.values())


def mean_over_requests(answers: Iterable[Answer], num_spec_tokens: int) -> Interval | None:
    """The 95 % interval of the mean of the requests' lengths, over conversations; None without a spread.

    As the mean in a report, of steps with drafts.
    """
    units: dict[str, list[float]] = {}
    for answer in answers:
        if answer.num_drafts:
            units.setdefault(answer.conversation, []).append(1 + sum(answer.accepted) / answer.num_drafts)
    interval = clustered_mean_interval(list(units.values()))
    if interval is None:
        return None
    # a step yields 1 to K + 1 tokens, also where the approximation exceeds that
    return max(1.0, interval[0]), min(num_spec_tokens + 1.0, interval[1])


def _positions(drafted: Sequence[Pair]) -> Iterator[tuple[str, PairedRatio]]:
    """Over all steps, so that they add up to the length; that is said where some drafted fewer tokens than K."""
    whole = all(answer.whole for pair in drafted for answer in pair)
    for i in range(min(len(answer.accepted) for pair in drafted for answer in pair)):
        yield f"{POSITION}{i}{'' if whole else ' over all steps'}", _paired(drafted, slice(i, i + 1))


def read_answers(directory: Path) -> dict[str, Answer]:
    """The rows of ``completions.jsonl`` by id, without a torn last line; none without the file."""
    path = directory / "completions.jsonl"
    if not path.is_file():
        return {}
    found = (_read(line, f"{path} line {number}") for number, line in whole_lines(path))
    return _by_prompt({answer.name: answer for answer in found})


def _by_prompt(answers: Mapping[str, Answer]) -> dict[str, Answer]:
    units = units_of(
        (name, answer.prompt)
        for name, answer in answers.items()
        if name == answer.conversation and answer.prompt != _NO_PROMPT
    )
    return {
        name: replace(answer, conversation=units[answer.conversation])
        if answer.conversation in units
        else answer
        for name, answer in answers.items()
    }


def _read(line: bytes, where: str) -> Answer:
    try:
        row: Mapping[str, Any] = json.loads(line)
        metrics = row.get("metrics", _NO_STEPS)
        steps = metrics["acceptance_histogram"]
        at_least = tuple(accumulate(reversed(steps)))  # [K + 1]: steps with K, K - 1, ... or more accepted
        without = metrics["num_steps_without_drafts"]
        name, category = str(row["id"]), row.get("category")
        return Answer(
            name=name,
            conversation=conversation_of(name, row.get("turn", 1)),
            prompt=hash(row.get("prompt")),
            tokens=hash(tuple(row.get("token_ids", ()))),
            num_steps=at_least[-1] + without if len(steps) > 1 else 0,
            num_drafts=at_least[-1] if len(steps) > 1 else 0,
            accepted=at_least[-2::-1],
            whole=not without and metrics["num_draft_tokens"] == at_least[-1] * (len(steps) - 1),
            category=None if category is None else intern(str(category)),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{where} is not a completion ({first_line(error)}): generate into a new directory"
        ) from error
