"""The figures of one run of a workload, as values that a file can keep; the repeats of an arm, and their ratios.

Reads no weights and imports nothing that does.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from specgen.record.record_rows import Touched
from specgen.report.intervals import Interval, student_t
from specgen.report.timings import LatencyStats
from specgen.report.wall_time import WallTime


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run of the workload; times are in seconds."""

    seconds: float  # of generate, prefill included
    num_tokens: int  # in all texts
    acceptance_length: float | None = None  # mean over verify steps; None without drafts
    acceptance: tuple[float | None, ...] = ()  # [K]: joint rates by position
    ttft: LatencyStats | None = None
    tpot: LatencyStats | None = None
    itl: LatencyStats | None = None
    step_seconds: float | None = None  # mean of a decode step
    mean_sequences: float | None = None  # in a decode step
    step_bytes: float | None = None  # that a decode step must read, the mean; a table says how fast
    touched: Touched | None = None  # of a mixture's experts, mean over decode steps
    texts: Mapping[str, str] = field(default_factory=dict)  # digest of the token ids by request
    num_wrong: int | None = None  # tokens that differ from the known text
    disturbances: tuple[str, ...] = ()  # captures and shortages within the measured time
    wall: WallTime | None = None  # where ``seconds`` went; none in rounds of earlier versions
    prefill_passes: int = 0
    prefill_flops: float = 0.0  # of all prompts' matrix products
    tokens_per_step: float | None = None  # that a sequence gets in a decode step, the mean

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

    @property
    def ends(self) -> tuple[float, float]:
        return self.lowest, self.highest


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
