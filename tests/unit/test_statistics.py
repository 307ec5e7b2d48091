"""Tests of paired comparisons over seeds, on made-up losses with known answers and on seeded
simulations.
"""

import math

import numpy as np
import pytest
from scipy import special, stats

from smallgpt_jax.comparison import statistics

DRAWS = 2000


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(values))


def test_a_paired_difference_by_hand():
    """The differences are 0.1, 0.2 and 0.3; t(0.975, 2) is 4.3027. Seed 3 has no partner."""
    a, b = by_seed([3.1, 3.4, 3.2]), by_seed([3.0, 3.2, 2.9, 1.0])
    (row,) = statistics.compare_pairs({"a": a, "b": b}, [("a", "b")])
    assert (row.name, row.other, row.seeds) == ("a", "b", 3)
    assert row.mean == pytest.approx(0.2) and row.deviation == pytest.approx(0.1)
    assert row.half_width == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert row.p_value == pytest.approx(stats.ttest_rel([3.1, 3.4, 3.2], [3.0, 3.2, 2.9]).pvalue)
    assert row.p_value > 0.05 and row.verdict == "not distinguishable" and row.seeds_needed == 5
    # The same mean over five seeds is significant. The verdict has the sign of the difference.
    losses = {"a": by_seed([3.1, 3.4, 3.2, 3.3, 3.1]), "b": by_seed([3.0, 3.2, 2.9, 3.1, 2.9])}
    (higher,) = statistics.compare_pairs(losses, [("a", "b")])
    (lower,) = statistics.compare_pairs(losses, [("b", "a")])
    assert (higher.verdict, lower.verdict) == ("higher", "lower") and higher.mean == -lower.mean


@pytest.mark.parametrize(
    "seeds, others, count", [([1], [1], 1), ([1], [2], 0), ([1, 2], [2, 3], 1)]
)
def test_fewer_than_two_common_seeds_give_no_interval(seeds, others, count):
    losses = {"a": dict.fromkeys(seeds, 3.0), "b": dict.fromkeys(others, 2.0)}
    (row,) = statistics.compare_pairs(losses, [("a", "b")])
    assert (row.seeds, row.half_width, row.p_value, row.seeds_needed, row.verdict) == (
        count,
        None,
        None,
        None,
        "no interval",
    )
    assert row.mean == (1.0 if count else None)


def test_equal_losses_are_not_distinguishable():
    losses = {"a": by_seed([3.0, 3.5]), "b": by_seed([3.0, 3.5])}
    (row,) = statistics.compare_pairs(losses, [("a", "b")])
    assert (row.mean, row.half_width, row.p_value, row.verdict, row.seeds_needed) == (
        0.0,
        0.0,
        1.0,
        "not distinguishable",
        None,
    )


def test_holms_correction():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0] and statistics.holm([]) == []
    # A family of one is not corrected; pairs without an interval do not count.
    losses = {"a": by_seed([1, 2, 3.5]), "b": by_seed([0, 1, 2]), "c": by_seed([4])}
    (alone,) = statistics.compare_pairs(losses, [("a", "b")])
    first, second = statistics.compare_pairs(losses, [("a", "b"), ("a", "c")])
    assert first == alone and (second.p_value, second.comparisons) == (None, 1)
    losses["c"] = by_seed([0, 3, 1])
    assert statistics.compare_pairs(losses, [("a", "b"), ("a", "c")])[0].p_value == pytest.approx(
        2 * alone.p_value
    )


@pytest.mark.parametrize("effect, seeds", [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed(effect, seeds):
    """These are the published sample sizes of the paired t-test at 80% power and a level of 5%
    (Cohen 1988).
    """
    assert statistics.seeds_needed(-0.01 * effect, 0.01) == seeds
    assert statistics.seeds_needed(0.01 * effect, 0.01, level=0.05 / 6) > seeds
    assert statistics.seeds_needed(0.02 * effect, 0.01) < seeds


def test_seeds_needed_without_spread_or_difference():
    assert statistics.seeds_needed(0.1, 0.0) == 2 == statistics.seeds_needed(1e9, 1.0)
    assert statistics.seeds_needed(0.0, 0.1) is None and statistics.seeds_needed(1e-9, 1.0) is None


def test_a_simulation_has_the_power_of_the_seeds_needed():
    rng, count = np.random.default_rng(1), statistics.seeds_needed(0.7, 1.0)
    samples = rng.normal(0.7, 1.0, (DRAWS, count))
    found = np.mean([statistics.p_value(sample) < 0.05 for sample in samples])
    assert 0.8 - 0.02 < found < 0.8 + 0.06  # the number of seeds is rounded up


# Losses of a made-up architecture at 12 seeds, as the last evaluations of small runs vary.
LOSSES = np.array(
    [3.0871, 3.0916, 3.0894, 3.0843, 3.0925, 3.0869, 3.0902, 3.0858, 3.0887, 3.0931, 3.0850, 3.0879]
)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_coverage_of_the_intervals_on_resampled_seeds(seeds):
    """95% intervals contain the true difference in 93% to 97% of the draws."""
    rng = np.random.default_rng(2)
    noise = rng.choice(LOSSES, (DRAWS, seeds)) + rng.normal(
        0, LOSSES.std() / 2, (DRAWS, seeds)
    )  # smoothed bootstrap
    samples = noise - LOSSES.mean() + 0.004
    covered = [abs(sample.mean() - 0.004) <= statistics.half_width(sample) for sample in samples]
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.parametrize("names", [2, 4])
def test_a_tie_is_called_a_tie(names):
    """All models are equally good. With 90% probability or more, no pair is found to differ."""
    rng, pairs = np.random.default_rng(3), [(a, b) for a in range(names) for b in range(a)]
    ties = 0
    for _ in range(400):
        common = rng.normal(3, 0.01, 5)  # what the runs of one seed share
        losses = {name: by_seed(common + rng.normal(0, 0.003, 5)) for name in range(names)}
        rows = statistics.compare_pairs(losses, pairs)
        ties += all(row.verdict == "not distinguishable" for row in rows)
    assert ties / 400 >= 0.9


@pytest.mark.parametrize("degrees, typical, own", [(4.0, 1e-4, 2), (10.0, 0.03, 1), (1.0, 0.5, 3)])
def test_the_prior_of_variances_is_recovered(degrees, typical, own):
    """Variances drawn from a scaled inverse chi-squared distribution (Smyth, 2004, section 3)."""
    rng = np.random.default_rng(0)
    true = degrees * typical / rng.chisquare(degrees, 40_000)
    prior = statistics.variance_prior(true * rng.chisquare(own, 40_000) / own, [own] * 40_000)
    assert (prior.degrees, prior.variance) == pytest.approx((degrees, typical), rel=0.1)
    # The expected precision of a sample, given its variance, is one by the shrunk variance
    # (equation 6 there).
    variance = 3 * typical
    near = np.abs(np.log(true * rng.chisquare(own, 40_000) / own / variance)) < 0.1
    assert (1 / true[near]).mean() == pytest.approx(1 / prior.shrink(variance, own)[0], rel=0.15)


def test_the_prior_of_equal_and_of_few_variances():
    rng = np.random.default_rng(1)
    equal = statistics.variance_prior(0.2 * rng.chisquare(2, 1000) / 2, [2] * 1000)
    assert equal.degrees > 50 and equal.variance == pytest.approx(0.2, rel=0.1)
    assert statistics.variance_prior([0.1, 0.1, 0.1], [2, 2, 2]) == statistics.Prior(
        pytest.approx(0.1 * np.exp(-special.digamma(1))), math.inf
    )  # half of 2 degrees
    assert statistics.variance_prior([0.1], [2]).shrink(0.3, 2) == (pytest.approx(0.3), 2)
