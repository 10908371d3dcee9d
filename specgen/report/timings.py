"""Latencies of requests, times of engine steps, and the rows that the steps computed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.events import Stepped


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
    return LatencyStats(
        mean=sum(times) / len(times), median=quantile(ordered, 0.5), p99=quantile(ordered, 0.99)
    )


class WallClock:
    """Wall time of a run from its first event to its last, over resumptions and shards."""

    def __init__(self) -> None:
        self._earlier = 0.0  # of this shard, before it was resumed
        self._slowest = 0.0  # of the earlier shards
        self._begin: float | None = None
        self._end = 0.0

    @property
    def seconds(self) -> float:
        return max(self._slowest, self._of_shard)

    @property
    def _of_shard(self) -> float:
        return self._earlier + (self._end - self._begin if self._begin is not None else 0.0)

    def see(self, time: float) -> None:
        """Include an event at ``time``; events may be slightly out of order."""
        self._begin = time if self._begin is None else min(self._begin, time)
        self._end = max(self._end, time)

    def resume(self) -> None:
        """The next events continue this shard in a new process, so on another clock."""
        self._restart(earlier=self._of_shard, slowest=self._slowest)

    def shard(self) -> None:
        """The next events are another shard's, which ran at the same time on another clock."""
        self._restart(earlier=0.0, slowest=self.seconds)

    def merge(self) -> None:
        """The next events came after all shards, on another clock."""
        self._restart(earlier=self.seconds, slowest=0.0)

    def _restart(self, *, earlier: float, slowest: float) -> None:
        self._earlier, self._slowest, self._begin, self._end = earlier, slowest, None, 0.0


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

    def add(self, step: Stepped, num_rejected: int) -> None:
        """Add one step and its number of rejected drafts."""
        self._counts.update(
            num_steps=1,
            target_rows=step.target_rows,
            target_rejected=num_rejected,
            first_pass_rows=step.first_pass_rows,
            first_pass_wasted=step.first_pass_rows - step.first_pass_kept,
            loop_rows=step.loop_rows,
        )
        self._num_sequences += step.num_sequences
        self._seconds += step.seconds
        self._max_seconds = max(self._max_seconds, step.seconds)
        self._by_num_spec_tokens[step.num_spec_tokens] += 1

    def sums(self) -> dict[str, Any]:
        """All sums, for ``add_sums``."""
        return {
            "counts": dict(self._counts),
            "num_sequences": self._num_sequences,
            "seconds": self._seconds,
            "max_seconds": self._max_seconds,
            "by_num_spec_tokens": {str(k): steps for k, steps in self._by_num_spec_tokens.items()},
        }

    def add_sums(self, sums: Mapping[str, Any]) -> None:
        """Add the steps whose sums these are."""
        self._counts.update(sums["counts"])
        self._num_sequences += sums["num_sequences"]
        self._seconds += sums["seconds"]
        self._max_seconds = max(self._max_seconds, sums["max_seconds"])
        self._by_num_spec_tokens.update({int(k): steps for k, steps in sums["by_num_spec_tokens"].items()})

    def result(self) -> StepStats:
        """The sums and means; needs at least one step."""
        num_steps = self._counts["num_steps"]
        return StepStats(
            **self._counts,
            seconds=self._seconds,
            mean_seconds=self._seconds / num_steps,
            max_seconds=self._max_seconds,
            mean_sequences=self._num_sequences / num_steps,
            by_num_spec_tokens={str(k): steps for k, steps in self._by_num_spec_tokens.most_common()},
        )
