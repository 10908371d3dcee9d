"""What a bench has measured, round by round, kept in a directory so that the same command goes on."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from specgen.config import UserError, first_line, require, shown
from specgen.record.files import RowFile, Rows, writable
from specgen.record.provenance import FREE_IN_A_RUN
from specgen.record.results import locked, require_same
from specgen.report.intervals import Estimate, student_t
from specgen.report.timings import LatencyStats


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
    texts: Mapping[str, str] = field(default_factory=dict)  # digest of the token ids by request
    num_wrong: int | None = None  # tokens that differ from the known text
    disturbances: tuple[str, ...] = ()  # captures and shortages within the measured time

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def half_width(speedup: Estimate) -> float:
    """Half the interval's width on the scale of logarithms: 0.02 is about 2 % to either side; infinite without one."""
    interval = speedup.interval
    return math.inf if interval is None else math.log(interval[1] / interval[0]) / 2


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """All repeats of an arm by round, in order; at least one."""

    each: Mapping[str, Repeat]

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each."""
        return [repeat.tokens_per_second for repeat in self.each.values()]

    @property
    def speed(self) -> float:
        """Tokens per second: the median."""
        return statistics.median(self.speeds)

    def speedup(self, other: "Repeats", confidence: float = 0.95) -> Estimate:
        """Tokens per second over those of ``other``: the geometric mean, and an interval for what many rounds give.

        The interval is Student's t for the mean of the logarithms of the ratios within a round, so that what slows a
        whole round down, such as a lower clock, cancels. It takes rounds as independent, and differences of logarithms
        as normal. Arms that never met in a round are compared by Welch's t for two samples of logarithms, in which
        nothing cancels. There is none for a single round.
        """
        mine, theirs = self._logs, other._logs
        met = [mine[number] - theirs[number] for number in mine if number in theirs]
        if met:
            centre, freedom = statistics.fmean(met), float(len(met) - 1)
            variance = statistics.variance(met) / len(met) if freedom else 0.0
        else:
            centre = statistics.fmean(mine.values()) - statistics.fmean(theirs.values())
            variance, freedom = _welch(list(mine.values()), list(theirs.values()))
        half = student_t(freedom, confidence) * math.sqrt(variance) if freedom else None
        ends = None if half is None else (math.exp(centre - half), math.exp(centre + half))
        return Estimate(math.exp(centre), ends)

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
    def tpot(self) -> float | None:
        """The median of the repeats' median time per output token, in seconds."""
        return self.median(lambda repeat: repeat.tpot.median if repeat.tpot else None)

    @property
    def acceptance(self) -> str | None:
        """The joint rates by position, ``0.751 0.562``, averaged over repeats; None without drafts."""
        curves = [repeat.acceptance for repeat in self.each.values()]
        rates = [[rate for rate in position if rate is not None] for position in zip(*curves, strict=True)]
        return " ".join(f"{statistics.fmean(known):.3f}" for known in rates if known) or None

    @property
    def num_wrong(self) -> int | None:
        """The sum over repeats; None without a known text."""
        known = [repeat.num_wrong for repeat in self.each.values() if repeat.num_wrong is not None]
        return sum(known) if known else None

    @property
    def disturbances(self) -> list[str]:
        """The distinct ones of all repeats, and how many texts are not the same in all of them."""
        found = list(dict.fromkeys(text for repeat in self.each.values() for text in repeat.disturbances))
        if varying := sum(len(digests) > 1 for digests in self._digests.values()):
            found.append(f"{varying} of {len(self.ids)} texts differ from repeat to repeat")
        return found

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._first.texts)

    @property
    def has_steps(self) -> bool:
        """Whether a text has a second token; prefill gives the first one, so without it drafts speed up nothing."""
        return self._first.num_tokens > len(self.ids)

    def same_texts(self, other: "Repeats") -> float:
        """The share of requests with the same tokens in every repeat of both; ``other`` has the same requests."""
        mine, theirs = self._digests, other._digests
        return sum(len(mine[name] | theirs[name]) == 1 for name in mine) / len(mine)

    @cached_property
    def _digests(self) -> dict[str, set[str]]:
        """The digests of each request's texts in all repeats."""
        return {name: {repeat.texts[name] for repeat in self.each.values()} for name in self.ids}

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


BUSY = "other programs kept the machine BUSY, so speeds are doubtful"  # a disturbance


def disturbed(measured: Mapping[str, Repeats]) -> tuple[list[str], list[str]]:
    """The disturbances of arms, each with the arms that had it: that the machine was ``BUSY``, and the others."""
    arms: dict[str, list[str]] = {}
    for arm, repeats in measured.items():
        for text in repeats.disturbances:
            arms.setdefault(text, []).append(arm)
    lines = {
        text: f"{'every arm' if len(each) == len(measured) > 1 else '; '.join(each)}: {text}"
        for text, each in arms.items()
    }
    busy = [lines.pop(text) for text in (BUSY,) if text in lines]
    return busy, list(lines.values())


_KEPT = "what is measured is kept; fix that and run the same command again"
_REMEDY = "name a new directory, or ask for the same"
_TIMED = {"engine.device", "engine.tensor_parallel", "engine.cuda_graphs", "device.cpu", "device.threads"}
PLAIN = "plain decoding"  # the arm of a comparison without a head
LEAST_ROUNDS = 2  # for a ratio of a comparison: one round has no spread
# more repeats only add rounds; the data are known by the requests' digest
_FREE = {*FREE_IN_A_RUN, "bench.repeats", "bench.precision", "bench.workload.dataset"} - _TIMED


class Rounds:
    """Every round so far: a repeat by arm, taken one behind the other in one process.

    A round is kept when all its arms have had their turn: ratios are of one round, and a stop in the middle of it
    would put hours between its repeats. Of a file that holds rounds of several workloads or conditions, these are
    those of one, ``conditions``, by its data set and digest.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]] = (), file: RowFile | None = None, conditions: str = ""
    ) -> None:
        self._file, self._conditions = file, conditions  # for what is added
        self._each = {str(row["id"]): _repeats(row) for row in rows if row.get("under", "") == conditions}

    def __len__(self) -> int:
        return len(self._each)

    @property
    def are_kept(self) -> bool:
        """Whether another run can go on with them."""
        return self._file is not None

    def add(self, arms: Mapping[str, Repeat]) -> None:
        """Keep a round; it survives a power loss."""
        name = f"{self._conditions} round {len(self._each) + 1}".lstrip()
        self._each[name] = dict(arms)
        if self._file is not None:
            found = {arm: asdict(repeat) for arm, repeat in arms.items()}
            self._file.add(
                {"id": name, **({"under": self._conditions} if self._conditions else {}), "arms": found}
            )
            self._file.sync()

    def count(self, arm: str) -> int:
        """The rounds that ``arm`` took part in."""
        return sum(arm in each for each in self._each.values())

    def of(self, arm: str) -> Repeats:
        """The repeats of an arm that has some."""
        return Repeats(each={name: each[arm] for name, each in self._each.items() if arm in each})

    def speed(self, arm: str) -> float | None:
        """Output tokens per second, for a comparison; None where fewer than ``LEAST_ROUNDS`` were measured."""
        return self.of(arm).speed if self.count(arm) >= LEAST_ROUNDS else None

    def speedup(self, arm: str, other: str) -> Estimate | None:
        """The speed of ``arm`` over that of ``other``; None as for ``speed``."""
        enough = min(self.count(arm), self.count(other)) >= LEAST_ROUNDS
        return self.of(arm).speedup(self.of(other)) if enough else None

    def speeds(self) -> list[dict[str, float]]:
        """Output tokens per second by arm, round by round."""
        return [{arm: each.tokens_per_second for arm, each in arms.items()} for arms in self._each.values()]

    def measured(self, arms: Iterable[str]) -> dict[str, Repeats]:
        """The repeats of each of ``arms`` that has some."""
        return {arm: self.of(arm) for arm in arms if self.count(arm)}


def _repeats(row: Mapping[str, Any]) -> dict[str, Repeat]:
    """Those of a kept round by arm; ``UserError`` where somebody has edited it."""
    try:
        return {arm: msgspec.convert(found, Repeat) for arm, found in row["arms"].items()}
    except (msgspec.ValidationError, LookupError, AttributeError) as error:
        raise UserError(
            f"{shown(row['id'])} of the kept rounds is damaged ({first_line(error)}): remove its line, and run the "
            "same command again"
        ) from error


Speeds = Mapping[str, Rounds]  # of a comparison, by data set; their arms are heads and ``PLAIN``


def rounds_by_data(
    rows: Collection[Mapping[str, Any]], digests: Mapping[str, str], file: RowFile | None = None
) -> Speeds:
    """The rounds of each data set among the ``rows`` of one file that were measured under conditions of this digest."""
    return {data: Rounds(rows, file, f"{data} {digest}") for data, digest in digests.items()}


TABLE, RECORD, _ROUNDS = "tune.json", "tune.settings.json", "tune.rounds.jsonl"


@contextmanager
def kept_rounds(output: Path | None, settings: Mapping[str, Any]) -> Iterator[Rounds]:
    """The rounds of a tune that are kept in ``output``, to go on with; None keeps them nowhere.

    The directory is locked meanwhile. ``UserError`` where it holds one with other ``settings``, of another device or
    other weights too.
    """
    if output is None:
        yield Rounds()
        return
    output = output.absolute()
    require(not output.is_file(), f"output {str(output)!r} is a file: name a directory for tables")
    with writable(output, _KEPT), locked(output):
        require(
            (output / RECORD).exists() or not (output / TABLE).exists(),
            f"output {str(output)!r} holds {TABLE} without the rounds that it is of: name a new directory",
        )
        require_same(output / RECORD, settings, free=_FREE, remedy=_REMEDY)
        with closing(RowFile(output / _ROUNDS)) as file:
            yield Rounds(file.values(), file)


def num_kept(output: Path) -> int:
    """The rounds of a tune that are in ``output``."""
    return len(Rows(output / _ROUNDS))


# --- which arms still need repeats: a pure function of the rounds, so that a stopped tune goes on ------


LEAST = 3  # repeats of an arm before anything is decided by their spread
JUDGED = 2  # repeats of an arm before it is called the best
DROPPING = 0.999  # confidence that an arm cannot win: high, as every arm is looked at after every round


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The arms of one batch size that have repeats, and how they compare.

    An arm is dropped when the 99.9 % interval of its speed over the best arm's lies wholly below 1, and comes back
    should later rounds move that. The best is the one with the highest speed over plain decoding so far, so that its
    own figure is lucky: its 95 % interval covers 94 % with two equal arms, 82 to 85 % with fifteen (simulated).
    """

    plain: str  # its name; of several, the first one's
    arms: Mapping[str, Repeats]
    drops: bool = True  # whether arms that cannot win are dropped

    @property
    def reference(self) -> str:
        """The arm that others are a multiple of: plain decoding, or the best where that has not run."""
        return self.plain if self.plain in self.arms else self.best

    @cached_property
    def best(self) -> str:
        return max(self.arms, key=self.strength)

    def strength(self, arm: str) -> float:
        """The speed of ``arm`` over plain decoding; tokens per second where that has not run."""
        if self.plain in self.arms:
            return self.arms[arm].speedup(self.arms[self.plain]).value
        return self.arms[arm].speed

    @property
    def has_steps(self) -> bool:
        """Whether there was a step that drafts could have made faster."""
        return self.arms[self.best].has_steps

    @property
    def is_judged(self) -> bool:
        """Whether the best has been measured more than once: one repeat has no spread, and may be luck."""
        return len(self.arms[self.best].each) >= JUDGED and self.has_steps

    def over_best(self, arm: str, confidence: float = 0.95) -> Estimate:
        """The speed of ``arm`` over that of ``best``."""
        return self.arms[arm].speedup(self.arms[self.best], confidence)

    def cannot_win(self, arm: str) -> bool:
        """Whether ``arm`` is not worth another repeat; plain decoding takes part for the others' sake."""
        if not self.drops or len(self.arms[arm].each) < LEAST or arm in (self.best, self.plain):
            return False
        interval = self.over_best(arm, DROPPING).interval
        return interval is not None and interval[1] < 1

    def no_different(self, arm: str) -> bool:
        """Whether the speed of ``arm`` does not differ significantly from the best one's."""
        interval = self.over_best(arm).interval
        return arm != self.best and interval is not None and interval[0] <= 1 <= interval[1]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The arms of one batch size and when they have been measured enough.

    With a ``precision`` of 0 that is after ``most`` repeats of each; arms that others are compared with may have more.
    """

    plain: str
    arms: tuple[str, ...]  # that can run, plain decoding too
    most: int  # repeats of an arm
    precision: float = 0.0  # half of the interval's width, on the scale of logarithms

    def ranking(self, rounds: Rounds) -> Ranking:
        """The ranking of the arms that have repeats."""
        return Ranking(plain=self.plain, arms=rounds.measured(self.arms), drops=self.precision > 0)

    def next_arms(self, group: Sequence[str], rounds: Rounds) -> list[str]:
        """The arms of ``group`` that need repeats, and what they are compared with; none: it is over."""
        ranking = self.ranking(rounds)
        needed = [arm for arm in group if self._is_open(ranking, arm)]
        others = (ranking.reference, ranking.best) if needed and ranking.arms else ()
        return list(dict.fromkeys((*needed, *(arm for arm in others if arm in group))))

    def _is_open(self, ranking: Ranking, arm: str) -> bool:
        done = len(ranking.arms[arm].each) if arm in ranking.arms else 0
        if done >= self.most or not self.precision or not done:
            return done < self.most
        if ranking.cannot_win(arm):
            return False
        if arm == ranking.reference:  # it takes part for the others' sake
            return done < min(LEAST, self.most)
        found = ranking.arms[arm].speedup(ranking.arms[ranking.reference])
        return done < LEAST or half_width(found) > self.precision
