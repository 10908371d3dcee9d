"""Paired comparison of scores: exact McNemar or paired t test, 95 % intervals, detectable differences."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from specgen.report.intervals import Interval, Z, wilson

LEVEL = 0.05  # of a two-sided test
POWER = 0.8
_ROUNDING = 8 * sys.float_info.epsilon  # of a score: it is a quotient or two, and a difference adds its own


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The scores of one arm minus those of another on the same samples, as fractions of the full score.

    In the t test ``interval`` and ``p`` are None for fewer than two samples and where all differences are equal up to
    rounding, as without a spread there is no test; where all are 0, ``p`` is 1. ``detectable`` is the smallest true
    difference that a test at the given level detects with 80 % power; None if these samples cannot detect any.
    """

    num_samples: int
    mean: float
    other_mean: float
    difference: float
    interval: Interval | None  # 95 %
    p: float | None
    detectable: float | None
    higher: int  # samples that score higher than in the other arm
    lower: int


def paired(scores: Sequence[float], others: Sequence[float], *, level: float = LEVEL) -> Paired:
    """Compare ``scores`` with ``others``, both ``[samples]`` in [0, 1] in the same order and not empty.

    Scores of 0 and 1 give McNemar's exact p and Tango's interval; others the paired t test.
    """
    assert len(scores) == len(others) > 0
    higher = sum(a > b for a, b in zip(scores, others, strict=True))
    lower = sum(a < b for a, b in zip(scores, others, strict=True))
    if all(score in (0, 1) for score in (*scores, *others)):
        interval: Interval | None = tango(higher, lower, len(scores))
        p: float | None = mcnemar(higher, lower)
        detectable = detectable_share(higher + lower, len(scores), level)
    else:
        differences = [a - b for a, b in zip(scores, others, strict=True)]
        interval, p, detectable = _by_t(differences, level, max(map(abs, (*scores, *others))))
    return Paired(
        num_samples=len(scores),
        mean=fmean(scores),
        other_mean=fmean(others),
        difference=fmean(scores) - fmean(others),
        interval=interval,
        p=p,
        detectable=detectable,
        higher=higher,
        lower=lower,
    )


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """The 95 % interval of one arm's mean: Wilson's for scores of 0 and 1, else the t interval."""
    if all(score in (0, 1) for score in scores):
        return wilson(fmean(scores), len(scores)) if scores else None
    return _by_t(scores, LEVEL, max(map(abs, scores)))[0]


# --- scores of 0 and 1 ----------------------------------------------------------------------------


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


def detectable_share(discordant: int, num: int, level: float) -> float | None:
    """The smallest difference of shares that ``num`` pairs detect at ``level`` with 80 % power, or None.

    Connor's formula (Biometrics 43, 1987) with a continuity correction, as the exact test is conservative, at the
    observed share of discordant pairs or at the difference itself if that is larger.
    """
    z, z_power = NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(POWER)

    def missed(difference: float) -> bool:
        share = max(discordant / num, difference)
        noise = z * math.sqrt(share) + z_power * math.sqrt(share - difference**2)
        return num * difference - 1 < math.sqrt(num) * noise

    return None if missed(1.0) else _boundary(missed, 0.0, 1.0)


def _boundary(inside: Callable[[float], bool], start: float, stop: float) -> float:
    """Where ``inside``, true at ``start``, becomes false on the way to ``stop``, or ``stop``; by bisection."""
    if inside(stop):
        return stop
    for _ in range(50):
        middle = (start + stop) / 2
        start, stop = (middle, stop) if inside(middle) else (start, middle)
    return (start + stop) / 2


# --- other scores ---------------------------------------------------------------------------------


def _by_t(
    values: Sequence[float], level: float, largest: float
) -> tuple[Interval | None, float | None, float | None]:
    """The 95 % interval of the mean of ``values``, its p against 0, and the mean detectable with 80 % power.

    ``largest`` is that of the numbers that ``values`` were computed from: what its rounding explains is no spread.
    """
    if len(values) < 2:
        return None, None, None
    if max(values) - min(values) <= _ROUNDING * largest:
        return None, 1.0 if abs(values[0]) <= _ROUNDING * largest else None, None
    from scipy.stats import ttest_1samp

    error = math.sqrt(variance(values) / len(values))
    test = ttest_1samp(values, 0)
    interval = test.confidence_interval(0.95)
    detectable = (NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(POWER)) * error
    return (float(interval.low), float(interval.high)), float(test.pvalue), detectable
