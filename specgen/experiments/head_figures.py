"""The figures of a comparison: lengths by data set and head, paired differences of every two heads, speeds."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

from specgen.experiments.finished_runs import HeadRun, HeadRuns
from specgen.experiments.rounds import Speeds
from specgen.report.intervals import Interval, student_t
from specgen.report.paired_requests import (
    Answer,
    Answers,
    Pair,
    PairedFigure,
    corrected,
    corrected_by_kind,
    length_of,
    num_identical,
    pair_up,
    paired_length,
    read_answers,
    with_steps,
)

_LEVEL = 0.05  # of p after Holm's correction, below which a difference is significant


@dataclass(frozen=True, kw_only=True)
class Length:
    """A mean acceptance length: 1 + accepted drafts / steps, those without drafts too.

    So it is what plain decoding's passes are divided by, also of n-grams, which draft in some steps only.
    """

    value: float
    variance: float | None  # of ``value``, over conversations; None with fewer than two
    freedom: float  # degrees of freedom of ``variance``
    most: int  # K + 1, which no length exceeds

    @classmethod
    def of(cls, answers: Iterable[Answer], num_spec_tokens: int) -> Self | None:
        """None without a step."""
        found = length_of(answers)
        if found.rate is None:
            return None
        variance = found.variance() if found.groups > 1 else None
        return cls(
            value=1 + found.rate, variance=variance, freedom=found.groups - 1, most=num_spec_tokens + 1
        )

    @classmethod
    def mean(cls, lengths: Sequence["Length | None"]) -> "Length | None":
        """Of independent data sets, each with the same weight; None where one is unknown.

        Degrees of freedom by Satterthwaite (Biometrics Bulletin 2, 1946).
        """
        known = [each for each in lengths if each is not None]
        if not known or len(known) < len(lengths):
            return None
        parts = [(each.variance, each.freedom) for each in known if each.variance]
        complete, total = len(parts) == len(known), math.fsum(variance for variance, _ in parts)
        return Length(
            value=math.fsum(each.value for each in known) / len(known),
            variance=total / len(known) ** 2 if complete else None,
            freedom=total**2 / math.fsum(v**2 / freedom for v, freedom in parts) if complete else 0,
            most=max(each.most for each in known),
        )

    @property
    def interval(self) -> Interval | None:
        """The 95 % t interval; None without a spread."""
        if not self.variance:
            return None
        half = student_t(self.freedom) * math.sqrt(self.variance)
        return max(1.0, self.value - half), min(float(self.most), self.value + half)


@dataclass(frozen=True, kw_only=True)
class HeadPair:
    """One head against another on the requests of a data set that both have answered.

    The p of ``length`` are corrected by Holm's method over all data sets and pairs of a comparison; so are those of
    ``positions`` and those of ``categories``, each kind among itself.
    """

    data: str
    ours: str
    first: str  # the head that is named first
    requests: Sequence[Pair]
    length: PairedFigure | None  # None without a request that has steps of both
    positions: Sequence[PairedFigure]  # empty where steps drafted fewer than K tokens
    categories: Mapping[str, PairedFigure]  # by category; empty where there is one

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "head": self.ours,
            "against": self.first,
            "num_requests": len(self.requests),
            "num_identical": num_identical(self.requests),
            "figures": [each.to_json() for each in (self.length, *self.positions) if each is not None],
            "categories": {name: each.to_json() for name, each in self.categories.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Heads on data sets; ``pairs`` has every two heads of every data set.

    ``lengths`` are by data set and head, then by category, where there are several; that of all is under None.
    """

    runs: HeadRuns
    lengths: Mapping[tuple[str, str], Mapping[str | None, Length | None]]
    pairs: tuple[HeadPair, ...]
    speeds: Speeds

    def length(self, data: str, head: str, category: str | None = None) -> Length | None:
        """That of ``head`` on ``data``, if it has run there, and has steps."""
        return self.lengths.get((data, head), {}).get(category)

    def of(self, data: str, head: str, other: str) -> HeadPair | None:
        """The pair of ``head`` and ``other`` in either order, if both have run on ``data``."""
        both = {head, other}
        return next(
            (each for each in self.pairs if each.data == data and {each.ours, each.first} == both), None
        )

    def to_json(self) -> dict[str, Any]:
        """The content of ``comparison.json``."""
        return {
            "heads": {run.head: run.drafter for run in self.runs.runs},
            "unlike_settings": {name: list(values) for name, values in self.runs.unlike.items()},
            "runs": [_run(run, self.length(run.data, run.head)) for run in self.runs.runs],
            "pairs": [pair.to_json() for pair in self.pairs],
            "speeds": self.speeds.to_json(),
        }


def _run(run: HeadRun, length: Length | None) -> dict[str, Any]:
    return {
        "data": run.data,
        "head": run.head,
        "directory": str(run.directory),
        "length_over_all_steps": length and length.value,
        "length_over_all_steps_ci95": length and length.interval,
        "report": run.report,
    }


def is_significant(figure: PairedFigure | None) -> bool:
    """Whether the difference is statistically significant."""
    return figure is not None and figure.p is not None and figure.p < _LEVEL


def compare_runs(runs: HeadRuns, speeds: Speeds) -> Comparison:
    """Pair the requests of every two heads, data set by data set."""
    answers = {(run.data, run.head): read_answers(run.directory) for run in runs.runs}
    found = [each for data in runs.data for each in _pairs(runs, data, answers)]
    figures = corrected_by_kind([requests for *_, requests in found])
    categories = corrected([list(_categories(requests)) for *_, requests in found])
    return Comparison(
        runs=runs,
        lengths={(run.data, run.head): _lengths(run, answers[run.data, run.head]) for run in runs.runs},
        pairs=tuple(
            HeadPair(
                data=data,
                ours=ours,
                first=first,
                requests=requests,
                length=next(iter(of_pair), None),
                positions=of_pair[1:],
                categories={each.figure: each for each in by_category},
            )
            for (data, ours, first, requests), of_pair, by_category in zip(
                found, figures, categories, strict=True
            )
        ),
        speeds=speeds,
    )


def _lengths(run: HeadRun, answers: Answers) -> dict[str | None, Length | None]:
    """Of all requests, and of each category, in the order of the rows, where there are several."""
    groups: dict[str | None, list[Answer]] = {}
    for answer in answers.values():
        groups.setdefault(_category(answer), []).append(answer)
    most = run.report["num_spec_tokens"]
    by_category = {name: Length.of(group, most) for name, group in groups.items()}
    return {None: Length.of(answers.values(), most), **(by_category if len(groups) > 1 else {})}


def _category(answer: Answer) -> str:
    return "(none)" if answer.category is None else answer.category


def _pairs(
    runs: HeadRuns, data: str, answers: Mapping[tuple[str, str], Answers]
) -> Iterator[tuple[str, str, str, list[Pair]]]:
    for first, ours in combinations([head for head in runs.heads if (data, head) in answers], 2):
        yield data, ours, first, pair_up(answers[data, ours], answers[data, first])


def _categories(requests: Sequence[Pair]) -> Iterator[tuple[str, Any]]:
    """The lengths of each category, in the order of the rows; none where there is one."""
    groups: dict[str, list[Pair]] = {}
    for pair in with_steps(requests):
        groups.setdefault(_category(pair[0]), []).append(pair)
    for name, group in groups.items():
        if len(groups) > 1 and (found := paired_length(group)) is not None:
            yield name, found
