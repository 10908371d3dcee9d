"""The requests that two runs share: the same id and the same prompt, with paired differences of acceptance.

Turns of a conversation have its earlier answers in their context, so conversations are the independent units; those
that begin with the same prompt are one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specgen.record.columns import Array, Run, in_both
from specgen.report.acceptance import Acceptance
from specgen.report.intervals import Estimate, PairedRatio, holm, paired_ratio

LENGTH = "length over all steps"
POSITION = "acceptance at token "


@dataclass(frozen=True, kw_only=True)
class PairedFigure:
    """One figure of the shared requests, per step; ``p`` is what Holm's method makes of its own: see ``compared``."""

    figure: str
    own_tokens: int = 0  # the target's, which count too
    paired: PairedRatio
    p: float | None = None

    @property
    def ours(self) -> float:
        return self.paired.rate + self.own_tokens

    @property
    def first(self) -> float:
        """Of the first run."""
        return self.paired.other_rate + self.own_tokens

    @property
    def difference(self) -> Estimate:
        return Estimate(self.paired.difference, self.paired.interval)

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
    def length(self) -> PairedFigure | None:
        """None without a request that has steps in both runs."""
        return next(iter(self.figures), None)

    @property
    def positions(self) -> Sequence[PairedFigure]:
        """Acceptance by position, ``[K]``."""
        return self.figures[1:]

    @property
    def same_acceptance(self) -> bool:
        """Whether no request differs in any figure."""
        return all(each.paired.difference == 0 and each.paired.interval is None for each in self.figures)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "num_identical": self.num_identical,
            "figures": [each.to_json() for each in self.figures],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two runs on the requests of both, by the same id and prompt: the rows of ``ours`` and ``first`` are the same."""

    ours: Run
    first: Run

    def __len__(self) -> int:
        return len(self.ours)

    @property
    def num_identical(self) -> int:
        """How many requests have the same tokens in both runs."""
        return int((self.ours.tokens == self.first.tokens).sum())

    def at(self, rows: Array) -> "Pair":
        """The pair of these requests alone, by index."""
        return Pair(ours=self.ours.at(rows), first=self.first.at(rows))

    def with_steps(self) -> "Pair":
        """The requests with steps in both runs, of which none is plain decoding."""
        ours, first = self.ours.counts, self.first.counts
        drafting = min(ours.num_spec_tokens, first.num_spec_tokens) > 0
        return self.at(np.flatnonzero((ours.num_steps > 0) & (first.num_steps > 0) & drafting))

    def by_category(self) -> "dict[str, Pair]":
        """The pair of each category, in the order of their first rows."""
        return {label: pair_up(group, self.first) for label, group in self.ours.by("category").items()}

    def difference(self, positions: slice = slice(None)) -> PairedRatio:
        """Accepted drafts at ``positions`` per step, over all steps, of a pair ``with_steps`` that has requests."""
        ours = Acceptance(self.ours)
        columns = [
            ours.per_unit(column).tolist()
            for counts in (self.ours.counts, self.first.counts)
            for column in (counts.accepted[:, positions].sum(axis=1, dtype=np.int64), counts.num_steps)
        ]
        return paired_ratio([*zip(*columns, strict=True)])

    def length(self, name: str) -> PairedFigure:
        """The length over all steps, as the figure ``name``."""
        return PairedFigure(figure=name, own_tokens=1, paired=self.difference())

    def figures(self) -> Iterator[PairedFigure]:
        """The length, then acceptance by position: over all steps, so that they add up to the length.

        That is said where some step drafted fewer tokens than K. None without a request with steps in both runs.
        """
        drafted = self.with_steps()
        if not len(drafted):
            return
        both = [run.counts for run in (drafted.ours, drafted.first)]
        is_whole = all((each.drafted == each.num_steps[:, None]).all() for each in both)
        yield drafted.length(LENGTH)
        for i in range(min(each.num_spec_tokens for each in both)):
            name = f"{POSITION}{i}{'' if is_whole else ' over all steps'}"
            yield PairedFigure(figure=name, paired=drafted.difference(slice(i, i + 1)))


def pair_up(ours: Run, first: Run) -> Pair:
    """The requests of both, in the order of ``ours``."""
    here, there = in_both(ours, first)
    same = ours.prompt[here] == first.prompt[there]
    return Pair(ours=ours.at(here[same]), first=first.at(there[same]))


def shared_requests(runs: Sequence[Run]) -> tuple[SharedRequests, ...]:
    """The requests of each run but the first that the first has too."""
    return compared([pair_up(run, runs[0]) for run in runs[1:]])


def compared(pairs: Sequence[Pair]) -> tuple[SharedRequests, ...]:
    """The figures of each pair: the length, then acceptance by position.

    Lengths are one family of tests over all ``pairs`` and positions another, in `report` as in `compare`: how many
    positions there are changes nothing in what is said of a length.
    """
    figures = [list(pair.figures()) for pair in pairs]
    lengths, positions = (corrected([each[part] for each in figures]) for part in (slice(1), slice(1, None)))
    return tuple(
        SharedRequests(num_requests=len(pair), num_identical=pair.num_identical, figures=first + others)
        for pair, first, others in zip(pairs, lengths, positions, strict=True)
    )


def corrected(families: Sequence[Sequence[PairedFigure]]) -> list[tuple[PairedFigure, ...]]:
    """``families`` with their p corrected by Holm's method over all figures of all of them."""
    tests = iter(holm([each.paired.p for figures in families for each in figures]))
    return [tuple(replace(each, p=next(tests)) for each in figures) for figures in families]
