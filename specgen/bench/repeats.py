"""What the repeats of an arm gave: medians with their range, and ratios of the same repeat."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specgen.bench.runs import Run, inter_token_seconds
from specgen.events import Captured, Event, OutOfMemory
from specgen.report.report import Report, fold
from specgen.report.timings import Spread, spread


@dataclass(frozen=True, kw_only=True)
class Middle:
    """The median of a figure over repeats, and its range: the lowest and the highest.

    Of n repeats the range holds what a repeat gives in the middle with a probability of 1 - 2^(1-n): 75 % of three,
    94 % of five.
    """

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Middle":
        """Of one value or more."""
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values))


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run of the workload; no text of it is kept but as token ids by request."""

    tokens_per_second: float
    report: Report
    itl_seconds: Spread | None
    texts: Mapping[str, tuple[int, ...]]
    disturbances: tuple[str, ...]  # what happened within the measured time and should not

    @classmethod
    def of(cls, run: Run, events: Sequence[Event], num_spec_tokens: int) -> "Repeat":
        """Of ``run`` and what was recorded in it."""
        return cls(
            tokens_per_second=run.tokens_per_second,
            report=fold(events, num_spec_tokens=num_spec_tokens),
            itl_seconds=spread(list(inter_token_seconds(events))),
            texts={completion.request.id: completion.token_ids for completion in run.completions},
            disturbances=tuple(_disturbances(events)),
        )


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """All repeats of an arm, in order; one or more."""

    each: tuple[Repeat, ...]

    @property
    def speed(self) -> Middle:
        """Output tokens a second."""
        return Middle.of([repeat.tokens_per_second for repeat in self.each])

    def times(self, other: "Repeats") -> Middle:
        """How many times as fast as ``other`` in the same repeat."""
        pairs = zip(self.each, other.each, strict=False)  # one of them may still be at it
        return Middle.of([mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in pairs])

    def median(self, figure: Callable[[Repeat], float | None]) -> float | None:
        """The median of ``figure``; None where a repeat has none."""
        values = [value for repeat in self.each if (value := figure(repeat)) is not None]
        return statistics.median(values) if values else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verify step with drafts, over all repeats; None without any."""
        return self.median(lambda repeat: repeat.report.speculation.mean_acceptance_length)

    @property
    def disturbances(self) -> list[str]:
        """Of all repeats, each once."""
        return list(dict.fromkeys(text for repeat in self.each for text in repeat.disturbances))

    @property
    def ids(self) -> frozenset[str]:
        """Of the requests."""
        return frozenset(self.each[0].texts)

    def same_texts(self, other: "Repeats") -> float:
        """The share of the requests whose tokens are equal to those of ``other``, which has the same requests."""
        mine, theirs = self.each[0].texts, other.each[0].texts
        return sum(mine[name] == theirs[name] for name in mine) / len(mine)


def _disturbances(events: Iterable[Event]) -> Iterable[str]:
    late = sum(isinstance(event, Captured) for event in events)
    if late:
        yield f"{late} CUDA graphs were captured in the measured time"
    for event in events:
        if isinstance(event, OutOfMemory):
            yield f"out of memory, so it ran with a batch of {event.max_batch_size}"
