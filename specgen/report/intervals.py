"""95 % confidence intervals for ratios of counts whose trials are correlated within groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # the normal quantile that leaves 2.5 % on either side

Interval = tuple[float, float]


def student_t(freedom: float, confidence: float = 0.95) -> float:
    """The t quantile that leaves half of what ``confidence`` lacks on either side, for ``freedom`` > 0."""
    from scipy.special import stdtrit  # takes 0.3 s, and few commands need it

    return float(stdtrit(freedom, (1 + confidence) / 2))


def wilson(share: float, trials: float) -> Interval:
    """Wilson's score interval (JASA 22, 1927) for ``trials`` > 0, which need not be whole as in scipy."""
    weight = Z * Z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight * weight / 4) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


class Ratio:
    """Sum of hits over sum of trials, accumulated group by group in constant memory.

    Steps of a conversation are correlated, conversations independent. The variance is that of the ratio estimator,
    linearized over groups (Cochran, Sampling Techniques, 3rd ed. 1977, chapter 6):
    ``n/(n-1) * sum((hits - rate*trials)^2) / sum(trials)^2``.
    """

    def __init__(self) -> None:
        self.groups = 0
        self.hits = 0
        self.trials = 0
        # sums of hits*hits, hits*trials, trials*trials; integers, so there is no cancellation
        self._squares = (0, 0, 0)

    def add(self, hits: int, trials: int) -> None:
        """Add one group; a group without trials carries no information and is ignored."""
        if trials == 0:
            return
        self.groups += 1
        self.hits += hits
        self.trials += trials
        hh, ht, tt = self._squares
        self._squares = (hh + hits * hits, ht + hits * trials, tt + trials * trials)

    @property
    def rate(self) -> float | None:
        """Hits per trial; None without trials."""
        return self.hits / self.trials if self.trials else None

    def variance(self) -> float:
        """The variance of ``rate``, for two groups or more."""
        assert self.groups >= 2
        hh, ht, tt = self._squares
        # sum((hits - rate*trials)^2) * trials^2, in integers
        spread = hh * self.trials**2 - 2 * ht * self.hits * self.trials + tt * self.hits**2
        return self.groups / (self.groups - 1) * spread / self.trials**4

    def share_interval(self) -> Interval | None:
        """The 95 % interval of a rate in [0, 1]; None without trials.

        Wilson's interval at the effective sample size: the number of independent trials with the variance of the
        groups, at most the trials, adjusted for the degrees of freedom (Korn and Graubard, Survey Methodology
        24, 1998). It stays in [0, 1] and has a width at 0 and 1. With one group it is plain Wilson, too narrow
        as the correlation within the group is unknown.
        """
        if self.rate is None:
            return None
        if self.groups == 1:
            return wilson(self.rate, self.trials)
        variance = self.variance()
        independent = self.rate * (1 - self.rate) / variance if variance > 0 else self.trials
        effective = min(independent, self.trials) * (Z / student_t(self.groups - 1)) ** 2
        return wilson(self.rate, effective)

    def mean_interval(self) -> Interval | None:
        """The 95 % t interval of an unbounded rate; None with fewer than two groups or equal ones."""
        if self.rate is None or self.groups < 2 or (variance := self.variance()) == 0:
            return None
        half = student_t(self.groups - 1) * math.sqrt(variance)
        return self.rate - half, self.rate + half


@dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """One ratio minus another over the same groups.

    ``interval`` and ``p`` are None with fewer than two groups, and where all groups differ alike, as without a
    spread there is no test. Where there is no difference at all, ``p`` is 1.
    """

    num_groups: int
    rate: float
    other_rate: float
    difference: float
    interval: Interval | None  # 95 %
    p: float | None  # two-sided, of no difference


def paired_ratio(groups: Sequence[tuple[int, int, int, int]]) -> PairedRatio:
    """Compare two ratios over ``(hits, trials, other hits, other trials)`` per group, with trials in both.

    As in ``Ratio`` the variance is linearized over groups, but of the difference: what makes a group easy for both
    ratios cancels. A t test with one degree of freedom less than groups.
    """
    hits, trials, other_hits, other_trials = (sum(each) for each in zip(*groups, strict=True))
    rate, other = hits / trials, other_hits / other_trials
    # hits * trials in integers, so that a group that differs as all others do contributes exactly none
    parts = [
        (h * trials - hits * t) / trials**2 - (oh * other_trials - other_hits * ot) / other_trials**2
        for h, t, oh, ot in groups
    ]
    found, difference, freedom = len(groups), rate - other, len(groups) - 1
    error = math.sqrt(found / freedom * math.fsum(part * part for part in parts)) if freedom else 0.0
    interval: Interval | None = None
    p = 1.0 if freedom and difference == 0 else None
    if error > 0:
        from scipy.special import stdtr  # see ``student_t``

        half = student_t(freedom) * error
        interval, p = (
            (difference - half, difference + half),
            2 * float(stdtr(freedom, -abs(difference) / error)),
        )
    return PairedRatio(
        num_groups=found, rate=rate, other_rate=other, difference=difference, interval=interval, p=p
    )


def holm(tests: Sequence[float | None]) -> list[float | None]:
    """Each p corrected for the number of ``tests`` by Holm's method (Scandinavian Journal of Statistics 6, 1979)."""
    known = sorted((p, at) for at, p in enumerate(tests) if p is not None)
    corrected: list[float | None] = [None] * len(tests)
    highest = 0.0
    for rank, (p, at) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[at] = highest
    return corrected
