"""Which arms of one batch size still need repeats: a pure function of the rounds, so that a stopped tune goes on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from specgen.experiments.rounds import Repeats, Rounds, Speedup

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

    plain: str  # its name
    arms: Mapping[str, Repeats]

    @property
    def reference(self) -> str:
        """The arm that others are a multiple of: plain decoding, or the best where that has not run."""
        return self.plain if self.plain in self.arms else self.best

    @cached_property
    def best(self) -> str:
        return max(self.arms, key=self._strength)

    def _strength(self, arm: str) -> float:
        if self.plain in self.arms:
            return self.arms[arm].speedup(self.arms[self.plain]).ratio
        return self.arms[arm].speed.median

    @property
    def is_judged(self) -> bool:
        """Whether the best has been measured more than once: one repeat has no spread, and may be luck."""
        return len(self.arms[self.best].each) >= JUDGED

    def over_reference(self, arm: str) -> Speedup:
        """Its speed over that of ``reference``."""
        return self.arms[arm].speedup(self.arms[self.reference])

    def over_best(self, arm: str, confidence: float = 0.95) -> Speedup:
        """Its speed over that of ``best``."""
        return self.arms[arm].speedup(self.arms[self.best], confidence)

    def cannot_win(self, arm: str) -> bool:
        """Whether it is not worth another repeat; plain decoding takes part for the others' sake."""
        if len(self.arms[arm].each) < LEAST or arm in (self.best, self.plain):
            return False
        return self.at_most(arm) < 1

    def at_most(self, arm: str) -> float:
        """The upper end of the interval that decides whether ``arm`` is dropped."""
        interval = self.over_best(arm, DROPPING).interval
        return math.inf if interval is None else interval[1]

    def no_different(self, arm: str) -> bool:
        """Whether its speed does not differ significantly from the best arm's."""
        interval = self.over_best(arm).interval
        return arm != self.best and interval is not None and interval[0] <= 1 <= interval[1]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The arms of one batch size and when they have been measured enough."""

    plain: str
    arms: tuple[str, ...]  # that can run, plain decoding too
    most: int  # repeats of an arm
    precision: float  # half of the interval's width, on the scale of logarithms

    def ranking(self, rounds: Rounds) -> Ranking:
        """What is known so far; of at least one arm."""
        return Ranking(plain=self.plain, arms=rounds.measured(self.arms))

    def due(self, group: Sequence[str], rounds: Rounds) -> list[str]:
        """Of the arms in ``group``, those that need repeats, and what they are compared with; see ``turns.Due``."""
        measured = rounds.measured(self.arms)
        needed = [arm for arm in group if arm not in measured]
        if measured:
            ranking = Ranking(plain=self.plain, arms=measured)
            needed += [arm for arm in group if arm in measured and self._is_open(ranking, arm)]
            if needed:
                needed += [arm for arm in (ranking.reference, ranking.best) if arm in group]
        return list(dict.fromkeys(needed))

    def left(self, rounds: Rounds) -> dict[str, tuple[int, int]]:
        """How many more repeats each arm needs, at least and at most; without those that need none."""
        least = {
            arm: max(1, min(LEAST, self.most) - rounds.count(arm)) for arm in self.due(self.arms, rounds)
        }
        return {arm: (number, max(number, self.most - rounds.count(arm))) for arm, number in least.items()}

    def _is_open(self, ranking: Ranking, arm: str) -> bool:
        done = len(ranking.arms[arm].each)
        if done >= self.most or ranking.cannot_win(arm):
            return False
        if arm == ranking.reference:  # it takes part for the others' sake
            return done < min(LEAST, self.most)
        return done < LEAST or ranking.over_reference(arm).half_width > self.precision
