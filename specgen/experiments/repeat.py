"""One repeat of an arm: the figures of one run of the workload, as values that a file can keep."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import product
from statistics import fmean
from typing import Any

from specgen import display
from specgen.bench.bound import StepBytes, mean_step_bytes, mean_touched
from specgen.bench.workload import KnownText
from specgen.engine.warm_engine import Run
from specgen.events import Captured, Event, Finished, OutOfMemory, Prefilled, Touched, Verified
from specgen.report.intervals import Interval, student_t
from specgen.report.timings import LatencyStats, latency_stats
from specgen.report.wall_time import WallTime


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What every repeat is compared with: the bound of its steps, and the known text of a calibrated pair."""

    sizes: StepBytes
    bytes_per_second: float
    flops_per_second: float  # of a large matrix product
    known: KnownText | None

    @property
    def conditions(self) -> dict[str, str]:
        """For the table's conditions."""
        bound = f"bytes that a decode step must read over {self.bytes_per_second / 1e12:.3g} TB/s of a copy"
        found = {
            "bound": bound,
            "x_plain_bound": "x_plain if steps took their bound: what drafts would give by bytes",
        }
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
    """One run of the workload; times are in seconds."""

    seconds: float  # of generate, prefill included
    num_tokens: int  # in all texts
    acceptance_length: float | None  # mean over verify steps; None without drafts
    acceptance: tuple[float | None, ...]  # [K]: joint rates by position
    ttft: LatencyStats | None
    tpot: LatencyStats | None
    itl: LatencyStats | None
    step_seconds: float | None  # mean of a decode step
    mean_sequences: float | None  # in a decode step
    step_bytes: float | None  # that a decode step must read, the mean; a table says how fast
    touched: Touched | None  # of a mixture's experts, mean over decode steps
    texts: Mapping[str, str]  # digest of the token ids by request
    num_wrong: int | None  # tokens that differ from the known text
    disturbances: tuple[str, ...]  # captures and shortages within the measured time
    wall: WallTime | None = None  # where ``seconds`` went; none in rounds of earlier versions
    prefill_passes: int = 0
    prefill_flops: float = 0.0  # of all prompts' matrix products
    tokens_per_step: float | None = None  # that a sequence gets in a decode step, the mean

    @classmethod
    def of(cls, run: Run, yardstick: Yardstick) -> "Repeat":
        completions, events, report = run.completions.values(), run.events, run.report
        steps, prefill = report.steps.get("decode"), report.steps.get("prefill")
        emitted = [1 + event.accepted for event in events if isinstance(event, Verified)]
        return cls(
            seconds=run.seconds,
            num_tokens=sum(len(completion.token_ids) for completion in completions),
            acceptance_length=report.speculation.mean_acceptance_length,
            acceptance=tuple(position.rate for position in report.speculation.acceptance),
            ttft=report.ttft_seconds,
            tpot=report.tpot_seconds,
            itl=latency_stats(list(inter_token_seconds(events))),
            step_seconds=steps.mean_seconds if steps else None,
            mean_sequences=steps.mean_sequences if steps else None,
            step_bytes=mean_step_bytes(events, yardstick.sizes),
            touched=mean_touched(events),
            texts={completion.request.id: digest(completion.token_ids) for completion in completions},
            num_wrong=None if yardstick.known is None else yardstick.known.num_wrong(completions),
            disturbances=tuple(_disturbances(events)),
            wall=report.wall.of_whole(run.seconds) if report.wall else None,
            prefill_passes=prefill.num_steps if prefill else 0,
            prefill_flops=yardstick.sizes.prefill_flops(prefill.target_rows) if prefill else 0.0,
            tokens_per_step=fmean(emitted) if emitted else None,
        )

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the wall time."""
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """For ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Repeat":
        """The repeat that ``to_json`` was of."""
        kinds = dict.fromkeys(("ttft", "tpot", "itl"), LatencyStats) | {"touched": Touched, "wall": WallTime}
        parts = {name: row.get(name) and kind(**row[name]) for name, kind in kinds.items()}
        lists = {name: tuple(row[name]) for name in ("acceptance", "disturbances")}
        return cls(**{**row, **parts, **lists})


def digest(token_ids: Sequence[int]) -> str:
    """Equal for equal tokens, and for no others but by a chance of 2^-64."""
    return blake2b(" ".join(map(str, token_ids)).encode(), digest_size=8).hexdigest()


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
class Speedup:
    """One arm's tokens per second over another's: the geometric mean, and an interval for what many rounds would give.

    The interval is Student's t for the mean of the logarithms of the ratios within a round, so that what slows a whole
    round down, such as a lower clock, cancels. It takes rounds as independent, and differences of logarithms as normal.
    Arms that never met in a round are compared by Welch's t for two samples of logarithms, in which nothing cancels.
    """

    ratio: float
    interval: Interval | None  # None for a single round
    num_rounds: int  # that both took part in; 0 for arms that never met

    @property
    def half_width(self) -> float:
        """Half the interval's width on the scale of logarithms: 0.02 is about 2 % to either side."""
        return math.inf if self.interval is None else math.log(self.interval[1] / self.interval[0]) / 2


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """All repeats of an arm by round, in order; at least one."""

    each: Mapping[str, Repeat]

    @property
    def speed(self) -> MedianRange:
        """Output tokens per second."""
        return MedianRange.of([repeat.tokens_per_second for repeat in self.each.values()])

    def times(self, other: "Repeats") -> MedianRange:
        """The ratio of speeds to ``other`` in the rounds of both; of all pairs of repeats if they never met."""
        mine, theirs = self.each, other.each
        met = [(mine[number], theirs[number]) for number in mine if number in theirs]
        pairs = met or product(mine.values(), theirs.values())
        return MedianRange.of([one.tokens_per_second / two.tokens_per_second for one, two in pairs])

    def speedup(self, other: "Repeats", confidence: float = 0.95) -> Speedup:
        """The ratio of speeds to ``other`` with an interval of this ``confidence``."""
        mine, theirs = self._logs, other._logs
        met = [mine[number] - theirs[number] for number in mine if number in theirs]
        if met:
            centre, freedom = statistics.fmean(met), float(len(met) - 1)
            variance = statistics.variance(met) / len(met) if freedom else 0.0
        else:
            centre = statistics.fmean(mine.values()) - statistics.fmean(theirs.values())
            variance, freedom = _welch(list(mine.values()), list(theirs.values()))
        half = student_t(freedom, confidence) * math.sqrt(variance) if freedom else None
        return Speedup(
            ratio=math.exp(centre),
            interval=None if half is None else (math.exp(centre - half), math.exp(centre + half)),
            num_rounds=len(met),
        )

    @property
    def _logs(self) -> dict[str, float]:
        return {number: math.log(repeat.tokens_per_second) for number, repeat in self.each.items()}

    def median(self, figure: Callable[[Repeat], float | None]) -> float | None:
        """The median of ``figure`` over the repeats that have it; None without any."""
        values = [value for repeat in self.each.values() if (value := figure(repeat)) is not None]
        return statistics.median(values) if values else None

    @property
    def acceptance_length(self) -> float | None:
        """The median of the mean acceptance length; None without drafts."""
        return self.median(lambda repeat: repeat.acceptance_length)

    @property
    def acceptance(self) -> str | None:
        """The joint rates by position, ``0.751 0.562``, averaged over repeats; None without drafts."""
        curves = [repeat.acceptance for repeat in self.each.values()]
        rates = [[rate for rate in position if rate is not None] for position in zip(*curves, strict=True)]
        return " ".join(f"{statistics.fmean(known):.3f}" for known in rates if known) or None

    @property
    def touched(self) -> Touched | None:
        """The experts that steps touched, in the first repeat; the others have the same texts."""
        return self._first.touched

    @property
    def num_wrong(self) -> int | None:
        """The sum over repeats; None without a known text."""
        known = [repeat.num_wrong for repeat in self.each.values() if repeat.num_wrong is not None]
        return sum(known) if known else None

    @property
    def disturbances(self) -> list[str]:
        """The distinct ones of all repeats."""
        return list(dict.fromkeys(text for repeat in self.each.values() for text in repeat.disturbances))

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the requests."""
        return frozenset(self._first.texts)

    def same_texts(self, other: "Repeats") -> float:
        """The share of requests with the same tokens in ``other``, which has the same requests."""
        mine, theirs = self._first.texts, other._first.texts
        return sum(mine[name] == theirs[name] for name in mine) / len(mine)

    @property
    def _first(self) -> Repeat:
        return next(iter(self.each.values()))


def _welch(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The variance of the difference of two means and its degrees of freedom; none with fewer than two values each."""
    if min(len(mine), len(theirs)) < 2:
        return 0.0, 0.0
    parts = [(statistics.variance(each) / len(each), len(each) - 1) for each in (mine, theirs)]
    variance = sum(part for part, _ in parts)
    weight = sum(part**2 / freedom for part, freedom in parts)
    return variance, variance**2 / weight if weight else min(freedom for _, freedom in parts)
