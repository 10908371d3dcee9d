"""Paired differences, and the intervals of rates and means."""

import math

import numpy as np
import pytest

from specgen.report.intervals import Ratio, mcnemar, paired_scores, scores_interval, student_t, tango, wilson


@pytest.mark.parametrize(
    ("hits", "trials"), [(0, 12), (1, 12), (6, 12), (12, 12), (731, 1_000), (3, 100_000)]
)
def test_wilson_is_that_of_scipy(hits, trials):
    from scipy import stats

    expected = stats.binomtest(hits, trials).proportion_ci(0.95, method="wilson")
    assert wilson(hits / trials, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("freedom", [1, 2.5, 40])
@pytest.mark.parametrize("confidence", [0.8, 0.999])
def test_student_t_of_another_confidence_is_that_of_scipy(freedom, confidence):
    from scipy import stats

    assert student_t(freedom, confidence) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom))


def test_the_variance_is_the_robust_one_of_a_weighted_mean_in_statsmodels():
    from statsmodels.api import WLS

    random = np.random.default_rng(8)
    trials = random.integers(1, 60, 40)
    hits = random.binomial(trials, random.beta(4, 2, 40))
    ratio = added(hits, trials)
    mean = WLS(hits / trials, np.ones(40), weights=trials).fit(cov_type="HC1")
    assert ratio.rate == pytest.approx(mean.params[0])
    assert ratio.variance() == pytest.approx(mean.cov_params()[0, 0])


@pytest.mark.parametrize(
    ("hits", "trials", "share", "has_mean"),
    [
        ([7], [10], wilson(0.7, 10), False),  # one group: the plain interval
        ([0, 0], [0, 0], None, False),
        ([0, 0, 0], [5, 6, 7], ..., False),
        ([2, 3], [4, 6], ..., False),
        ([2, 4], [4, 6], ..., True),
    ],
)
def test_groups_without_a_spread_have_no_interval_of_the_mean(hits, trials, share, has_mean):
    ratio = added(hits, trials)
    assert (ratio.mean_interval() is not None) == has_mean
    assert share in (..., ratio.share_interval())
    assert (ratio.groups, ratio.rate) == (
        (0, None) if share is None else (len(hits), sum(hits) / sum(trials))
    )


def test_the_effective_sample_size_is_at_most_the_trials_and_at_the_edge_a_width_stays():
    for hits in ([5, 5] * 25, [4, 6] * 25):
        (low, high), plain = added(hits, [10] * 50).share_interval(), wilson(0.5, 500)
        assert low <= plain[0] < plain[1] <= high
    for rate in (0, 1):
        low, high = added([20 * rate] * 5, [20] * 5).share_interval()
        assert 0 <= low <= rate <= high <= 1
        assert 0.01 < high - low < 0.2
    assert all(wilson(1.0, trials)[1] <= 1 and wilson(0.0, trials)[0] >= 0 for trials in range(1, 200))


def test_intervals_have_a_degree_of_freedom_less_than_groups():
    from scipy import stats

    ratio = added([3, 9, 1, 14, 6, 2, 11, 7, 5, 12], [10, 12, 4, 20, 9, 8, 15, 11, 12, 14])
    t, error = stats.t.ppf(0.975, 9), np.sqrt(ratio.variance())
    assert ratio.mean_interval() == pytest.approx((ratio.rate - t * error, ratio.rate + t * error), rel=1e-9)
    trials = ratio.rate * (1 - ratio.rate) / error**2
    assert trials < ratio.trials
    effective = trials * (stats.norm.ppf(0.975) / t) ** 2
    assert ratio.share_interval() == pytest.approx(wilson(ratio.rate, effective), rel=1e-9)


@pytest.mark.parametrize("groups", [6, 30])
@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_the_intervals_cover_correlated_steps_where_plain_wilson_does_not(groups, rate):
    random = np.random.default_rng(groups)
    rounds, covered, mean_covered, plainly_covered = 600, 0, 0, 0
    for _ in range(rounds):
        trials = random.integers(5, 60, groups)
        hits = random.binomial(trials, random.beta(20 * rate, 20 * (1 - rate), groups))
        ratio = added(hits, trials)
        covered += inside(rate, ratio.share_interval())
        mean_covered += inside(rate, ratio.mean_interval())
        plainly_covered += inside(rate, wilson(ratio.rate, ratio.trials))
    assert 0.92 <= covered / rounds <= 0.99
    assert 0.90 <= mean_covered / rounds <= 0.98
    assert plainly_covered / rounds < 0.85


def added(hits, trials):
    return Ratio(np.array(hits, np.int64), np.array(trials, np.int64))


def inside(value, interval):
    return interval[0] <= value <= interval[1]


CELLS = [(0, 0, 20), (0, 1, 44), (6, 0, 50), (9, 2, 30), (150, 86, 1_600), (3, 40, 43), (7, 7, 1_319)]


@pytest.mark.parametrize(("higher", "lower", "num"), CELLS)
def test_mcnemar_is_that_of_statsmodels(higher, lower, num):
    from statsmodels.stats.contingency_tables import mcnemar as theirs

    arms = [[num - higher - lower, higher], [lower, 0]]  # right and wrong answers against each other
    assert mcnemar(higher, lower) == pytest.approx(theirs(arms, exact=True).pvalue, rel=1e-9)


@pytest.mark.parametrize(("higher", "lower", "num"), [*CELLS, (0, 0, 1), (1, 0, 2), (1, 1, 3), (0, 11, 30)])
def test_the_ends_of_the_interval_are_where_the_score_test_rejects(higher, lower, num):
    low, high = tango(higher, lower, num)
    for end in (low, high):
        assert abs(score_by_search(end, higher, lower, num)) == pytest.approx(1.959964, rel=1e-3)
    assert -1 < low < (higher - lower) / num < high < 1


@pytest.mark.parametrize(("higher", "lower"), [(12, 0), (0, 12)])
def test_the_interval_of_opposite_arms_ends_at_the_bound(higher, lower):
    low, high = tango(higher, lower, 12)
    assert max(-low, high) == pytest.approx(1)
    assert high - low < 0.6


@pytest.mark.parametrize("num", [2, 3, 4, 10, 400])
@pytest.mark.parametrize("shift", [0, 0.1, -0.4])
def test_fractional_scores_take_the_paired_t_test(num, shift):
    from scipy import stats

    scores, others = np.random.default_rng(num).uniform(0, 0.5, (2, num))
    scores += shift
    result, expected = paired_scores(scores.tolist(), others.tolist()), stats.ttest_rel(scores, others)
    assert result.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert result.interval == pytest.approx(expected.confidence_interval(0.95), rel=1e-9)
    scores, others = [1, 0, 1, 1, 0.5, 0], [0, 0, 1, 0, 1, 0]  # one is enough
    assert paired_scores(scores, others).p == pytest.approx(stats.ttest_rel(scores, others).pvalue)


def test_scores_of_0_and_1_take_mcnemar():
    result = paired_scores([1, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1])
    assert (result.higher, result.lower, result.num_samples) == (2, 1, 6)
    assert (result.mean, result.other_mean, result.difference) == pytest.approx((4 / 6, 3 / 6, 1 / 6))
    assert (result.p, result.interval) == (1, tango(2, 1, 6))


@pytest.mark.parametrize(
    ("scores", "others", "p"),
    [
        ([0.5], [0.4], None),
        ([0.5, 0.5], [0.5, 0.5], 1.0),
        ([0.7, 0.7], [0.5, 0.5], None),
        ([0.5, 0.6], [0.4, 0.5], None),  # of which one is 0.1 less a rounding
        ([0.7, 0.8, 0.9, 1.0], [0.6, 0.7, 0.8, 0.9], None),
        ([0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2], 1.0),  # the same scores, added in another order
    ],
)
def test_differences_that_are_all_alike_are_not_tested(scores, others, p):
    result = paired_scores(scores, others)
    assert (result.p, result.interval) == (p, None)


@pytest.mark.parametrize("least", [1e-3, 1e-9, 1e-13])
def test_differences_that_differ_by_more_than_rounding_are(least):
    from scipy import stats

    scores, others = [0.5, 0.625, 0.75 + least], [0.25, 0.375, 0.5]
    result = paired_scores(scores, others)
    expected = stats.ttest_rel(scores, others).pvalue
    assert result.p == pytest.approx(expected, rel=1e-5, abs=0)
    assert expected < 1e-4
    assert result.interval[0] < 0.25 + least / 3 < result.interval[1]


def test_the_interval_of_one_arm():
    from scipy import stats
    from statsmodels.stats.proportion import proportion_confint

    scores = [0.2, 0.7, 0.4, 0.4, 0.6]
    assert scores_interval([1, 1, 0, 1]) == pytest.approx(proportion_confint(3, 4, method="wilson"))
    expected = stats.ttest_1samp(scores, 0).confidence_interval(0.95)
    assert scores_interval(scores) == pytest.approx(expected, rel=5e-3)
    assert scores_interval([0.1 + 0.2, 0.3, 0.3]) is None, "all alike"
    low, high = scores_interval([0.0] * 11 + [0.2])
    assert low == 0.0 < high < 1.0, "no score is below 0, as the t interval would be"


def score_by_search(difference, higher, lower, num):
    """Tango's statistic with the maximum-likelihood discordant share found by search instead of its closed form."""
    from scipy import optimize

    least = max(0.0, -difference)
    most = (1 - difference) / 2

    def unlikely(share):
        same = max(num - higher - lower, 0)
        chances = (share + difference, share, 1 - 2 * share - difference)
        return -sum(
            n * math.log(max(c, 1e-300)) for n, c in zip((higher, lower, same), chances, strict=True) if n
        )

    found = optimize.minimize_scalar(
        unlikely, bounds=(least, most), method="bounded", options={"xatol": 1e-12}
    )
    share = min((found.x, least, most), key=unlikely)
    return (higher - lower - num * difference) / math.sqrt(num * (2 * share + difference - difference**2))
