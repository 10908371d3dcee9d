"""Intervals: against scipy and statsmodels where they have them, and by how often they cover the truth."""

import numpy as np
import pytest

from specgen.report.intervals import Ratio, student_t, wilson


@pytest.mark.parametrize(
    ("hits", "trials"), [(0, 12), (1, 12), (6, 12), (12, 12), (731, 1_000), (3, 100_000)]
)
def test_wilson_is_that_of_scipy_and_statsmodels(hits, trials):
    from scipy import stats
    from statsmodels.stats.proportion import proportion_confint

    found = wilson(hits / trials, trials)
    expected = stats.binomtest(hits, trials).proportion_ci(0.95, method="wilson")
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found == pytest.approx(proportion_confint(hits, trials, method="wilson"), abs=1e-12)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706205), (2, 4.302653), (3, 3.182446), (10, 2.228139), (500, 1.964720)]
)
def test_student_t_is_that_of_printed_tables(freedom, quantile):
    assert student_t(freedom) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize("freedom", [1, 2.5, 40])
@pytest.mark.parametrize("confidence", [0.8, 0.999])
def test_student_t_of_another_confidence_is_that_of_scipy(freedom, confidence):
    from scipy import stats

    assert student_t(freedom, confidence) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom))


def test_two_groups_have_the_quantile_of_one_degree_of_freedom():
    ratio = added([4, 8], [10, 10])
    low, high = ratio.mean_interval()
    assert (high - low) / 2 == pytest.approx(12.706205 * np.sqrt(ratio.variance()), rel=1e-6)


def test_rounding_keeps_a_share_within_its_bounds():
    assert all(wilson(1.0, trials)[1] <= 1 and wilson(0.0, trials)[0] >= 0 for trials in range(1, 200))


def test_the_variance_is_that_of_the_ratio_estimator():
    hits, trials = np.array([3, 9, 0, 14]), np.array([10, 12, 2, 20])
    ratio = added(hits, trials)
    residuals = hits - hits.sum() / trials.sum() * trials
    assert ratio.rate == pytest.approx(26 / 44)
    assert ratio.variance() == pytest.approx(4 / 3 * (residuals**2).sum() / trials.sum() ** 2)


def test_the_variance_is_the_robust_one_of_a_weighted_mean_in_statsmodels():
    from statsmodels.api import WLS

    random = np.random.default_rng(8)
    trials = random.integers(1, 60, 40)
    hits = random.binomial(trials, random.beta(4, 2, 40))
    ratio = added(hits, trials)
    mean = WLS(hits / trials, np.ones(40), weights=trials).fit(cov_type="HC1")
    assert ratio.rate == pytest.approx(mean.params[0])
    assert ratio.variance() == pytest.approx(mean.cov_params()[0, 0])


def test_one_group_gives_the_plain_wilson_interval_and_none_for_a_mean():
    ratio = added([7], [10])
    assert ratio.share_interval() == wilson(0.7, 10)
    assert ratio.mean_interval() is None


def test_intervals_have_a_degree_of_freedom_less_than_groups():
    from scipy import stats

    ratio = added([3, 9, 1, 14, 6, 2, 11, 7, 5, 12], [10, 12, 4, 20, 9, 8, 15, 11, 12, 14])
    t, error = stats.t.ppf(0.975, 9), np.sqrt(ratio.variance())
    assert ratio.mean_interval() == pytest.approx((ratio.rate - t * error, ratio.rate + t * error), rel=1e-9)
    trials = ratio.rate * (1 - ratio.rate) / error**2
    assert trials < ratio.trials
    effective = trials * (stats.norm.ppf(0.975) / t) ** 2
    assert ratio.share_interval() == pytest.approx(wilson(ratio.rate, effective), rel=1e-9)


def test_equal_groups_give_no_interval_of_the_mean():
    assert added([0, 0, 0], [5, 6, 7]).mean_interval() is None
    assert added([2, 3], [4, 6]).mean_interval() is None
    assert added([2, 4], [4, 6]).mean_interval() is not None


def test_nothing_gives_no_interval():
    ratio = added([0, 0], [0, 0])
    assert (ratio.groups, ratio.rate, ratio.share_interval(), ratio.mean_interval()) == (0, None, None, None)


@pytest.mark.parametrize("rate", [0, 1])
def test_a_rate_at_the_edge_keeps_a_width_inside_the_bounds(rate):
    low, high = added([20 * rate] * 5, [20] * 5).share_interval()
    assert 0 <= low <= rate <= high <= 1
    assert 0.01 < high - low < 0.2


@pytest.mark.parametrize("hits", [[5, 5] * 25, [4, 6] * 25])
def test_the_effective_sample_size_is_at_most_the_trials(hits):
    low, high = added(hits, [10] * 50).share_interval()
    plain_low, plain_high = wilson(0.5, 500)
    assert low <= plain_low
    assert high >= plain_high


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
    ratio = Ratio()
    for one_hits, one_trials in zip(hits, trials, strict=True):
        ratio.add(int(one_hits), int(one_trials))
    return ratio


def inside(value, interval):
    return interval[0] <= value <= interval[1]
