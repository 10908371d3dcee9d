"""The figures of a comparison: lengths by data set and head, paired differences of every two heads, speeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from specgen.comparing.finished_runs import HeadRun, HeadRuns
from specgen.comparing.speed_rounds import Speeds
from specgen.report.paired_requests import (
    Answers,
    Pair,
    PairedFigure,
    corrected,
    corrected_by_kind,
    num_identical,
    pair_up,
    paired_length,
    read_answers,
    with_drafts,
)

_LEVEL = 0.05  # of p after Holm's correction, below which a difference is told


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
    length: PairedFigure | None  # None without a request that has drafts of both
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
    """Heads on data sets; ``pairs`` has every two heads of every data set."""

    runs: HeadRuns
    pairs: tuple[HeadPair, ...]
    speeds: Speeds

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
            "runs": [_run(run) for run in self.runs.runs],
            "pairs": [pair.to_json() for pair in self.pairs],
            "speeds": self.speeds.to_json(),
        }


def _run(run: HeadRun) -> dict[str, Any]:
    return {"data": run.data, "head": run.head, "directory": str(run.directory), "report": run.report}


def told(figure: PairedFigure | None) -> bool:
    """Whether the data tell that there is a difference."""
    return figure is not None and figure.p is not None and figure.p < _LEVEL


def compare_runs(runs: HeadRuns, speeds: Speeds) -> Comparison:
    """Pair the requests of every two heads, data set by data set."""
    found = [each for data in runs.data for each in _pairs(runs, data)]
    figures = corrected_by_kind([requests for *_, requests in found])
    categories = corrected([list(_categories(requests)) for *_, requests in found])
    return Comparison(
        runs=runs,
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


def _pairs(runs: HeadRuns, data: str) -> Iterator[tuple[str, str, str, list[Pair]]]:
    answers: dict[str, Answers] = {}
    for head in runs.heads:
        if (run := runs.of(data, head)) is not None:
            answers[head] = read_answers(run.directory)
    for first, ours in combinations(answers, 2):
        yield data, ours, first, pair_up(answers[ours], answers[first])


def _categories(requests: Sequence[Pair]) -> Iterator[tuple[str, Any]]:
    """The lengths of each category, in the order of the rows; none where there is one."""
    groups: dict[str, list[Pair]] = {}
    for pair in with_drafts(requests):
        groups.setdefault(pair[0].category or "(none)", []).append(pair)
    for name, group in groups.items():
        if len(groups) > 1 and (found := paired_length(group)) is not None:
            yield name, found
