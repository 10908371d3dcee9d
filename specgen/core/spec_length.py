"""How many drafts the next decode step gets: always as many, or what pays best by measured costs and acceptance."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Protocol

_PRIOR = 0.7  # acceptance rate of the first draft before anything is observed
_WEIGHT = 8.0  # weight of that prior, in verify steps
_MEMORY = 100.0  # decay time of an observation, in verify steps per sequence
_LEAST_MEMORY = 48.0  # lower bound of that decay time, in steps of the whole batch
_MARGIN = 0.01  # relative gain below which another length is not considered better
_PATIENCE = 0.25  # steps that another length must have saved in sum before it is taken
_PROBE_SHARE = 0.004  # share of the time that may be spent on trying one length further


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
    """Chooses before every decode step how many drafts each sequence gets, and observes how many are accepted."""

    @property
    def most(self) -> int:
        """The largest that ``choose`` gives."""
        ...

    def choose(self, num_sequences: int) -> int:
        """K of the next decode step, which is one of ``num_sequences``; asked once per step."""
        ...

    def see(self, drafted: int, accepted: int) -> None:
        """One sequence had ``drafted`` drafts in a step, ``accepted`` of which the target accepted."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """As many drafts in every step."""

    most: int

    def choose(self, num_sequences: int) -> int:
        return self.most

    def see(self, drafted: int, accepted: int) -> None:
        pass


class RunningAcceptance:
    """The share of drafts accepted of late at each position, among the steps that accepted all before it.

    What was seen counts the less the more verify steps came after it, but what a large batch gives is not forgotten
    in a few steps. What little is known of a position is filled up with the estimate of the one before it.
    """

    def __init__(self, most: int) -> None:
        self._reached = [_WEIGHT, *[0.0] * (most - 1)]
        self._accepted = [_WEIGHT * _PRIOR, *[0.0] * (most - 1)]
        self._fresh: Counter[tuple[int, int]] = Counter()  # by drafted and accepted: not in the sums yet
        self._num_steps = 0  # since the sums were last added to

    def see(self, drafted: int, accepted: int) -> None:
        """Count one verify step of one sequence; without drafts it tells nothing."""
        if drafted:
            self._fresh[drafted, accepted] += 1

    def expected_tokens(self) -> list[float]:
        """Tokens that a step with 0, 1, ... drafts is expected to give; ``[most + 1]``. Asked once per step."""
        self._num_steps += 1
        if self._fresh:
            self._add_fresh()
        tokens, all_accepted = [1.0], 1.0
        estimate = self._accepted[0] / self._reached[0]
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            estimate = (accepted + _WEIGHT * estimate) / (reached + _WEIGHT)
            all_accepted *= estimate
            tokens.append(tokens[-1] + all_accepted)
        return tokens

    def _add_fresh(self) -> None:
        kept = exp(-min(self._fresh.total() / _MEMORY, self._num_steps / _LEAST_MEMORY))
        for sums in (self._reached, self._accepted):
            sums[:] = [kept * number for number in sums]
        for (drafted, accepted), times in self._fresh.items():
            for position in range(min(accepted + 1, drafted)):
                self._reached[position] += times
                self._accepted[position] += times * (position < accepted)
        self._fresh.clear()
        self._num_steps = 0


class CheapestLength:
    """What gives most tokens per second: expected by the running acceptance, over the ``costs`` of a step.

    It changes at once for what is far better, and for a little more only where that lasts, so that two lengths that
    are alike do not alternate. Beyond the present length nothing is seen, and at 0 nothing at all: so now and then
    one step has the next longer one. These steps, had they given no token more, would take ``_PROBE_SHARE`` of the
    time.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.most = costs.lengths[-1]
        self._costs = costs
        self._acceptance = RunningAcceptance(self.most)
        self._present: int | None = None
        self._missed = 0.0  # steps' worth of time that another length would have saved, in steps running
        self._saved = 0.0  # seconds, for the next probe

    def choose(self, num_sequences: int) -> int:
        tokens = self._acceptance.expected_tokens()
        rates = {k: tokens[k] / self._costs.at(num_sequences, k) for k in self._costs.lengths}
        best = max(rates, key=rates.__getitem__)
        if self._present is None:
            self._present = best
        gain = rates[best] / rates[self._present] - 1
        self._missed = self._missed + gain if gain > _MARGIN else 0.0
        if self._missed >= _PATIENCE:
            self._present, self._missed = best, 0.0
        return self._probe(num_sequences, self._present)

    def see(self, drafted: int, accepted: int) -> None:
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
