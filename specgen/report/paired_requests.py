"""The requests that two runs share: the same id and the same prompt, with paired differences of acceptance."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from specgen.config import UserError, first_line
from specgen.report.intervals import PairedRatio, holm, paired_ratio

LENGTH = "mean acceptance length"
_NO_STEPS = {
    "acceptance_histogram": [0],
    "num_draft_tokens": 0,
}  # of an evaluation, whose ids are hashes of prompts


@dataclass(frozen=True, kw_only=True)
class PairedFigure:
    """One figure of the shared requests; ``p`` is corrected by Holm's method over all figures of all runs."""

    figure: str
    ours: float
    first: float  # of the first run
    paired: PairedRatio
    p: float | None


@dataclass(frozen=True, kw_only=True)
class SharedRequests:
    """The requests of a run that the first run has too; ``num_identical`` of them have the same tokens.

    ``figures`` cover those with drafts in both runs; acceptance at a position only where every step of both runs
    drafted K tokens, as rows do not hold the drafts of each step.
    """

    num_requests: int
    num_identical: int
    figures: tuple[PairedFigure, ...]

    @property
    def same_acceptance(self) -> bool:
        """Whether no request differs in any figure."""
        return all(each.paired.difference == 0 and each.paired.interval is None for each in self.figures)

    def to_json(self) -> dict[str, Any]:
        figures = [
            {
                "figure": each.figure,
                "ours": each.ours,
                "first": each.first,
                "num_requests": each.paired.num_groups,
                "difference": each.paired.difference,
                "ci95": each.paired.interval,
                "p": each.paired.p,
                "p_holm": each.p,
            }
            for each in self.figures
        ]
        return asdict(self) | {"figures": figures}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is kept of a row: hashes of its texts, and its steps with drafts."""

    prompt: int
    tokens: int
    num_steps: int
    accepted: tuple[int, ...]  # [K]: steps that accepted more than i drafts
    whole: bool  # every step drafted K tokens


def shared_requests(directories: Sequence[Path]) -> tuple[SharedRequests, ...]:
    """The requests of each directory but the first that the first has too; a run without rows shares none."""
    if len(directories) < 2:
        return ()
    first = dict(_answers(directories[0]))
    found = []
    for directory in directories[1:]:
        ours = _answers(directory) if first else ()
        pairs = [
            (answer, first[name])
            for name, answer in ours
            if name in first and first[name].prompt == answer.prompt
        ]
        identical = sum(answer.tokens == other.tokens for answer, other in pairs)
        found.append((len(pairs), identical, list(_figures(pairs))))
    corrected = iter(holm([paired.p for _, _, figures in found for _, paired in figures]))
    return tuple(
        SharedRequests(
            num_requests=number,
            num_identical=identical,
            figures=tuple(_figure(name, paired, next(corrected)) for name, paired in figures),
        )
        for number, identical, figures in found
    )


def _figure(name: str, paired: PairedRatio, p: float | None) -> PairedFigure:
    tokens = 1 if name == LENGTH else 0  # the target's own
    return PairedFigure(
        figure=name, ours=paired.rate + tokens, first=paired.other_rate + tokens, paired=paired, p=p
    )


def _figures(pairs: Sequence[tuple[_Answer, _Answer]]) -> Iterator[tuple[str, PairedRatio]]:
    drafted = [(ours, first) for ours, first in pairs if ours.num_steps and first.num_steps]
    if not drafted:
        return
    yield (
        LENGTH,
        paired_ratio(
            [
                (sum(ours.accepted), ours.num_steps, sum(first.accepted), first.num_steps)
                for ours, first in drafted
            ]
        ),
    )
    if not all(ours.whole and first.whole for ours, first in drafted):
        return
    for i in range(min(len(answer.accepted) for pair in drafted for answer in pair)):
        rows = [
            (ours.accepted[i], ours.num_steps, first.accepted[i], first.num_steps) for ours, first in drafted
        ]
        yield f"acceptance at token {i}", paired_ratio(rows)


def _answers(directory: Path) -> Iterator[tuple[str, _Answer]]:
    """The rows of ``completions.jsonl`` by id, without a torn last line."""
    path = directory / "completions.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield _read(line, f"{path} line {number}")


def _read(line: bytes, where: str) -> tuple[str, _Answer]:
    try:
        row: Mapping[str, Any] = json.loads(line)
        metrics = row.get("metrics", _NO_STEPS)
        steps = metrics["acceptance_histogram"]
        at_least = tuple(accumulate(reversed(steps)))  # [K + 1]: steps with K, K - 1, ... or more accepted
        return str(row["id"]), _Answer(
            prompt=hash(row.get("prompt")),
            tokens=hash(tuple(row.get("token_ids", ()))),
            num_steps=at_least[-1],
            accepted=at_least[-2::-1],
            whole=metrics["num_draft_tokens"] == at_least[-1] * (len(steps) - 1),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{where} is no completion ({first_line(error)}): generate into a new directory"
        ) from error
