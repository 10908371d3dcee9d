"""The repeats of an arm: medians with their range, and ratios within the same repeat."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specgen import display
from specgen.bench.bound import StepBytes, mean_step_bytes
from specgen.bench.experts_read import mean_touched
from specgen.bench.known_text import KnownText
from specgen.engine.warm_engine import Run
from specgen.events import Captured, Event, Finished, OutOfMemory, Prefilled, Touched, Verified
from specgen.report.report import Report
from specgen.report.timings import LatencyStats, latency_stats


@dataclass(frozen=True, kw_only=True)
class MedianRange:
    """The median of a figure over repeats and its range.

    The range of n repeats contains the true median with a probability of 1 - 2^(1-n): 75 % for three, 94 % for five.
    """

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "MedianRange":
        """Of at least one value."""
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values))


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What every repeat is compared with: the bound of its steps, and the known text of a calibrated pair."""

    sizes: StepBytes
    bytes_per_second: float
    known: KnownText | None

    @property
    def conditions(self) -> dict[str, str]:
        """For the table's conditions."""
        bound = f"bytes that a decode step must read over {self.bytes_per_second / 1e12:.3g} TB/s of a copy"
        found = {"bound": bound}
        if self.sizes.experts is not None:
            found["experts"] = (
                f"of the {self.sizes.experts.num_experts} of a layer, touched by a decode step; means over layers and "
                "steps; experts_plain: by the rows of the newest tokens alone, as by a plain step; experts_read: the "
                "bytes of those touched over that bandwidth"
            )
        if self.known is not None:
            made_for = f"the pair's head knows {display.percent(self.known.accept)} of it"
            found["wrong_tokens"] = f"of all repeats, against the pair's known text; {made_for}"
        return found


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run of the workload."""

    tokens_per_second: float
    report: Report
    itl_seconds: LatencyStats | None
    step_bound: float | None  # mean lower bound of a decode step in seconds
    touched: Touched | None  # of a mixture's experts, mean over decode steps
    expert_seconds: float | None  # that reading these takes
    texts: Mapping[str, tuple[int, ...]]  # token ids by request
    num_wrong: int | None  # tokens that differ from the known text
    disturbances: tuple[str, ...]  # captures and shortages within the measured time

    @classmethod
    def of(cls, run: Run, yardstick: Yardstick) -> "Repeat":
        completions, events = run.completions.values(), run.events
        step_bytes, touched = mean_step_bytes(events, yardstick.sizes), mean_touched(events)
        return cls(
            tokens_per_second=run.tokens_per_second,
            report=run.report,
            itl_seconds=latency_stats(list(inter_token_seconds(events))),
            step_bound=step_bytes and step_bytes / yardstick.bytes_per_second,
            touched=touched,
            expert_seconds=touched.num_bytes / yardstick.bytes_per_second if touched else None,
            texts={completion.request.id: completion.token_ids for completion in completions},
            num_wrong=None if yardstick.known is None else yardstick.known.num_wrong(completions),
            disturbances=tuple(_disturbances(events)),
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a decode step."""
        steps = self.report.steps.get("decode")
        return steps.mean_seconds if steps else None


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """All repeats of an arm in order, at least one."""

    each: tuple[Repeat, ...]

    @property
    def speed(self) -> MedianRange:
        """Output tokens per second."""
        return MedianRange.of([repeat.tokens_per_second for repeat in self.each])

    def times(self, other: "Repeats") -> MedianRange:
        """The speedup over ``other`` in the same repeat."""
        pairs = zip(self.each, other.each, strict=False)  # one of them may have more repeats so far
        return MedianRange.of([mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in pairs])

    def median(self, figure: Callable[[Repeat], float | None]) -> float | None:
        """The median of ``figure`` over the repeats that have it; None without any."""
        values = [value for repeat in self.each if (value := figure(repeat)) is not None]
        return statistics.median(values) if values else None

    @property
    def acceptance_length(self) -> float | None:
        """The median of the mean acceptance length; None without drafts."""
        return self.median(lambda repeat: repeat.report.speculation.mean_acceptance_length)

    @property
    def acceptance(self) -> str | None:
        """The joint rates by position, ``0.751 0.562``, averaged over repeats; None without drafts."""
        curves = [[at.rate for at in repeat.report.speculation.acceptance] for repeat in self.each]
        rates = [[rate for rate in position if rate is not None] for position in zip(*curves, strict=True)]
        return " ".join(f"{statistics.fmean(known):.3f}" for known in rates if known) or None

    @property
    def touched(self) -> Touched | None:
        """The experts that steps touched, in the first repeat; the others have the same texts."""
        return self.each[0].touched

    @property
    def num_wrong(self) -> int | None:
        """The sum over repeats; None without a known text."""
        known = [repeat.num_wrong for repeat in self.each if repeat.num_wrong is not None]
        return sum(known) if known else None

    @property
    def disturbances(self) -> list[str]:
        """The distinct ones of all repeats."""
        return list(dict.fromkeys(text for repeat in self.each for text in repeat.disturbances))

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the requests."""
        return frozenset(self.each[0].texts)

    def same_texts(self, other: "Repeats") -> float:
        """The share of requests with the same tokens in ``other``, which has the same requests."""
        mine, theirs = self.each[0].texts, other.each[0].texts
        return sum(mine[name] == theirs[name] for name in mine) / len(mine)


def inter_token_seconds(events: Iterable[Event]) -> Iterator[float]:
    """Inter-token latencies (ITL): the times between consecutive steps that emit tokens of a request.

    As in vLLM's serving benchmark, a step is one gap however many tokens it emits.
    """
    latest: dict[str, float] = {}
    for event in events:
        if isinstance(event, Finished):
            latest.pop(event.sequence, None)
        elif isinstance(event, Prefilled | Verified) and event.emitted:
            if event.sequence in latest:
                yield event.time - latest[event.sequence]
            latest[event.sequence] = event.time


def _disturbances(events: Iterable[Event]) -> Iterable[str]:
    late = sum(isinstance(event, Captured) for event in events)
    if late:
        yield f"{late} CUDA graphs were captured in the measured time"
    for event in events:
        if isinstance(event, OutOfMemory):
            yield f"out of memory, so it ran with a batch of {event.max_batch_size}"
