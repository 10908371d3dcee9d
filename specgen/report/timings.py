"""How long requests and engine steps took, and the rows that the steps computed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specgen.events import Stepped


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A time over requests, in seconds."""

    mean: float
    median: float
    p99: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, linear between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(times: Sequence[float]) -> Spread | None:
    """The spread of ``times`` in seconds; None without any."""
    if not times:
        return None
    ordered = sorted(times)
    return Spread(mean=sum(times) / len(times), median=quantile(ordered, 0.5), p99=quantile(ordered, 0.99))


class WallClock:
    """Seconds that a run took, from its first event to its last, whether in one piece or in several."""

    def __init__(self) -> None:
        self._earlier = 0.0  # of this shard, before it was resumed
        self._slowest = 0.0  # of the shards before
        self._begin: float | None = None
        self._end = 0.0

    @property
    def seconds(self) -> float:
        """Up to now."""
        return max(self._slowest, self._of_shard)

    @property
    def _of_shard(self) -> float:
        return self._earlier + (self._end - self._begin if self._begin is not None else 0.0)

    def see(self, time: float) -> None:
        """Something happened at ``time``; events may come a little out of order."""
        self._begin = time if self._begin is None else min(self._begin, time)
        self._end = max(self._end, time)

    def resume(self) -> None:
        """What follows ran after what came before of the same shard, by another clock."""
        self._restart(earlier=self._of_shard, slowest=self._slowest)

    def shard(self) -> None:
        """What follows ran beside what came before, by another clock."""
        self._restart(earlier=0.0, slowest=self.seconds)

    def merge(self) -> None:
        """What follows ran after all shards, by another clock."""
        self._restart(earlier=self.seconds, slowest=0.0)

    def _restart(self, *, earlier: float, slowest: float) -> None:
        self._earlier, self._slowest, self._begin, self._end = earlier, slowest, None, 0.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Passes of the engine's loop of one kind: times in seconds and rows computed.

    ``target_rejected`` are the rows of drafts that the target rejected in these same steps, of requests that failed or
    began again later too; ``first_pass_wasted`` are the rows that the drafter took in and that held no confirmed token;
    ``by_num_spec_tokens`` says how many steps had so many drafts a sequence (K), the most frequent first.
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
    """Steps of one kind added up."""

    def __init__(self) -> None:
        self._num_steps = self._num_sequences = 0
        self._seconds = self._max_seconds = 0.0
        self._target_rows = self._target_rejected = 0
        self._first_pass_rows = self._first_pass_kept = self._loop_rows = 0
        self._by_num_spec_tokens: Counter[int] = Counter()

    def add(self, step: Stepped, num_rejected: int) -> None:
        """Count one step, and the drafts that were rejected in it."""
        self._num_steps += 1
        self._num_sequences += step.num_sequences
        self._seconds += step.seconds
        self._max_seconds = max(self._max_seconds, step.seconds)
        self._target_rows += step.target_rows
        self._target_rejected += num_rejected
        self._first_pass_rows += step.first_pass_rows
        self._first_pass_kept += step.first_pass_kept
        self._loop_rows += step.loop_rows
        self._by_num_spec_tokens[step.num_spec_tokens] += 1

    def result(self) -> Steps:
        """The sums and means of one step or more."""
        return Steps(
            num_steps=self._num_steps,
            seconds=self._seconds,
            mean_seconds=self._seconds / self._num_steps,
            max_seconds=self._max_seconds,
            mean_sequences=self._num_sequences / self._num_steps,
            target_rows=self._target_rows,
            target_rejected=self._target_rejected,
            first_pass_rows=self._first_pass_rows,
            first_pass_wasted=self._first_pass_rows - self._first_pass_kept,
            loop_rows=self._loop_rows,
            by_num_spec_tokens={str(k): steps for k, steps in self._by_num_spec_tokens.most_common()},
        )
