"""95 % intervals and paired tests: of ratios whose trials are correlated within groups, and of scores of samples."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Z = 1.959963984540054  # the normal quantile that leaves 2.5 % on either side
LEVEL = 0.05  # of a two-sided test
_ROUNDING = 8 * sys.float_info.epsilon  # of a score: it is a quotient or two, and a difference adds its own

Interval = tuple[float, float]


def student_t(freedom: float, confidence: float = 0.95) -> float:
    """The t quantile that leaves half of what ``confidence`` lacks on either side, for ``freedom`` > 0."""
    from scipy.special import stdtrit  # takes 0.3 s, and few commands need it

    return float(stdtrit(freedom, (1 + confidence) / 2))


def t_test(estimate: float, error: float, freedom: float) -> tuple[Interval, float]:
    """The 95 % t interval of ``estimate`` with the standard error ``error`` > 0, and its two-sided p against 0."""
    from scipy.special import stdtr  # see ``student_t``

    half = student_t(freedom) * error
    return (estimate - half, estimate + half), 2 * float(stdtr(freedom, -abs(estimate) / error))


def by_groups(
    estimate: float, parts: Sequence[float], noise: float = 0.0
) -> tuple[Interval | None, float | None]:
    """The 95 % t interval of ``estimate`` and its p against 0, by what each group adds to how far it is off.

    As in ``Ratio`` the variance is linearized over groups: of ``parts``, which add up to 0. Without a spread beyond
    ``noise``, what rounding explains, there is no test; then p is 1 of an estimate that is none either. Both are None
    with fewer than two groups.
    """
    found = len(parts)
    if found < 2:
        return None, None
    error = math.sqrt(found / (found - 1) * math.fsum(part * part for part in parts))
    if error <= noise:
        return None, 1.0 if abs(estimate) <= noise else None
    return t_test(estimate, error, found - 1)


def wilson(share: float, trials: float) -> Interval:
    """Wilson's score interval (JASA 22, 1927) for ``trials`` > 0, which need not be whole as in scipy."""
    weight = Z * Z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight * weight / 4) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


class Ratio:
    """Sum of ``hits`` over sum of ``trials``, both ``[groups]``; a group without trials carries no information.

    Steps of a conversation are correlated, conversations independent. The variance is that of the ratio estimator,
    linearized over groups (Cochran, Sampling Techniques, 3rd ed. 1977, chapter 6):
    ``n/(n-1) * sum((hits - rate*trials)^2) / sum(trials)^2``.
    """

    def __init__(self, hits: "NDArray[np.int64]", trials: "NDArray[np.int64]") -> None:
        self.groups, self.hits, self.trials = int((trials > 0).sum()), int(hits.sum()), int(trials.sum())
        # integers, so there is no cancellation
        self._squares = int(hits @ hits), int(hits @ trials), int(trials @ trials)

    @property
    def rate(self) -> float | None:
        """Hits per trial; None without trials."""
        return self.hits / self.trials if self.trials else None

    @property
    def estimate(self) -> "Estimate | None":
        """A rate in [0, 1] with its interval; None without trials."""
        return None if self.rate is None else Estimate(self.rate, self.share_interval())

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
        return t_test(self.rate, math.sqrt(variance), self.groups - 1)[0]


def clustered_mean(
    groups: Sequence[Sequence[float]], largest: float = 0.0
) -> tuple[Interval | None, float | None]:
    """``by_groups`` of the mean of all values; those of one group are correlated, groups independent.

    ``largest`` is that of the numbers that the values were computed from, whose rounding is no spread.
    """
    total = sum(map(len, groups))
    mean = math.fsum(value for group in groups for value in group) / total if total else 0.0
    parts = [(math.fsum(group) - mean * len(group)) / total for group in groups]
    return by_groups(mean, parts, _ROUNDING * max(abs(mean), largest))


class Estimate(NamedTuple):
    """A number with its interval, None without a spread: of 95 %, unless it is said to be another."""

    value: float
    interval: Interval | None


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


def paired_ratio(groups: Sequence[Sequence[int]]) -> PairedRatio:
    """Compare two ratios over ``(hits, trials, other hits, other trials)`` per group, with trials in both.

    The variance is that of the difference: what makes a group easy for both ratios cancels.
    """
    hits, trials, other_hits, other_trials = (sum(each) for each in zip(*groups, strict=True))
    rate, other = hits / trials, other_hits / other_trials
    # hits * trials in integers, so that a group that differs as all others do contributes exactly none
    parts = [
        (h * trials - hits * t) / trials**2 - (oh * other_trials - other_hits * ot) / other_trials**2
        for h, t, oh, ot in groups
    ]
    difference = rate - other
    interval, p = by_groups(difference, parts)
    return PairedRatio(
        num_groups=len(groups), rate=rate, other_rate=other, difference=difference, interval=interval, p=p
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


# --- scores of samples ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairedScores:
    """The scores of one arm minus those of another on the same samples, as fractions of the full score.

    In the t test ``interval`` and ``p`` are None for fewer than two samples and where all differences are equal up to
    rounding, as without a spread there is no test; where all are 0, ``p`` is 1.
    """

    num_samples: int
    mean: float
    other_mean: float
    difference: float
    interval: Interval | None  # 95 %
    p: float | None
    higher: int  # samples that score higher than in the other arm
    lower: int


def paired_scores(scores: Sequence[float], others: Sequence[float]) -> PairedScores:
    """Compare ``scores`` with ``others``, both ``[samples]`` in [0, 1] in the same order and not empty.

    Scores of 0 and 1 give McNemar's exact p and Tango's interval; others the paired t test.
    """
    assert len(scores) == len(others) > 0
    higher = sum(a > b for a, b in zip(scores, others, strict=True))
    lower = sum(a < b for a, b in zip(scores, others, strict=True))
    if all(score in (0, 1) for score in (*scores, *others)):
        interval: Interval | None = tango(higher, lower, len(scores))
        p: float | None = mcnemar(higher, lower)
    else:
        differences = [[a - b] for a, b in zip(scores, others, strict=True)]
        interval, p = clustered_mean(differences, max(map(abs, (*scores, *others))))
    return PairedScores(
        num_samples=len(scores),
        mean=fmean(scores),
        other_mean=fmean(others),
        difference=fmean(scores) - fmean(others),
        interval=interval,
        p=p,
        higher=higher,
        lower=lower,
    )


def scores_interval(scores: Sequence[float]) -> Interval | None:
    """The 95 % interval of one arm's mean of scores in [0, 1]: Wilson's for 0 and 1, else the t interval, cut there."""
    if all(score in (0, 1) for score in scores):
        return wilson(fmean(scores), len(scores)) if scores else None
    interval, _ = clustered_mean([[score] for score in scores], max(map(abs, scores)))
    return None if interval is None else (max(interval[0], 0.0), min(interval[1], 1.0))


def mcnemar(higher: int, lower: int) -> float:
    """The two-sided p of the exact conditional McNemar test (Psychometrika 12, 1947)."""
    from scipy.stats import binomtest

    return float(binomtest(higher, higher + lower).pvalue) if higher + lower else 1.0


def tango(higher: int, lower: int, num: int) -> Interval:
    """Tango's 95 % score interval of a paired difference (Statistics in Medicine 17, 1998), ``num`` > 0 samples.

    It keeps its level with few discordant pairs and a width with none; it contains 0 exactly where McNemar's score
    test does not reject at 5 %.
    """
    found = (higher - lower) / num

    def inside(difference: float) -> bool:
        return abs(_score(difference, higher, lower, num)) <= Z

    return _boundary(inside, found, -1.0), _boundary(inside, found, 1.0)


def _score(difference: float, higher: int, lower: int, num: int) -> float:
    """Tango's statistic: observed minus ``difference``, in standard errors under ``difference``."""
    distance = higher - lower - num * difference
    linear = (2 * num - higher + lower) * difference - higher - lower
    constant = -lower * difference * (1 - difference)
    # the maximum-likelihood share of samples that score lower, given the difference
    root = math.sqrt(max(0.0, linear * linear - 8 * num * constant))
    share = max(0.0, (root - linear) / (4 * num))
    spread = num * (2 * share + difference * (1 - difference))
    if spread <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(spread)


def _boundary(inside: Callable[[float], bool], start: float, stop: float) -> float:
    """Where ``inside``, true at ``start``, becomes false on the way to ``stop``, or ``stop``; by bisection."""
    if inside(stop):
        return stop
    for _ in range(50):
        middle = (start + stop) / 2
        start, stop = (middle, stop) if inside(middle) else (start, middle)
    return (start + stop) / 2
