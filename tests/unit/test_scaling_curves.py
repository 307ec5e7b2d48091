"""Losses of models between the budgets of their runs."""

import math

import pytest
from decision_helpers import evidence, runs

from smallgpt_jax.analysis.scaling_curves import (
    pair_at_budget,
    pair_at_nearest_budget,
    scaling_curves_of,
)


def curves(*groups):
    return scaling_curves_of(evidence(*groups).candidates, lambda candidate: candidate.flops)


def test_a_power_of_the_budget_is_interpolated_exactly():
    """L = 100 · C^-0.1 of 1e6 and 8e6 FLOPs, asked at 2e6."""
    cheap = runs("a", [100 * 1e6**-0.1] * 2, steps=10, flops=1e6)
    dear = runs("a", [100 * 8e6**-0.1] * 2, steps=80, flops=8e6)
    reading = curves(cheap, dear)["a"].at_budget(2e6)["size", ""]
    assert reading.known == "interpolated"
    assert reading.loss == pytest.approx(100 * 2e6**-0.1)
    assert reading.tokens == pytest.approx(2000)
    assert reading.candidate.first.steps == 10


def test_the_noise_of_two_sizes_partly_cancels_between_them():
    """Halfway between two sizes, the variance is half of that of a run; the lengths of one size share
    their noise.
    """
    own = curves(
        runs("a@s", [4.0, 4.1], steps=10, flops=1e6, parameters=1000),
        runs("a@s", [3.8, 3.9], steps=15, flops=4e6, parameters=1000),
        runs("a@m", [3.5, 3.6], steps=20, flops=4e6, parameters=2000),
    )["a"]
    noises = {key: reading.noise for key, reading in own.at_budget(2e6).items()}
    assert noises == {("size", "s"): 1.0, ("ratio", 1): pytest.approx(0.5)}


def test_each_order_is_interpolated_by_itself():
    cheap = runs("a", {0: 4.0, 1: 4.4, 2: 4.2}, steps=10, flops=1e6)
    dear = runs("a", {1: 3.4, 2: 3.2}, steps=40, flops=4e6)
    losses = curves(cheap, dear)["a"].at_budget(2e6)["size", ""].losses
    assert losses == {
        1: pytest.approx(math.sqrt(4.4 * 3.4)),
        2: pytest.approx(math.sqrt(4.2 * 3.2)),
    }


def test_nothing_is_read_beyond_the_runs_and_in_wide_gaps():
    own = curves(runs("a", [4.0], steps=10, flops=1e6), runs("a", [3.0], steps=100, flops=1e7))["a"]
    assert own.at_budget(9e5) == own.at_budget(1.1e7) == own.at_budget(3e6) == {}
    assert own.at_budget(1.005e6)["size", ""].known == "trained"


def test_the_lowest_loss_within_a_budget_bounds_it():
    """A dearer run with a higher loss does not make a model worse."""
    own = curves(runs("a@s", [4.0], steps=10, flops=1e6), runs("a@m", [4.5], steps=10, flops=2e6))[
        "a"
    ]
    assert own.best_within(3e6).candidate.loss == 4.0
    assert own.best_within(9e5) is None
    assert own.cheapest_just_above(9e5).cost == 1e6
    assert own.cheapest_just_above(7e5) is None


def test_a_fall_between_nearly_equal_budgets_is_no_slope():
    own = curves(
        runs("a", [4.0], steps=100), runs("a", [3.8], steps=105), runs("a", [3.6], steps=210)
    )["a"]
    _, near, far = (point.candidate for point in own.points)
    assert own.steepest_fall(near) is None
    assert own.steepest_fall(far) == pytest.approx(math.log(3.8 / 3.6) / math.log(2))


def test_sizes_are_one_curve_at_about_equal_tokens_per_parameter():
    """Tokens per parameter are those of the size's typical model, so models of one size that were
    trained on equal tokens are on the same curve.
    """
    own = curves(
        runs("a@s", [4.0], steps=10, parameters=1000),
        runs("a@m", [3.5], steps=20, parameters=2000),
        runs("b@s", [4.0], steps=10, parameters=1300),
        runs("b@m", [3.5], steps=20, parameters=2600),
    )
    (key,) = own["a"].at_budget(1.2e7).keys() & own["b"].at_budget(1.2e7).keys()
    assert key[0] == "ratio"
    assert [point.candidate.first.size for point in own["b"].curves[key]] == ["s", "m"]


def test_between_sizes_the_best_of_several_rates_counts():
    """At 4e7 FLOPs, halfway from the small size at its best rate, 4.0, to the large one, 3.6."""
    own = curves(
        runs("a@s-0.5x", [4.3] * 2, steps=10, flops=2e7, parameters=1000),
        runs("a@s-1x", [4.0] * 2, steps=10, flops=2e7, parameters=1000),
        runs("a@s-2x", [4.4], steps=10, flops=2e7, parameters=1000),
        runs("a@m", [3.6] * 2, steps=20, flops=8e7, parameters=2000),
    )
    (reading,) = own["a"].at_budget(4e7).values()
    assert reading.loss == pytest.approx(math.sqrt(4.0 * 3.6))
    assert len(reading.losses) == 2


def test_models_are_compared_on_curves_that_both_have():
    """At 2e6 FLOPs, a is best at the small size, which b does not have."""
    own = curves(
        runs("a@s", [4.0], steps=10, flops=1e6),
        runs("a@s", [3.0], steps=40, flops=4e6),
        runs("a@m", [4.4], steps=10, flops=1e6),
        runs("a@m", [3.4], steps=20, flops=4e6),
        runs("b@m", [4.5], steps=10, flops=1e6),
        runs("b@m", [3.3], steps=20, flops=4e6),
    )
    one, other = pair_at_budget(own["a"], own["b"], 2e6)
    assert (one.loss, other.loss) == (
        pytest.approx(math.sqrt(4.4 * 3.4)),
        pytest.approx(math.sqrt(4.5 * 3.3)),
    )
    one, other = pair_at_nearest_budget(own["a"], own["b"], 1e7)
    assert (one.cost, one.loss, other.loss) == (4e6, 3.4, 3.3)
