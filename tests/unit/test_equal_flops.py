"""Two models at equal training FLOPs: the better one by budget, and compute multipliers."""

import dataclasses
import math

import numpy as np
import pytest
from decision_helpers import evidence, runs

from experiments import made_up
from smallgpt_jax.analysis.candidates import evidence_of
from smallgpt_jax.analysis.equal_flops import (
    compare_at_equal_flops,
    find_multipliers,
    find_untried,
)

STEPS = (10, 20, 40, 80)
NOISE = (-0.01, 0.002, 0.008)


def near(loss: float) -> list[float]:
    return [loss + noise for noise in NOISE]


def power_law(name: str, gain: float, exponent: float = 0.1, steps=STEPS, seeds: int = 3):
    """Returns runs with L = 20 · (gain · FLOPs)^-exponent: the model needs 1 / gain of the FLOPs.

    The seeds have their own noise in each model.
    """
    rng = np.random.default_rng(len(name) + ord(name[0]))
    made = []
    for count in steps:
        loss = 20 * (gain * 6e5 * count) ** -exponent
        made += runs(name, loss + rng.permutation(NOISE[:seeds]) * 0.3, steps=count)
    return made


def test_a_loss_of_zero_has_no_multiplier():
    """Both models solve the task with their largest budget, b with a lower loss before."""
    made = [
        *runs("a", [1.0, 1.1, 1.05], steps=10),
        *runs("a", [0.0, 0.0, 0.0], steps=20),
        *runs("b", [0.9, 1.0, 0.95], steps=10),
        *runs("b", [0.0, 0.0, 0.0], steps=20),
    ]
    before, after = find_multipliers(evidence(made), "a", [6e6, 1.2e7])
    assert before.value > 1 and after.refusal == "solved"


def test_a_multiplier_is_the_ratio_of_flops_at_equal_losses():
    (found,) = find_multipliers(evidence(power_law("a", 1.0), power_law("b", 1.5)), "a", [2.4e7])
    assert (found.model, found.other, found.budget, found.refusal) == ("b", "a", 2.4e7, None)
    assert found.value == pytest.approx(1.5, rel=0.02)
    assert found.interval.low < 1.5 < found.interval.high


def test_the_interval_of_a_multiplier_is_the_error_divided_by_the_slope():
    """Without shared noise, ln(multiplier) has the error of the difference of two means, divided by
    the fall of the loss per e-fold.
    """
    made = evidence(power_law("a", 1.0), power_law("b", 1.5))
    (found,) = find_multipliers(made, "a", [2.4e7])
    loss = 20 * 2.4e7**-0.1
    width = math.log(found.interval.high / found.interval.low) / 2
    differences = made.variance_prior.variance**0.5 / math.sqrt(3)
    assert width == pytest.approx(1.5 * differences / (0.1 * loss), rel=0.4)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (power_law("b", 0.05), "not reached"),
        (power_law("b", 20.0), "from the start"),
        (power_law("b", 1.5, steps=(40,)), "one budget"),
        (power_law("b", 1.5, steps=(1, 200)), "gap"),
    ],
)
def test_multipliers_are_refused_with_the_reason(model, reason):
    (found,) = find_multipliers(evidence(power_law("a", 1.0), model), "a", [2.4e7])
    assert (found.value, found.interval, found.refusal) == (None, None, reason)


def test_two_seeds_give_no_multiplier():
    made = evidence(power_law("a", 1.0, seeds=2), power_law("b", 1.5, seeds=2))
    assert find_multipliers(made, "a", [2.4e7])[0].refusal == "few seeds"


def test_the_last_budget_of_a_model_has_a_multiplier_though_it_was_unlucky_there():
    """b is as good as a, but 0.5% worse by chance, so that it reaches a's last loss with 5% more."""
    (found,) = find_multipliers(evidence(power_law("a", 1.0), power_law("b", 0.95)), "a", [4.8e7])
    assert found.value == pytest.approx(0.95, rel=0.02)


def test_single_seeds_give_no_multiplier_and_no_order():
    made = evidence(power_law("a", 1.0, seeds=1), power_law("b", 1.5, seeds=1))
    assert find_multipliers(made, "a", [2.4e7])[0].refusal == "few seeds"
    assert compare_at_equal_flops(made, "a")[0].segments == ()


def test_the_order_changes_where_the_curves_cross():
    """b is worse with few FLOPs and better with many; they cross at 4.8e7."""
    steep = []
    for count in (10, 20, 40, 80, 160, 320, 640):
        loss = 20 * (4.8e7) ** -0.1 * (6e5 * count / 4.8e7) ** -0.2
        steep += runs("b", np.array(NOISE) * 0.1 + loss, steps=count)
    flat = power_law("a", 1.0, steps=(10, 20, 40, 80, 160, 320, 640))
    (order,) = compare_at_equal_flops(evidence(flat, steep), "a")
    assert [segment.better for segment in order.segments] == ["a", None, "b"]
    assert order.segments[0].low == 6e6
    assert order.segments[1].low < 4.8e7 < order.segments[1].high
    assert order.segments[-1].high == pytest.approx(6e5 * 640)
    np.testing.assert_array_less(order.low, order.differences)
    np.testing.assert_array_less(order.differences, order.high)
    assert np.all(np.diff(order.differences) < 0)


def test_the_lengths_of_one_size_alone_are_no_range_if_several_were_trained():
    """b is better at both lengths of the size s, by its three runs; they may all have been lucky."""
    made = evidence(
        runs("a@s", near(4.0), steps=10), runs("a@s", near(3.9), steps=20),
        runs("b@s", near(3.5), steps=10), runs("b@s", near(3.4), steps=20),
        runs("a@m", near(3.0), steps=40, parameters=2000),
        runs("b@m", near(3.0), steps=40, parameters=2000),
    )  # fmt: skip
    (order,) = compare_at_equal_flops(made, "a")
    assert [segment.better for segment in order.segments] == [None]
    assert order.high[0] < 0


@pytest.mark.parametrize(
    "other, losses, refusal",
    [
        ([[3.0, 3.01, 2.99], [2.9997, 3.0098, 2.9899]], [[2.9] * 3, [2.6] * 3], "not reached"),
        (  # seeds differ by a thousand times as much as the curves fall
            [[3.10, 2.90, 3.0003], [3.10, 2.90, 3.0000]],
            [[2.9, 3.1, 3.0002], [2.9, 3.1, 3.0001]],
            "flat",
        ),
    ],
)
def test_a_curve_that_is_nearly_flat_has_no_multiplier(other, losses, refusal):
    """Its budgets would be beyond all numbers."""
    made = []
    for name, curve in (("a", other), ("b", losses)):
        for steps, of_seeds in zip((10, 20), curve):
            made += runs(name, of_seeds, steps=steps)
    (multiplier,) = find_multipliers(evidence(made), "b", [1.2e7])
    assert multiplier.refusal == refusal


def test_models_without_common_seeds_have_an_unknown_spread():
    a, b = runs("a@s", [2.99, 3.0, 3.01], steps=10), runs("b@s", [2.49, 2.5, 2.51], steps=10)
    made = evidence(a, [dataclasses.replace(run, seed=run.seed + 5) for run in b])
    assert not made.variance_prior.is_known
    assert compare_at_equal_flops(made, "a")[0].segments == ()


def test_models_without_common_budgets_have_no_order():
    made = evidence(power_law("a", 1.0), power_law("b", 1.0, steps=(1000, 2000)))
    (order,) = compare_at_equal_flops(made, "a")
    assert (order.segments, order.budgets) == ((), ())


def test_the_longest_training_is_untried_where_it_is_the_best_at_its_budget():
    """Size s trained long is worse than size m with the same FLOPs; m has not been trained longer."""
    made = evidence(
        runs("a@s", [4.0, 4.01], steps=10), runs("a@s", [3.9, 3.91], steps=40),
        runs("a@m", [3.8, 3.81], steps=5, parameters=2000),
        runs("a@m", [3.2, 3.21], steps=40, parameters=2000),
    )  # fmt: skip
    assert find_untried(made) == {"a@m": 2.0}


# ------------------------------------------------------------------ error rates
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "unequal grids", "1.3× FLOPs"])
def test_equal_models_rarely_have_an_order_and_multipliers_cover_one(kind):
    """Of 60 pairs of equal models over five sizes and four lengths. experiments/decisions.py has the
    figures.
    """
    rng, false, covered = np.random.default_rng(0), 0, []
    design = made_up.Design(kind, 2, 3, sizes=5, lengths=(0.125, 0.25, 0.5, 1.0))
    for _ in range(60):
        models = made_up.draw_models(design, 0.0, rng)
        made = evidence_of(made_up.make_record(design, models, 0.4, rng))
        (order,) = compare_at_equal_flops(made, models[0].name)
        false += any(segment.better for segment in order.segments)
        for one in find_multipliers(made, models[0].name, [1e13, 1e14]):
            if one.refusal is None:
                covered.append(one.interval.low <= 1 <= one.interval.high)
    assert false <= 6  # 5% are 3
    assert np.mean(covered) > 0.65  # 80%
