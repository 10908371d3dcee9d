"""Latencies of requests; of passes their times and rows, and where the wall time of a run went."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specgen.record.columns import Run
from specgen.record.record_rows import ONLY_SESSION, WHOLE, Captured, PassRow, Row, Session, shard_of


@dataclass(frozen=True, kw_only=True)
class LatencyStats:
    """A latency over requests, in seconds."""

    mean: float
    median: float
    p99: float


def latency_stats(times: NDArray[np.float64]) -> LatencyStats | None:
    """Statistics of ``times`` ``[n]``; those that are not a number do not count."""
    known = times[~np.isnan(times)]
    if not len(known):
        return None
    median, p99 = np.quantile(known, (0.5, 0.99)).tolist()
    return LatencyStats(mean=fmean(known.tolist()), median=median, p99=p99)


def latencies(run: Run) -> tuple[LatencyStats | None, LatencyStats | None]:
    """Times to the first token, and per output token of the requests with two or more."""
    several = run.num_output_tokens > 1
    behind = (run.ended - run.first_token)[several] / (run.num_output_tokens[several] - 1)
    return latency_stats(run.first_token - run.arrival), latency_stats(behind)


class WallClock:
    """Wall time of a run: sessions, each from first to last, come after each other; shards run beside each other."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}  # by session

    def update(self, session: str, *times: float) -> None:
        """Include ``times`` of a session."""
        begin, end = self._spans.get(session, (times[0], times[0]))
        self._spans[session] = min(begin, *times), max(end, *times)

    def add_requests(self, run: Run) -> None:
        """Include the times of the requests."""
        times = np.stack([run.arrival, run.ended])
        for code, session in enumerate(run.sessions):
            if (of_session := run.session == code).any():
                self.update(session, float(times[:, of_session].min()), float(times[:, of_session].max()))

    @property
    def sharded(self) -> bool:
        """Whether sessions ran side by side."""
        return len({shard_of(session) for session in self._spans}) > 1

    @property
    def seconds(self) -> float:
        """The slowest shard's, and what came after all shards."""
        shards = defaultdict[str, float](float)
        for session, (begin, end) in self._spans.items():
            shards[shard_of(session)] += end - begin
        return shards.pop(WHOLE, 0.0) + max(shards.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Engine steps of one kind (prefill or decode): times in seconds and rows computed.

    ``target_rejected`` counts the rows of rejected drafts, including requests that failed or restarted later;
    ``first_pass_rows`` those of the drafter KV fill, ``first_pass_wasted`` its padding; ``by_num_spec_tokens`` the
    steps by K, the most frequent first.
    """

    num_steps: int
    seconds: float
    mean_seconds: float
    max_seconds: float
    mean_sequences: float
    target_rows: int
    target_rejected: int
    first_pass_rows: int
    first_pass_wasted: int
    loop_rows: int
    by_num_spec_tokens: Mapping[str, int] = field(default_factory=dict)


# --- where the wall time went -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WallTime:
    """Seconds of a run, which ``idle`` and all fields together add up to.

    The decode steps are in three parts. ``full`` is what their sequences would have taken in steps of the largest
    batch, or of smaller ones that cost a sequence no more (see ``_priced``); what the smaller steps took beyond that is
    ``filling`` where prompts waited for a slot, for pages, or for more prompts to be prefilled with, and ``tail`` where
    there were none left. While the device had nothing to do, the engine's caller had the host (texts, files, prompts)
    for at most ``idle_outside``, the rest is ``idle_engine``.
    """

    prefill: float
    full: float
    filling: float
    tail: float
    captures: float  # of CUDA graphs
    idle_outside: float
    idle_engine: float
    rest: float  # before the first pass and behind the last one

    @property
    def whole(self) -> float:
        return float(sum(asdict(self).values()))

    def of_whole(self, whole: float) -> Self:
        """These parts where the wall time is ``whole``: the difference is ``rest``."""
        return replace(self, rest=self.rest + whole - self.whole)


def _priced(
    decode: Mapping[tuple[int, bool], tuple[int, float]],
) -> tuple[list[float], list[tuple[int, int]]]:
    """For each batch size, the largest first: seconds of a sequence, and sequences while prompts waited or none did.

    A step costs a sequence more the fewer share it. Where measured times say otherwise, of noise or of kernels that
    suit one size better, neighbours get one price (isotonic regression), so that smaller batches never seem to give
    time back.
    """
    from scipy.optimize import isotonic_regression  # takes 0.3 s

    sizes = sorted({size for size, _ in decode}, reverse=True)
    steps = [[decode.get((size, waiting), (0, 0.0)) for waiting in (True, False)] for size in sizes]
    sequences = [
        (waiting * size, alone * size) for size, ((waiting, _), (alone, _)) in zip(sizes, steps, strict=True)
    ]
    totals = [sum(each) for each in sequences]
    measured = [(a + b) / total for ((_, a), (_, b)), total in zip(steps, totals, strict=True)]
    return isotonic_regression(measured, weights=totals).x.tolist(), sequences


class PassSums:
    """Sums over the rows of ``passes.jsonl``, in memory that does not grow with them."""

    def __init__(self) -> None:
        self.num_preempted = self.num_tokens = 0
        self.clock = WallClock()
        self._counts = defaultdict[str, Counter[str]](Counter)  # by kind of step, then by field of StepStats
        self._by_num_spec_tokens = defaultdict[str, Counter[int]](Counter)
        self._most = defaultdict[str, float](float)  # seconds of the longest step of a kind
        self._seconds = defaultdict[str, float](float)  # of steps by kind, then by part of WallTime
        # of decode steps by batch size and whether prompts waited, as the largest is known at the end
        self._decode: dict[tuple[int, bool], tuple[int, float]] = {}

    def add(self, passes: Iterable[Row]) -> None:
        """Add the rows of ``passes.jsonl``, in their order."""
        session = ONLY_SESSION
        for row in passes:
            session = row.name if isinstance(row, Session) else session
            self.clock.update(session, row.time)
            if isinstance(row, Captured):
                self._seconds["captures"] += row.seconds
            elif isinstance(row, PassRow):
                self._add(row)

    def _add(self, row: PassRow) -> None:
        self.num_preempted += row.num_preempted
        self.num_tokens += row.num_tokens
        self._counts[row.kind].update(
            num_steps=1,
            sequences=row.num_sequences,
            target_rows=row.target_rows,
            target_rejected=row.num_rejected,
            first_pass_rows=row.first_pass_rows,
            first_pass_wasted=row.first_pass_rows - row.first_pass_kept,
            loop_rows=row.loop_rows,
        )
        self._by_num_spec_tokens[row.kind][row.num_spec_tokens] += 1
        self._most[row.kind] = max(self._most[row.kind], row.seconds)
        self._seconds[row.kind] += row.seconds
        self._seconds["idle_outside"] += row.idle_outside
        self._seconds["idle_engine"] += row.idle - row.idle_outside
        if row.kind != "prefill":
            key = row.num_sequences, row.num_waiting > 0
            number, seconds = self._decode.get(key, (0, 0.0))
            self._decode[key] = number + 1, seconds + row.seconds

    def steps(self) -> dict[str, StepStats]:
        """The steps by kind."""
        found = {}
        for kind, counts in sorted(self._counts.items()):
            numbers, seconds = dict(counts), self._seconds[kind]
            num_sequences, lengths = numbers.pop("sequences"), self._by_num_spec_tokens[kind].most_common()
            found[kind] = StepStats(
                **numbers,
                seconds=seconds,
                mean_seconds=seconds / counts["num_steps"],
                max_seconds=self._most[kind],
                mean_sequences=num_sequences / counts["num_steps"],
                by_num_spec_tokens={str(k): steps for k, steps in lengths},
            )
        return found

    def wall(self, whole: float) -> WallTime | None:
        """The parts of a wall time of ``whole`` seconds; None without decode steps."""
        if not self._decode:
            return None
        prices, sequences = _priced(self._decode)
        full = prices[0]
        filling, tail = (
            math.fsum((price - full) * each[at] for price, each in zip(prices, sequences, strict=True))
            for at in (0, 1)
        )
        decode = sum(seconds for _, seconds in self._decode.values())
        others = {
            name: self._seconds[name] for name in ("prefill", "captures", "idle_outside", "idle_engine")
        }
        found = WallTime(**others, full=decode - (filling + tail), filling=filling, tail=tail, rest=0.0)
        return found.of_whole(whole)
