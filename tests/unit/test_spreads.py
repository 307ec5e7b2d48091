"""Spreads of losses over seeds, against SciPy's tests, NumPy and simulated losses."""

import math

import numpy as np
import pytest
from scipy import stats

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.contest import compare_pairs, draw_losses
from smallgpt_jax.analysis.spreads import VariancePrior

NOTHING = VariancePrior(variance=0.0, degrees=0.0, total_degrees=100.0)  # a prior that says nothing
UNKNOWN = [None] * 10  # losses of repeats that were not logged


def correlated_losses(models: int, orders: int, correlation: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shared, own = rng.standard_normal(orders), rng.standard_normal((models, orders))
    return math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own


# ------------------------------------------------------------------ the prior
def test_a_variance_is_drawn_towards_the_typical_one_by_its_degrees_of_freedom():
    prior = VariancePrior(variance=1.0, degrees=4.0, total_degrees=20.0)
    variances, degrees = prior.shrink(np.array([4.0, 0.25]), np.array([2, 4]))
    np.testing.assert_allclose(variances, [(2 * 4 + 4 * 1) / 6, (4 * 0.25 + 4 * 1) / 8])
    np.testing.assert_allclose(degrees, [6, 8])


def test_no_variance_is_known_better_than_by_all_samples_together():
    prior = VariancePrior(variance=1.0, degrees=math.inf, total_degrees=6.0)
    variances, degrees = prior.shrink(np.array([4.0, 1.0]), np.array([2, 2]))
    np.testing.assert_allclose(variances, [(6 * 1 + 2 * 4) / 8, 1.0])
    np.testing.assert_allclose(degrees, [6, 6])


def test_without_a_sample_the_widest_spread_counts():
    prior = VariancePrior(variance=1.0, degrees=2.0, total_degrees=20.0)
    variances, degrees = prior.shrink(np.array([0.0, 9.0, 1.0]), np.array([0, 2, 6]))
    assert variances[0] == variances[1] == 5.0
    assert degrees[0] == 4.0


def test_equal_variances_are_pooled():
    variances = 4 * np.random.default_rng(1).chisquare(2, 2000) / 2
    prior = spreads.fit_variance_prior(variances, np.full(2000, 2))
    assert prior.degrees > 100
    assert prior.variance == pytest.approx(4, rel=0.1)


def test_the_prior_of_unequal_variances_is_recovered():
    """Variances that are drawn from the prior with 6 degrees of freedom, seen by samples of 3."""
    rng = np.random.default_rng(2)
    true = 4 * 6 / rng.chisquare(6, 20_000)
    prior = spreads.fit_variance_prior(true * rng.chisquare(2, 20_000) / 2, np.full(20_000, 2))
    assert prior.degrees == pytest.approx(6, rel=0.1)
    assert prior.variance == pytest.approx(4, rel=0.05)


def test_of_two_seeds_no_difference_is_taken_to_vary_less_than_the_mean():
    losses = np.array([[3.0, 3.2], [3.1, 3.3], [3.5, 3.0]])  # differences vary by 0, 0.245, 0.245
    prior = spreads.variance_prior_of([losses], total_degrees=2)
    assert prior.least == pytest.approx(0.245 * 2 / 3)
    assert spreads.estimate(losses, prior).variances[0, 1] >= prior.least
    three = np.array([[3.0, 3.2, 3.1], [3.1, 3.3, 3.2], [3.5, 3.0, 3.1]])
    assert spreads.variance_prior_of([three], total_degrees=4).least == 0


def test_where_losses_split_into_modes_the_mean_variance_is_the_least():
    """Of eight models, five have a seed that is far from the other two."""
    rng = np.random.default_rng(3)
    losses = 3 + 1e-3 * rng.standard_normal((8, 3))
    losses[:5, 0] -= 0.5
    assert spreads.variance_prior_of([losses], total_degrees=14).least > 0.01
    assert spreads.variance_prior_of([losses[5:]], total_degrees=4).least == 0


# ------------------------------------------------------------------ differences
def test_a_difference_has_the_paired_t_test():
    losses = np.array([[3.1, 3.5, 3.2, 3.3], [2.9, 3.2, 3.1, 3.0]])
    difference = spreads.estimate(losses, NOTHING).difference(0, 1)
    paired = stats.ttest_rel(losses[0], losses[1])
    assert difference.mean == pytest.approx(losses[0].mean() - losses[1].mean())
    low, high = paired.confidence_interval(0.95)
    assert difference.half_width(0.95) == pytest.approx((high - low) / 2)
    assert difference.common_orders == 4


def test_only_common_orders_tell_how_much_a_difference_varies():
    losses = np.array([[3.1, 3.5, 3.2, 9.0], [2.9, 3.2, 3.1, math.nan]])
    difference = spreads.estimate(losses, NOTHING).difference(0, 1)
    assert difference.common_orders == 3
    assert difference.variance == pytest.approx(np.var([0.2, 0.3, 0.1], ddof=1))


def test_models_without_a_common_order_have_the_error_of_both():
    losses = np.array([[3.1, 3.5, math.nan, math.nan], [math.nan, math.nan, 3.0, 3.2]])
    difference = spreads.estimate(losses, VariancePrior(1e-6, 4.0, 100.0)).difference(0, 1)
    own = [(2 * 4 * 0.5e-6 / 2 + 0.08) / 5, (2 * 4 * 0.5e-6 / 2 + 0.02) / 5]
    assert difference.error == pytest.approx(math.sqrt(own[0] / 2 + own[1] / 2), rel=1e-3)


def test_a_spread_that_is_unknown_decides_nothing():
    difference = spreads.estimate(np.array([[3.0], [4.0]]), VariancePrior(0, 0, 0)).difference(0, 1)
    assert difference.half_width(0.8) == math.inf


def test_correlation_is_estimated_but_not_from_two_orders():
    assert spreads.correlation(correlated_losses(8, 200, 0.6)) == pytest.approx(0.6, abs=0.08)
    assert spreads.correlation(np.array([[1.0, 2.0], [3.0, 5.0]])) == 0.99


def test_a_seed_that_only_one_model_has_makes_no_difference():
    """Two models that differ by nothing but orders: one has a third, which was lucky."""
    losses = np.array([[3.0, 3.02, 2.92], [3.0005, 3.0195, math.nan]])
    difference = spreads.estimate(losses, NOTHING).difference(1, 0)
    assert difference.mean == pytest.approx(difference.paired, abs=2e-3)


@pytest.mark.parametrize("counts", [(3, 2, 2), (10, 2, 2)])
def test_unequal_numbers_of_seeds_rarely_tell_equal_models_apart(counts):
    """The order of the batches moves all losses by 0.05, the rest by 0.01."""
    rng = np.random.default_rng(6)
    false = 0
    for _ in range(100):
        losses = 3 + 0.05 * rng.standard_normal(max(counts))
        losses = losses + 0.01 * rng.standard_normal((len(counts), max(counts)))
        for of_model, count in zip(losses, counts):
            of_model[count:] = math.nan
        estimate = spreads.estimate_alone(losses)
        pairs = compare_pairs(("a", "b", "c"), estimate, draw_losses(estimate))
        false += any(pair.is_decided for pair in pairs)
    assert false <= 15  # of three pairs at 5% each


def test_expected_losses_are_means_if_all_have_read_the_same_orders():
    losses = correlated_losses(4, 6, 0.9)
    np.testing.assert_allclose(spreads.expected_losses(losses, 0.9), losses.mean(1))


def test_a_model_with_two_bad_orders_is_judged_as_if_it_had_read_all():
    """The orders 0 and 1 raise all losses by 0.5; the third model, as good as the others, has read
    only these.
    """
    effects = np.array([0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0])
    losses = 3 + effects + 0.01 * np.random.default_rng(4).standard_normal((3, 10))
    losses[2, 2:] = math.nan
    means = spreads.estimate(losses, NOTHING).means
    assert np.nanmean(losses[2]) - np.nanmean(losses[0]) > 0.35
    assert abs(means[2] - means[0]) < 0.05


def test_own_variances_add_up_to_those_of_differences():
    deviations = np.array([1e-3, 1e-3, 2.0, 20.0])
    rng = np.random.default_rng(5)
    losses = deviations[:, None] * rng.standard_normal((4, 20_000)) + rng.standard_normal(20_000)
    estimate = spreads.estimate(losses, VariancePrior(0.0, 0.0, 1e9))
    np.testing.assert_allclose(np.sqrt(estimate.own_variances), deviations, rtol=0.03)
    np.testing.assert_allclose(np.sqrt(estimate.own_errors), deviations / 20_000**0.5, rtol=0.03)
    np.testing.assert_allclose(estimate.own_degrees, 19_999)


# ------------------------------------------------------------------ modes
def test_a_split_is_described_by_shares_and_losses():
    losses = [3.21, 3.94, 3.22, 3.93, 3.2]
    low, high = spreads.modes(losses, UNKNOWN[:5])
    assert (low.share, low.runs) == (pytest.approx(3 / 5), 3)
    assert low.loss == pytest.approx(3.21)
    assert (high.runs, high.loss) == (2, pytest.approx(3.935))


def test_three_seeds_show_a_split_only_by_an_extreme_gap():
    assert spreads.modes([3.2, 3.21, 3.9], UNKNOWN[:3]) == ()
    assert spreads.modes([3.2, 3.2001, 3.9], UNKNOWN[:3]) != ()


def test_normal_losses_rarely_split():
    rng = np.random.default_rng(0)
    for count in (3, 5, 10):
        splits = [
            bool(spreads.modes(list(rng.standard_normal(count)), UNKNOWN[:count]))
            for _ in range(500)
        ]
        assert np.mean(splits) < 0.025  # 1% expected


def test_the_loss_of_repeats_tells_who_copies():
    """Where it was logged, it decides: the first two seeds have learned to copy."""
    losses, repeats = [3.2, 3.3, 3.4], [1.2, 1.4, 3.5]
    low, high = spreads.modes(losses, repeats)
    assert (low.runs, low.loss, high.runs, high.loss) == (2, pytest.approx(3.25), 1, 3.4)
    assert spreads.modes([3.2, 3.2001, 3.9], [3.5, 3.4, 3.6]) == ()


@pytest.mark.parametrize("losses", [[3.2, 3.9], [3.2, 3.2001, math.inf], [3.2, 3.2, 3.2 + 1e-7]])
def test_no_modes_of_few_diverged_or_equal_runs(losses):
    assert spreads.modes(losses, UNKNOWN[: len(losses)]) == ()
