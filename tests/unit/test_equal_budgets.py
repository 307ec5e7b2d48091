"""Tests of comparisons at equal training FLOPs, on losses that follow known laws."""

import itertools

import numpy as np
import pytest

from smallgpt_jax.comparison import equal_budgets, scaling_figures
from smallgpt_jax.comparison.candidates import Candidate
from smallgpt_jax.comparison.power_law import Law

LAW = Law(1.5, 60.0, 60.0, 0.34, 0.28)
CROSSING = LAW._replace(
    size_factor=547.0, size_exponent=0.5
)  # better than LAW from about 1e14 FLOPs on


def make_curve(
    name: str,
    law: Law = LAW,
    cost: float = 6.0,
    noise: float = 0.0,
    seeds: int = 3,
    sizes=(300_000, 700_000, 1_600_000, 3_500_000),
) -> equal_budgets.Curve:
    """Returns the curve of a model with `cost` FLOPs per parameter and token, trained for three
    horizons per size.
    """
    rng = np.random.default_rng(len(name) + ord(name[0]))
    return equal_budgets.curve_of(
        [
            Candidate(
                f"{name}@{size}-{ratio}",
                ({"name": f"{name}@{size}"},),
                cost * size**2 * ratio,
                {
                    seed: float(law.loss(size, size * ratio)) + noise * rng.standard_normal()
                    for seed in range(seeds)
                },
                size,
                size,
                size * ratio,
            )
            for size in sizes
            for ratio in (5, 10, 20)
        ]
    )


def test_a_model_with_two_thirds_of_the_cost_needs_two_thirds_of_the_flops():
    base, cheap = make_curve("a"), make_curve("b", cost=4.0)
    for budget in (1e13, 1e14, 5e14):
        found = equal_budgets.compute_multiplier(cheap, base, budget)
        assert (found.mean, found.low, found.high) == pytest.approx((1.5,) * 3, rel=0.02)
        assert equal_budgets.compute_multiplier(base, cheap, budget).mean == pytest.approx(
            2 / 3, rel=0.02
        )
    noisy = equal_budgets.compute_multiplier(
        make_curve("b", cost=4.0, noise=0.01), make_curve("a", noise=0.01), 1e14
    )
    assert noisy.low < 1.5 < noisy.high and noisy.high < 1.3 * noisy.low
    better = make_curve("c", LAW._replace(irreducible=0.5))
    assert (
        equal_budgets.compute_multiplier(base, better, 1e15) is None
    )  # base does not reach this loss
    assert (
        equal_budgets.compute_multiplier(better, base, 3e12) is None
    )  # the smallest run of the other is below it
    assert equal_budgets.compute_multiplier(cheap, base, 1e17) is None


def test_a_seed_without_the_budget_does_not_count():
    whole, part = make_curve("a"), make_curve("a", sizes=(300_000, 700_000))
    mixed = equal_budgets.Curve(
        "a", whole.budgets, {**whole.losses, 2: part.at(2, whole.budgets)}, whole.sizes
    )
    assert np.isnan(mixed.at(2, np.array([1e15]))[0]) and not np.isnan(
        mixed.at(2, np.array([1e13]))[0]
    )
    assert equal_budgets.compute_multiplier(
        make_curve("b", cost=4.0), mixed, 1e15
    ).mean == pytest.approx(1.5, rel=0.02)
    assert equal_budgets.compute_multiplier(mixed, make_curve("b", cost=4.0), 1e15) is None


def test_the_order_changes_or_cannot_be_told():
    one, other, same = (
        make_curve("a", noise=0.01),
        make_curve("b", CROSSING, noise=0.01),
        make_curve("c", noise=0.01),
    )
    segments = equal_budgets.order(other, one)
    better = [segment.better for segment in segments]
    assert better[0] == "a" and better[-1] == "b" and None in better
    assert (segments[0].low, segments[-1].high) == pytest.approx(
        (6 * 5 * 300_000**2, 6 * 20 * 3_500_000**2)
    )
    assert all(before.high == after.low for before, after in itertools.pairwise(segments))
    (changed,) = (segment for segment in segments if segment.better is None)
    sizes = np.geomspace(300_000, 3_500_000, 400)
    budgets = np.geomspace(1e13, 1e15, 400)[:, None]
    is_trained = np.abs(budgets / 6 / sizes**2 - 12.5) < 7.5  # tokens per parameter
    best, best_crossing = (
        np.where(is_trained, law.loss(sizes, budgets / 6 / sizes), np.inf).min(-1)
        for law in (LAW, CROSSING)
    )
    gaps = best - best_crossing
    assert (
        changed.low / 1.15 < budgets[gaps > 0][0] < 1.15 * changed.high
    )  # two budgets differ by a factor of 1.14
    assert None in [segment.better for segment in equal_budgets.order(same, one)]
    assert {
        segment.better
        for segment in equal_budgets.order(
            make_curve("d", seeds=1), make_curve("e", CROSSING, seeds=1)
        )
    } == {None}
    assert equal_budgets.order(make_curve("far", cost=6e9), one) == []


def test_a_larger_budget_is_never_worse():
    """The longer training of a small size can have a higher loss than the next size with fewer
    FLOPs.
    """
    curve = make_curve("a", noise=0.3)
    assert all((np.diff(values) <= 0).all() for values in curve.losses.values())
    assert (
        equal_budgets.curve_of([Candidate("a", ({"name": "a"},), 1e12, {0: 3.0}, 1, 1, 1.0)])
        is None
    )
    loss = float(curve.at(0, np.array([1e14]))[0])
    assert curve.at(0, np.array([curve.budget_of(0, loss)]))[0] == pytest.approx(loss)


def candidate(name: str, cost: float, *losses: float) -> Candidate:
    return Candidate(
        name, ({"name": "a"},), cost, dict(enumerate(losses)), 1_000_000, 1_000_000, cost / 6e6
    )


def test_budgets_just_beyond_the_last_run_and_gaps():
    curve = equal_budgets.curve_of(
        [candidate("1", 1e13, 4.0), candidate("2", 2e13, 3.5), candidate("3", 4e14, 3.0)]
    )
    assert curve.at(0, np.array([4.9e14, 5.1e14]))[0] == 3.0 and np.isnan(
        curve.at(0, np.array([5.1e14]))[0]
    )
    assert curve.budget_of(0, 3.75) == pytest.approx(2**0.5 * 1e13, rel=0.01)
    assert np.isnan(curve.budget_of(0, 3.2))  # between budgets whose ratio is 20
    assert equal_budgets.compute_multiplier(curve, curve, 4.9e14).mean == pytest.approx(1)


def test_without_a_common_seed_there_is_no_order():
    one = make_curve("a")
    other = equal_budgets.Curve(
        "b", one.budgets, {seed + 10: one.losses[seed] for seed in one.losses}, one.sizes
    )
    assert equal_budgets.order(other, one) == []
    assert equal_budgets.compute_multiplier(other, one, 1e14) is None
    figure = scaling_figures.difference_from(
        {"a": one, "b": other, "c": make_curve("c", cost=4.0)}, "a"
    )
    assert [line.get_label() for line in figure.axes[0].lines if line.get_label() in "abc"] == ["c"]


def test_equal_models_are_rarely_told_apart():
    """With two budgets and three seeds, whose points between them are no further evidence."""

    def verdict(rng) -> str | None:
        both = [
            equal_budgets.curve_of(
                [
                    candidate(name, cost, *(loss + 0.05 * rng.standard_normal(3)))
                    for cost, loss in ((1e13, 4.0), (2e13, 3.5))
                ]
            )
            for name in "ab"
        ]
        return equal_budgets.order(*both)[-1].better

    rng = np.random.default_rng(0)
    assert np.mean([verdict(rng) is not None for _ in range(60)]) <= 0.12
