"""Latencies of requests, times of engine steps, and the rows that the steps computed."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specgen.record.record_rows import WHOLE, PassRow, shard_of


@dataclass(frozen=True, kw_only=True)
class LatencyStats:
    """A latency over requests, in seconds."""

    mean: float
    median: float
    p99: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values with linear interpolation (numpy's default)."""
    index = share * (len(ordered) - 1)
    low = int(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (index - low) * (ordered[high] - ordered[low])


def latency_stats(times: Sequence[float]) -> LatencyStats | None:
    if not times:
        return None
    ordered = sorted(times)
    return LatencyStats(mean=fmean(times), median=quantile(ordered, 0.5), p99=quantile(ordered, 0.99))


class WallClock:
    """Wall time of a run: sessions, each from first to last, come after each other; shards run beside each other."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}  # by session

    def see(self, session: str, *times: float) -> None:
        """Include ``times`` of a session."""
        begin, end = self._spans.get(session, (times[0], times[0]))
        self._spans[session] = min(begin, *times), max(end, *times)

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
    by_num_spec_tokens: Mapping[str, int]


class StepSum:
    """Sums over steps of one kind."""

    def __init__(self) -> None:
        self._counts = Counter[str]()  # by field of StepStats
        self._num_sequences = 0
        self._seconds = self._max_seconds = 0.0
        self._by_num_spec_tokens = Counter[int]()

    def add(self, row: PassRow) -> None:
        """Add one step."""
        self._counts.update(
            num_steps=1,
            target_rows=row.target_rows,
            target_rejected=row.num_rejected,
            first_pass_rows=row.first_pass_rows,
            first_pass_wasted=row.first_pass_rows - row.first_pass_kept,
            loop_rows=row.loop_rows,
        )
        self._num_sequences += row.num_sequences
        self._seconds += row.seconds
        self._max_seconds = max(self._max_seconds, row.seconds)
        self._by_num_spec_tokens[row.num_spec_tokens] += 1

    def result(self) -> StepStats:
        """The sums and means; needs at least one row."""
        num_steps = self._counts["num_steps"]
        return StepStats(
            **self._counts,
            seconds=self._seconds,
            mean_seconds=self._seconds / num_steps,
            max_seconds=self._max_seconds,
            mean_sequences=self._num_sequences / num_steps,
            by_num_spec_tokens={str(k): steps for k, steps in self._by_num_spec_tokens.most_common()},
        )
