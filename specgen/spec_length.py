"""How many drafts the next decode step gets: always as many, or what pays best by measured costs and acceptance."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

_PRIOR = 0.7  # conditional acceptance before anything is seen, and how many verify steps it counts for
_PRIOR_WEIGHT = 8.0
_MEMORY = 400.0  # verify steps with drafts after which one counts for 1/e
_MARGIN = 0.01  # by which another length must be better,
_PATIENCE = 12  # and for how many steps running
_PROBE_SHARE = 0.004  # of the time may go into steps that are longer than what pays best


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """``seconds`` of a decode step by ``(num_sequences, K)``, as measured; several batch sizes for each K."""

    seconds: Mapping[tuple[int, int], float]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Every K that was measured, the smallest first."""
        return tuple(sorted(self._curves))

    def at(self, num_sequences: int, k: int) -> float:
        """Seconds of a step with ``k`` drafts: linear between measured batch sizes and beyond the largest one."""
        sizes, seconds = self._curves[k]
        if num_sequences <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect_left(sizes, num_sequences), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        if num_sequences > sizes[right]:
            slope = max(slope, 0.0)  # more sequences take no less time, whatever two measurements say
            left = right
        return seconds[left] + slope * (num_sequences - sizes[left])

    @cached_property
    def _curves(self) -> dict[int, tuple[list[int], list[float]]]:
        """Of each K its measured batch sizes, ascending, and their seconds."""
        curves: dict[int, tuple[list[int], list[float]]] = {}
        for (num_sequences, k), seconds in sorted(self.seconds.items()):
            sizes, times = curves.setdefault(k, ([], []))
            sizes.append(num_sequences)
            times.append(seconds)
        return curves


class SpecLength(Protocol):
    """Says before every decode step how many drafts a sequence gets in it, and is told what became of them."""

    @property
    def most(self) -> int:
        """The largest that ``choose`` gives."""
        ...

    def choose(self, num_sequences: int) -> int:
        """K of the next decode step, which is one of ``num_sequences``; asked once a step."""
        ...

    def see(self, drafted: int, accepted: int) -> None:
        """One sequence had ``drafted`` drafts in a step, ``accepted`` of which the target confirmed."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """As many drafts in every step."""

    most: int

    def choose(self, num_sequences: int) -> int:
        """See ``SpecLength``."""
        return self.most

    def see(self, drafted: int, accepted: int) -> None:
        """See ``SpecLength``."""


class RunningAcceptance:
    """The share of drafts accepted of late at each position, among the steps that accepted all before it.

    A verify step counts the less the more came after it. What little is known of a position is filled up with the
    estimate of the one before it, and of the first position with a prior.
    """

    def __init__(self, most: int) -> None:
        self._reached = [0.0] * most
        self._accepted = [0.0] * most
        self._fresh: Counter[tuple[int, int]] = Counter()  # by drafted and accepted: not in the sums yet

    def see(self, drafted: int, accepted: int) -> None:
        """Count one verify step of one sequence; without drafts it tells nothing."""
        if drafted:
            self._fresh[drafted, accepted] += 1

    def expected_tokens(self) -> list[float]:
        """Tokens that a step with 0, 1, ... drafts is expected to give; ``[most + 1]``."""
        self._take_fresh()
        tokens, all_accepted, estimate = [1.0], 1.0, _PRIOR
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            estimate = (accepted + _PRIOR_WEIGHT * estimate) / (reached + _PRIOR_WEIGHT)
            all_accepted *= estimate
            tokens.append(tokens[-1] + all_accepted)
        return tokens

    def _take_fresh(self) -> None:
        if not self._fresh:
            return
        kept = (1 - 1 / _MEMORY) ** self._fresh.total()
        for sums in (self._reached, self._accepted):
            sums[:] = [kept * number for number in sums]
        for (drafted, accepted), times in self._fresh.items():
            for position in range(min(accepted + 1, drafted)):
                self._reached[position] += times
                self._accepted[position] += times * (position < accepted)
        self._fresh.clear()


class CheapestLength:
    """What gives most tokens a second: expected by the running acceptance, over the ``costs`` of a step.

    It changes only for what was better by a margin for several steps running, so that two lengths that are alike do
    not alternate. Beyond the present length nothing is seen, and at 0 nothing at all: so now and then one step has
    the next longer one. These steps, had they given no token more, would take ``_PROBE_SHARE`` of the time.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.most = costs.lengths[-1]
        self._costs = costs
        self._acceptance = RunningAcceptance(self.most)
        self._present: int | None = None
        self._steps_better = 0  # in a row, of another length than the present one
        self._saved = 0.0  # seconds, for the next probe

    def choose(self, num_sequences: int) -> int:
        """See ``SpecLength``."""
        tokens = self._acceptance.expected_tokens()
        rates = {k: tokens[k] / self._costs.at(num_sequences, k) for k in self._costs.lengths}
        best = max(rates, key=rates.__getitem__)
        if self._present is None:
            self._present = best
        better = rates[best] > (1 + _MARGIN) * rates[self._present]
        self._steps_better = self._steps_better + 1 if better else 0
        if self._steps_better >= _PATIENCE:
            self._present, self._steps_better = best, 0
        return self._probe(num_sequences, self._present)

    def see(self, drafted: int, accepted: int) -> None:
        """See ``SpecLength``."""
        self._acceptance.see(drafted, accepted)

    def _probe(self, num_sequences: int, present: int) -> int:
        """The next longer length where enough was saved for a step of it, else ``present``."""
        if present == self.most:
            return present
        longer = next(k for k in self._costs.lengths if k > present)
        now = self._costs.at(num_sequences, present)
        price = self._costs.at(num_sequences, longer) - now
        self._saved += _PROBE_SHARE * now
        if self._saved < price:
            return present
        self._saved = 0.0
        return longer
