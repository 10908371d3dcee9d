"""The drafts of the next decode step: always as many, or what pays best by measured costs and acceptance."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, inf
from typing import Protocol, TypeVar

import numpy as np

from specgen.config import CONFIDENCE_LEVELS

_PRIOR = 0.7  # acceptance rate of the first draft before anything is observed
_WEIGHT = 8.0  # weight of that prior, in verify steps
_MEMORY = 100.0  # decay time of an observation, in verify steps per sequence
_LEAST_MEMORY = 48.0  # lower bound of that decay time, in steps of the whole batch
_MARGIN = 0.01  # relative gain below which another length is not considered better
_PATIENCE = 0.25  # steps that another length must have saved in sum before it is taken
# Of drafts verified of a sequence on average: few, as each is a CUDA graph for each size of a batch and each K
_QUARTERS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
_EVERY = 16  # steps between two looks at the plan, while the batch is about as large
_SEQUENCES = 512  # whose confidence is remembered
FEWEST = 4  # sequences of which some are worth more drafts than others
_NOT_MADE = -2  # in place of the level of a draft that was not asked for; -1 is one that is missing
_LEAST_CHANCE = 0.005  # of a draft, and of its rejection
_PROBE_SHARE = 0.004  # share of the time that may be spent on trying one length further
_Kind = TypeVar("_Kind", int, tuple[int, int])


# Of a draft behind accepted ones, by position and level of confidence
Chances = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The drafts of a step: ``num_drafts`` (K) of each sequence; all are verified, or ``quarters`` of one a sequence.

    Which these are is by ``chances``: those that are most likely to be accepted, in the whole batch.
    """

    num_drafts: int
    quarters: int | None = None
    chances: Chances = ()

    def num_verified(self, num_sequences: int) -> int | None:
        """Drafts verified in all; None: all."""
        return None if self.quarters is None else max(1, num_sequences * self.quarters // 4)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """``seconds`` of a decode step by ``(num_sequences, K)``, as measured; several batch sizes for each of some K.

    ``partial`` are those of steps that verify a part of the drafts, by ``(num_sequences, K, quarters)``, as of
    ``StepPlan``: several with the largest K, and one quarter with K = 1, which tells what it costs to make a draft.
    Empty where there are no such steps.

    Both are of short contexts. ``of_position`` is what one position more in the cache, of whichever sequence, adds to
    a step without drafts and to one with the largest K. It is much the same, so the longer the contexts are, the less
    a draft costs beside the rest of its step.
    """

    seconds: Mapping[tuple[int, int], float]
    partial: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    of_position: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Every K up to the largest that was measured."""
        return tuple(range(max(self._curves) + 1))

    def at(self, num_sequences: int, k: int, num_positions: int = 0) -> float:
        """Seconds of a step with ``k`` drafts: linear between measured K and batch sizes and beyond the largest one.

        ``num_positions`` of all sequences together are in the cache.
        """
        return float(self.at_lengths(num_sequences, num_positions)[self.lengths.index(k)])

    def at_lengths(self, num_sequences: int, num_positions: int = 0) -> np.ndarray:
        """The same for every K of ``lengths``."""
        timed = sorted(self._curves)
        seconds = np.interp(self.lengths, timed, [_between(*self._curves[k], num_sequences) for k in timed])
        return np.asarray(seconds + self._of_context(num_positions, self.lengths))

    @property
    def fewest(self) -> float:
        """Sequences of which a part of the drafts may be verified."""
        return FEWEST if self.partial else inf

    def at_part(self, num_sequences: int, k: int, quarters: int, num_positions: int = 0) -> float:
        """Seconds of a step with ``k`` drafts of which so many are verified."""
        return float(self.at_parts(num_sequences, (k,), (quarters,), num_positions)[0, 0])

    def at_parts(
        self, num_sequences: int, lengths: Sequence[int], quarters: Sequence[int], num_positions: int = 0
    ) -> np.ndarray:
        """The same for each K of ``lengths`` with each of ``quarters``: ``[len(lengths), len(quarters)]``."""
        most = self.lengths[-1]
        parts = sorted(part for k, part in self._beyond if k == most)
        beyond = [_between(*self._beyond[most, part], num_sequences) for part in parts]
        made = beyond[0] - _between(*self._beyond[1, 1], num_sequences)  # for all but one draft
        seconds = self._whole(num_sequences, np.array(quarters) / 4) + np.interp(quarters, parts, beyond)
        not_made = (most - np.array(lengths)) / max(most - 1, 1)
        of_lengths = self._of_context(num_positions, lengths) - max(made, 0.0) * not_made
        return np.asarray(seconds + of_lengths[:, None])

    def _of_context(self, num_positions: int, lengths: Sequence[int]) -> np.ndarray:
        """What so many positions add to a step with each K of ``lengths``."""
        none, most = self.of_position
        return num_positions * (none + (most - none) * np.array(lengths) / max(self.lengths[-1], 1))

    def _whole(self, num_sequences: int, num_verified: np.ndarray) -> np.ndarray:
        """Seconds of steps that verify so many drafts of a sequence and make no others, also between measured K."""
        return np.asarray(np.interp(num_verified, self.lengths, self.at_lengths(num_sequences)))

    @cached_property
    def _curves(self) -> dict[int, tuple[list[int], list[float]]]:
        """Of each K its measured batch sizes, ascending, and their seconds."""
        return _curves_of((size, k, seconds) for (size, k), seconds in self.seconds.items())

    @cached_property
    def _beyond(self) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
        """What steps of each K and number of quarters take beyond whole ones of as many rows.

        This is what changes steadily with the batch size. The cost of rows has steps of its own, and whole steps were
        measured at every size.
        """
        return _curves_of(
            (size, (k, part), seconds - float(self._whole(size, np.array(part / 4))))
            for (size, k, part), seconds in self.partial.items()
        )


def _curves_of(points: Iterable[tuple[int, _Kind, float]]) -> dict[_Kind, tuple[list[int], list[float]]]:
    """Of each kind of step its batch sizes, ascending, and their seconds."""
    curves: dict[_Kind, tuple[list[int], list[float]]] = {}
    for size, kind, seconds in sorted(points):
        sizes, times = curves.setdefault(kind, ([], []))
        sizes.append(size)
        times.append(seconds)
    return curves


def _between(xs: list[int], ys: list[float], x: int) -> float:
    """Linear between the points and beyond the last one; as the first one before it."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    if x > xs[right]:
        slope = max(slope, 0.0)  # more takes no less time, whatever two measurements say
        left = right
    return ys[left] + slope * (x - xs[left])


class SpecLength(Protocol):
    """Chooses before every decode step which drafts it has, and observes how many are accepted."""

    @property
    def most(self) -> int:
        """The largest K that ``choose`` gives."""
        ...

    def choose(self, num_sequences: int, num_positions: int) -> StepPlan:
        """Of the next decode step, which is one of ``num_sequences``; asked once per step.

        ``num_positions``: how long they are together, as far as is known.
        """
        ...

    def update(self, levels: Sequence[int], verified: int, accepted: int) -> None:
        """One sequence had drafts of so many ``levels``, of which the first were ``verified`` and ``accepted``.

        -1 is the level of a draft that is missing.
        """
        ...


@dataclass(frozen=True)
class FixedPlan:
    """The same drafts in every step."""

    plan: StepPlan

    @property
    def most(self) -> int:
        return self.plan.num_drafts

    def choose(self, num_sequences: int, num_positions: int) -> StepPlan:
        return self.plan

    def update(self, levels: Sequence[int], verified: int, accepted: int) -> None:
        pass


class RunningAcceptance:
    """The share of drafts accepted of late at each position and level, among the steps that accepted all before it.

    What was seen counts the less the more verify steps came after it, but what a large batch gives is not forgotten
    in a few steps. What little is known of a position is filled up with the estimate of the one before it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        shape = (most, len(CONFIDENCE_LEVELS))
        self._reached, self._accepted = np.zeros(shape), np.zeros(shape)
        self._first = [_WEIGHT, _WEIGHT * _PRIOR]  # reached and accepted at the first position, of all levels
        # of all drafts, verified or not, by position: how many are expected behind accepted ones, and to be accepted
        self._expected = np.zeros((2, most))
        self._fresh = Counter[tuple[int, int, bool]]()  # position, level, accepted: not in the sums yet
        self._num_fresh = 0  # verify steps of a sequence that are not in the sums yet
        self._num_steps = 0  # of the batch since the sums were last added to
        self._levels = np.full((1, most), _NOT_MADE)  # of the sequences seen last
        self._fresh_levels: deque[Sequence[int]] = deque(maxlen=_SEQUENCES)  # not among these yet

    def update(self, levels: Sequence[int], verified: int, accepted: int) -> None:
        """Count one verify step of one sequence; without drafts it tells nothing."""
        if levels:
            self._fresh_levels.append(levels)
            self._num_fresh += 1
            for position in range(min(accepted + 1, verified)):  # missing drafts are not among them
                self._fresh[position, levels[position], position < accepted] += 1

    def step(self) -> None:
        """A step of the batch begins."""
        self._num_steps += 1

    def chances(self) -> np.ndarray:
        """Of a draft behind accepted ones, by position and level: ``[most, len(CONFIDENCE_LEVELS)]``."""
        if self._num_fresh:
            self._add_fresh()
        reached, accepted = self._first
        estimate, found = np.full(len(CONFIDENCE_LEVELS), accepted / reached), []
        for tried, right in zip(self._reached, self._accepted, strict=True):
            estimate = (right + _WEIGHT * estimate) / (tried + _WEIGHT)
            found.append(estimate)
        return np.clip(found, _LEAST_CHANCE, 1 - _LEAST_CHANCE)

    def _add_fresh(self) -> None:
        kept = exp(-min(self._num_fresh / _MEMORY, self._num_steps / _LEAST_MEMORY))
        for sums in (self._reached, self._accepted, self._expected):
            sums *= kept
        self._first = [kept * number for number in self._first]
        for (position, level, accepted), times in self._fresh.items():
            self._reached[position, level] += times
            self._accepted[position, level] += times * accepted
            if position == 0:
                self._first[0] += times
                self._first[1] += times * accepted
        self._fresh.clear()
        self._num_fresh = self._num_steps = 0

    def survival(self, chances: np.ndarray) -> np.ndarray:
        """Of the sequences seen last, the chance that a draft and all before it are accepted: ``[n, most]``.

        A missing draft has no chance. One behind the last of a shorter K has the mean chance at its position of late.
        """
        most = self._most
        not_made = [[_NOT_MADE] * (most - count) for count in range(most + 1)]
        fresh = [[*each, *not_made[len(each)]] for each in self._fresh_levels]
        self._fresh_levels.clear()
        if fresh:
            self._levels = np.concatenate([self._levels, fresh])[-_SEQUENCES:]
        levels, new = self._levels, slice(len(self._levels) - len(fresh), None)
        made, chance = levels > _NOT_MADE, np.where(levels < 0, 0.0, chances[np.arange(most), levels])
        accepted = np.where(made, chance, 0.0).cumprod(1)
        before = np.where(made, np.pad(accepted[:, :-1], ((0, 0), (1, 0)), constant_values=1.0), 0.0)
        self._expected += before[new].sum(0), accepted[new].sum(0)
        usual = [self._first[1] / self._first[0]]
        for reached, kept in self._expected.T.tolist():
            usual.append((kept + _WEIGHT * usual[-1]) / (reached + _WEIGHT))
        return np.where(made, chance, usual[1:]).cumprod(1)


class BestPlan:
    """What gives most tokens per second: expected by the running acceptance, over the ``costs`` of a step.

    It changes at once for what is far better, and for a little more only where that lasts, so that two plans that
    are alike do not alternate. Beyond the present K nothing is seen, of drafts that are not verified neither, and at 0
    nothing at all: so now and then one step verifies all drafts of the next longer K. These steps, had they given no
    token more, would take ``_PROBE_SHARE`` of the time.

    The drafts of a step are fixed before any of them is drawn, by what earlier steps have shown.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.most = costs.lengths[-1]
        self._costs = costs
        self._acceptance = RunningAcceptance(self.most)
        self._present: StepPlan | None = None
        self._planned_for = 0  # sequences
        self._age = 0  # of the plan, in steps
        self._num_steps = 0
        self._missed = 0.0  # steps' worth of time that another plan would have saved, in steps running
        self._longer: StepPlan | None = None  # the next probe, if there is any
        # seconds: for it, of each step, and what it takes more
        self._saved = self._allowance = self._price = 0.0

    def choose(self, num_sequences: int, num_positions: int) -> StepPlan:
        self._acceptance.step()
        self._age += 1
        self._num_steps += 1
        changed = abs(num_sequences - self._planned_for) > self._planned_for // 8
        settled = self._num_steps > _EVERY and not self._missed and not changed
        if self._present is None or not settled or self._age >= _EVERY:
            self._present = self._plan(num_sequences, num_positions, self._present)
            self._planned_for, self._age = num_sequences, 0
            self._price_probe(num_sequences, num_positions, self._present)
        return self._probe(self._present)

    def update(self, levels: Sequence[int], verified: int, accepted: int) -> None:
        self._acceptance.update(levels, verified, accepted)

    def _plan(self, num_sequences: int, num_positions: int, present: StepPlan | None) -> StepPlan:
        """The best plan where it is far better than ``present``, or was better for long."""
        chances = self._acceptance.chances()
        rates = self._rates(num_sequences, num_positions, self._acceptance.survival(chances))
        best = max(rates, key=rates.__getitem__)
        now = best if present is None else (present.num_drafts, present.quarters)
        gain = rates[best] / rates[now] - 1 if now in rates else _PATIENCE  # few sequences have no part
        self._missed = self._missed + gain if gain > _MARGIN else 0.0
        if self._missed >= _PATIENCE:
            now, self._missed = best, 0.0
        k, quarters = now
        return StepPlan(
            num_drafts=k,
            quarters=quarters,
            chances=() if quarters is None else tuple(tuple(map(float, row)) for row in chances),
        )

    def _rates(
        self, num_sequences: int, num_positions: int, survival: np.ndarray
    ) -> dict[tuple[int, int | None], float]:
        """Tokens per second of a sequence by K and quarters verified."""
        costs, tokens = self._costs, 1 + np.cumsum(survival.mean(0))
        rates: dict[tuple[int, int | None], float] = {
            (k, None): float(tokens[k - 1] if k else 1.0) / seconds
            for k, seconds in zip(
                costs.lengths, costs.at_lengths(num_sequences, num_positions).tolist(), strict=True
            )
        }
        if num_sequences < costs.fewest:
            return rates
        lengths, quarters = costs.lengths[1:], np.array(_QUARTERS)
        size = min(num_sequences, len(survival))
        batches = survival[-(len(survival) // size * size) :].reshape(-1, size, self.most)
        counts = np.maximum(size * quarters // 4, 1)
        parts = costs.at_parts(num_sequences, lengths, _QUARTERS, num_positions)
        for k, seconds in zip(lengths, parts, strict=True):
            drafts = np.sort(batches[:, :, :k].reshape(len(batches), -1), 1)[:, ::-1].mean(0).cumsum()
            fewer = quarters < 4 * k
            found = (1 + drafts[counts[fewer] - 1] / size) / seconds[fewer]
            rates |= {(k, int(part)): float(each) for part, each in zip(quarters[fewer], found, strict=True)}
        return rates

    def _price_probe(self, num_sequences: int, num_positions: int, present: StepPlan) -> None:
        """Set what ``present`` takes, and what a step with all drafts of the next longer K takes more."""
        k, quarters = present.num_drafts, present.quarters
        of_present = self._costs.at(num_sequences, k, num_positions)
        if quarters is not None:
            of_present = self._costs.at_part(num_sequences, k, quarters, num_positions)
        longer = next((each for each in self._costs.lengths if each > k), k)
        # with a part of the most drafts, all of them; without, nothing is longer
        self._longer = None if longer == k and quarters is None else StepPlan(num_drafts=longer)
        self._allowance = _PROBE_SHARE * of_present
        self._price = self._costs.at(num_sequences, longer, num_positions) - of_present

    def _probe(self, present: StepPlan) -> StepPlan:
        """All drafts of the next longer K where enough was saved for a step of it, else ``present``."""
        if self._longer is None:
            return present
        self._saved += self._allowance
        if self._saved < self._price:
            return present
        self._saved = 0.0
        return self._longer
