"""95 % intervals for ratios of counts whose trials come in correlated groups."""

import math

Z = 1.959963984540054  # the normal quantile that leaves 2.5 % on either side

Interval = tuple[float, float]


def student_t(freedom: float) -> float:
    """The t quantile that leaves 2.5 % on either side, for ``freedom`` >= 1 degrees of freedom."""
    from scipy.special import stdtrit  # 0.3 s, and not every command prints an interval

    return float(stdtrit(freedom, 0.975))


def wilson(share: float, trials: float) -> Interval:
    """The score interval of Wilson (JASA 22, 1927) for a share in ``trials`` > 0; scipy's takes whole ones alone."""
    weight = Z * Z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight * weight / 4) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


class Ratio:
    """Sum of hits over sum of trials, added up group by group in constant memory.

    The steps of one request resemble each other, so they are not independent trials; requests are. The
    variance is that of the ratio estimator, linearized over the groups (Cochran, Sampling Techniques, 3rd
    ed. 1977, chapter 6): ``n/(n-1) * sum((hits - rate*trials)^2) / sum(trials)^2``.
    """

    def __init__(self) -> None:
        self.groups = 0
        self.hits = 0
        self.trials = 0
        # sums of hits*hits, hits*trials, trials*trials; integers, so nothing cancels
        self._squares = (0, 0, 0)

    def add(self, hits: int, trials: int) -> None:
        """Count one group; a group without trials says nothing and is left out."""
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

        Wilson's interval; in place of the trials stands the number of independent ones that would vary as
        the groups do, never above the trials and scaled for the degrees of freedom (the effective sample
        of Korn and Graubard, Survey Methodology 24, 1998). So it stays in [0, 1] and keeps a width at 0
        and at 1. With one group it is plain Wilson: the correlation within the group cannot be seen, and
        the interval is too narrow by it.
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
        """The 95 % interval of a rate without bounds, by the t distribution; None where no groups differ."""
        if self.rate is None or self.groups < 2 or (variance := self.variance()) == 0:
            return None
        half = student_t(self.groups - 1) * math.sqrt(variance)
        return self.rate - half, self.rate + half
