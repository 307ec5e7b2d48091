"""Tests of the probabilities of being the best, against Student's t-distribution."""

import numpy as np
import pytest
from scipy import stats

from smallgpt_jax.comparison import contest, statistics
from smallgpt_jax.comparison.candidates import Candidate
from smallgpt_jax.comparison.costs import BUDGETS


def make(name: str, losses, cost: float = 1.0) -> Candidate:
    return Candidate(
        name, ({"curve": [{"flops": None}]},), cost, dict(enumerate(losses)), 1, 1, 1.0
    )


def compete(*models: Candidate) -> contest.Contest:
    return contest.compete(models, BUDGETS["parameters"], 1.0)


def test_two_models_are_compared_seed_by_seed():
    """The spread that both share does not hide their order."""
    a, b = [3.0, 3.5, 2.7], [3.04, 3.51, 2.73]
    found = compete(make("b", b), make("a", a))
    assert [one.model.name for one in found.contenders] == ["a", "b"]
    difference = np.array(b) - a
    error = difference.std(ddof=1) / 3**0.5
    probability = stats.t.cdf(difference.mean() / error, 2)
    assert found.probability == pytest.approx(probability, abs=0.01) and 0.9 < probability < 0.98
    # Own interval: 80%, two degrees of freedom.
    low, high = found.contenders[0].interval
    assert (low, high) == pytest.approx(
        stats.t.interval(0.8, 2, np.mean(a), np.std(a, ddof=1) / 3**0.5)
    )
    apart = compete(make("a", a), make("b", [3.04, 2.7, 3.52]))  # the same losses, of other seeds
    assert apart.probability < 0.6


def test_the_loss_at_stake():
    """It is zero where the first is the best with more than 90%."""
    a, b = [3.0, 3.1, 3.05], [3.0, 3.08, 3.09]
    found = compete(make("a", a), make("b", b))
    difference = np.array(b) - a
    expected = -stats.t.ppf(0.1, 2, difference.mean(), difference.std(ddof=1) / 3**0.5)
    assert found.at_stake == pytest.approx(expected, rel=0.1) and expected > 0.01
    assert compete(make("a", a), make("b", [3.5, 3.61, 3.55])).at_stake == 0
    assert [
        one.model.name for one in compete(make("a", a), make("b", [3.5, 3.61, 3.55])).possible
    ] == ["a"]


def test_a_spread_is_drawn_towards_that_of_the_others():
    """Two seeds of one model agree by chance. Alone, this would prove a difference."""
    spreads = {"c": 0.02, "d": -0.03, "e": 0.05, "f": 0.04, "g": -0.025, "h": 0.035}
    others = [make(name, [4.0 + spread, 4.1 - spread]) for name, spread in spreads.items()]
    a, b = make("a", [3.0, 3.1]), make("b", [3.02, 3.123])
    alone, beside = compete(a, b).probability, compete(a, b, *others).probability
    assert alone > 0.975 and beside < 0.9
    known = [4.5e-6, *(2 * spread**2 for spread in spreads.values())]  # of the differences from a
    prior = statistics.variance_prior(known, [1] * 7)
    variance, degrees = prior.shrink(known[0], 1)
    assert beside == pytest.approx(stats.t.cdf(0.0215 / (variance / 2) ** 0.5, degrees), abs=0.01)


def test_models_with_too_few_seeds():
    """The spread of a model with one seed is the widest of the others."""
    first, other = make("a", [3.0, 3.0, 3.0]), make("b", [3.5, 3.51, 3.52])
    assert compete(first, other, make("c", [3.5])).probability > 0.975
    assert compete(first, other, make("d", [3.5, 3.9, 3.7]), make("c", [3.05])).probability < 0.7
    near = compete(first, other, make("c", [3.005]))
    assert near.contenders[1].probability == pytest.approx(stats.t.cdf(-0.005 / 0.01, 2), abs=0.01)
    with pytest.raises(
        contest.CannotTellError, match="fewer than two seeds in common, so the spread"
    ):
        compete(first, make("b", [3.2]))


def test_copies_of_a_model_have_its_losses():
    """Of equal losses, they divide the probability."""
    b = [3.4, 3.41, 3.43]
    found = compete(make("a", [3.0, 3.02, 3.01]), make("b", b), make("c", b, cost=0.5))
    assert found.probability > 0.99 and [one.model.name for one in found.contenders] == [
        "a",
        "c",
        "b",
    ]
    first = compete(make("b", b), make("c", b, cost=0.5), make("d", [3.6, 3.7, 3.65]))
    assert [one.model.name for one in first.winners] == ["c", "b"] and first.probability > 0.975
    assert first.contenders[0].probability == pytest.approx(first.probability / 2)


def test_a_near_miss_names_the_second_model():
    contenders = [
        contest.Contender(make(name, [loss]), make(name, [loss]), probability)
        for name, loss, probability in (("a", 3.0, 0.96), ("b", 3.1, 0.01), ("c", 3.2, 0.03))
    ]
    found = contest.Contest(1.0, tuple(contenders), 0.0, ())
    assert [one.model.name for one in found.possible] == ["a", "c"]


def test_a_missing_seed_does_not_decide_the_order():
    """b is better with both common seeds, and a has a further one with a lower loss."""
    found = compete(make("a", [3.0, 3.1, 2.0]), make("b", [2.98, 3.081]))
    assert [one.model.name for one in found.contenders] == ["b", "a"] and found.probability > 0.95


def test_a_single_seed_of_the_lowest_loss_has_the_widest_spread():
    others = [make("b", [3.0, 3.02, 2.98]), make("c", [3.4, 3.3, 3.45])]
    found = compete(make("a", [2.9]), *others)
    assert [one.model.name for one in found.contenders] == [
        "a",
        "b",
        "c",
    ] and 0.5 < found.probability < 0.99
