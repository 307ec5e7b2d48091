"""Models compared within one budget: probabilities, verdicts, refusals."""

import dataclasses
import math

import numpy as np
import pytest
from decision_helpers import evidence, runs
from scipy import stats

from smallgpt_jax.analysis import contest as contests
from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.candidates import Contender
from smallgpt_jax.analysis.contest import compare_pairs, compete, draw_losses, seeds_needed
from smallgpt_jax.analysis.spreads import Difference, Estimate


def contest(*groups, **changes):
    """Returns the contest of the models as they were trained; `changes` of contenders by model."""
    made = evidence(*groups)
    contenders = [
        Contender(one, one.losses, one.flops, **changes.get(one.model, {}))
        for one in made.candidates
    ]
    return compete(contenders, made)


def estimate(means, errors, degrees=1e6) -> Estimate:
    """Returns an estimate whose models have independent errors of their means."""
    means, squares = np.array(means, float), np.array(errors, float) ** 2
    shape = (len(means), len(means))
    return Estimate(
        means,
        np.ones(len(means)),
        np.sqrt(squares),
        (squares[:, None] + squares) * ~np.eye(len(means), dtype=bool),
        np.full(shape, float(degrees)),
        np.ones(shape, int),
        means[:, None] - means,
    )


# ------------------------------------------------------------------ probabilities
def test_known_errors_give_the_normal_probability():
    """Where models differ much more than the errors, nothing is drawn towards the mean: of two
    close ones, the first is better with the probability Φ(0.02 / 0.0141).
    """
    draws = draw_losses(estimate([3.0, 3.02, 5.0, 7.0, 9.0, 11.0], [0.01] * 6))
    assert (draws[:, 0] < draws[:, 1]).mean() == pytest.approx(
        stats.norm.cdf(0.02 / math.hypot(0.01, 0.01)), abs=0.02
    )


def test_few_degrees_of_freedom_give_students_probability():
    draws = draw_losses(estimate([3.0, 3.03, 5.0, 7.0, 9.0, 11.0], [0.01, 1e-6, 1, 1, 1, 1], 3))
    assert (draws[:, 0] < draws[:, 1]).mean() == pytest.approx(stats.t.cdf(3, 3), abs=0.02)


def test_differences_as_small_as_errors_are_drawn_to_the_mean():
    """Of eight models whose losses vary as the errors do, the lowest had luck."""
    means = [-1.5, -0.8, -0.4, -0.1, 0.1, 0.4, 0.8, 1.5]
    draws = draw_losses(estimate(means, [1.0] * 8))
    shares = np.bincount(draws.argmin(1), minlength=8) / len(draws)
    assert draws[:, 0].mean() > -1.2
    assert 0.2 < shares[0] < 0.45


def test_parallel_losses_do_not_draw_a_distant_model_near():
    """Half of the models differ by the same in each seed, the others by up to 0.3 nats more or less;
    all differ by about a nat.
    """
    rng = np.random.default_rng(0)
    for _ in range(15):
        models, seeds = rng.integers(3, 8, 2)
        deviations = 10 ** rng.uniform(-4, -0.5, models) * (rng.random(models) < 0.5)
        noise = deviations[:, None] * rng.standard_normal((models, seeds))
        losses = 5 + rng.standard_normal((models, 1)) + rng.standard_normal(seeds) + noise
        measured = spreads.estimate_alone(losses)
        draws = draw_losses(measured)
        errors = np.sqrt(measured.own_errors)
        assert (abs(draws.mean(0) - losses.mean(1)) < 3 * errors).all()
        for pair in compare_pairs(range(models), measured, draws):
            assert pair.verdict in ("cannot tell", "lower" if pair.difference < 0 else "higher")


def test_a_bad_model_with_two_seeds_does_not_decide_the_order_of_two_good_ones():
    """b is better than a with each of ten seeds; c has the two seeds in which a is lowest."""
    rng = np.random.default_rng(0)
    orders = 0.3 * rng.standard_normal(10)
    a = 3.1 + orders + 0.01 * rng.standard_normal(10)
    b = 3.0 + orders + 0.01 * rng.standard_normal(10)
    few = {seed: 4.0 + orders[seed] for seed in np.argsort(a)[:2].tolist()}
    found = contest(runs("a", a), runs("b", b), runs("c", few))
    assert found.chosen == "b"
    assert [one.model for one in found.standings] == ["b", "a", "c"]


def test_models_without_common_orders_are_compared_with_the_spread_of_orders():
    """All four are equal; d has read orders of batches of its own, which move a loss by 0.1."""
    rng = np.random.default_rng(1)
    decided = 0
    for _ in range(40):
        orders = 0.1 * rng.standard_normal(6)
        models = []
        for name, seeds in (("a", (0, 1, 2)), ("b", (0, 1, 2)), ("c", (0, 1, 2)), ("d", (3, 4, 5))):
            losses = {seed: 3 + orders[seed] + 0.005 * rng.standard_normal() for seed in seeds}
            models.append(runs(name, losses))
        decided += contest(*models).pair("d", "a").is_decided
    assert decided < 5  # 2 expected


def test_the_loss_at_stake_is_what_the_first_model_may_cost():
    found = contest(runs("a", [3.0, 3.1, 3.2]), runs("b", [3.05, 3.02, 3.3]))
    assert found.chosen is None
    assert found.refusal == "uncertain"
    assert found.blockers == ("b",)
    assert 0.01 < found.at_stake < 0.3
    sure = contest(runs("a", [3.0, 3.01, 3.02]), runs("b", [4.0, 4.01, 4.02]))
    assert (sure.chosen, sure.at_stake) == ("a", 0.0)


# ------------------------------------------------------------------ refusals
def test_a_diverged_seed_is_an_infinite_loss():
    """The survivors of b are better than a, but who trains b may meet the divergence."""
    found = contest(
        runs("a", [3.5, 3.51, 3.52]),
        runs("b", [3.0, 3.01, 3.02, math.inf]),
        runs("c", [4.0, 4.01, 4.02]),
    )
    assert found.chosen == "a"
    worst = found.standings[-1]
    assert (worst.model, worst.loss, worst.probability, worst.diverged) == ("b", math.inf, 0, 1)
    assert found.pair("b", "a").verdict == "higher"
    nothing = contest(runs("a", [math.inf]), runs("b", [math.inf]))
    assert (nothing.chosen, nothing.refusal) == (None, "diverged")


def test_single_seeds_decide_nothing():
    found = contest(runs("a", [3.0]), runs("b", [9.0]))
    assert (found.chosen, found.refusal) == (None, "few seeds")
    pair = found.pair("b", "a")
    assert (pair.interval, pair.verdict, pair.seeds_needed) == (None, "cannot tell", None)
    assert found.standings[0].interval is None


def test_the_only_model_is_chosen():
    found = contest(runs("a", [3.0]))
    assert (found.chosen, found.pairs, found.standings[0].probability) == ("a", (), 1.0)


@pytest.mark.parametrize(("known", "refusal"), [("cheaper", "more training"), ("dearer", "dearer")])
def test_what_was_not_tried_blocks_a_choice(known, refusal):
    """b is 0.1 worse, but might gain 0.2 with what was not tried."""
    a, b = runs("a", [3.0, 3.01, 3.02]), runs("b", [3.1, 3.11, 3.12])
    assert contest(a, b).chosen == "a"
    found = contest(a, b, b={"known": known, "untried": 0.2})
    assert (found.chosen, found.refusal, found.blockers) == (None, refusal, ("b",))
    assert found.standings[1].potential == pytest.approx(2.91)
    assert found.standings[1].loss == (math.inf if known == "dearer" else pytest.approx(3.11))


@pytest.mark.parametrize("verdict", ["lower", "cannot tell"])
def test_a_sequential_verdict_against_a_model_prevents_its_choice(verdict, monkeypatch):
    made = evidence(runs("a", [3.0, 3.01, 3.02]), runs("b", [4.0, 4.01, 4.02]))
    made = dataclasses.replace(made, record=dataclasses.replace(made.record, seeds_as_needed=True))
    contenders = [Contender(one, one.losses, one.flops) for one in made.candidates]

    def pairs_with_verdict(*arguments):
        return [dataclasses.replace(pair, verdict=verdict) for pair in compare_pairs(*arguments)]

    monkeypatch.setattr(contests, "compare_pairs", pairs_with_verdict)
    result = compete(contenders, made)
    assert (result.chosen, result.refusal, result.blockers) == (None, "uncertain", ("b",))


# ------------------------------------------------------------------ pairs
def test_every_pair_has_one_verdict_from_either_side():
    found = contest(
        runs("a", [3.0, 3.01, 3.02]), runs("b", [3.5, 3.51, 3.53]), runs("c", [3.505, 3.5, 3.53])
    )
    pair, same = found.pair("b", "a"), found.pair("a", "b")
    assert (pair.verdict, same.verdict) == ("higher", "lower")
    assert pair.difference == pytest.approx(-same.difference) == pytest.approx(0.5, abs=0.01)
    assert (pair.interval.low, pair.interval.high) == (-same.interval.high, -same.interval.low)
    assert pair.probability == pytest.approx(1 - same.probability)
    assert pair.seeds_needed is None
    assert found.pair("c", "b").verdict == "cannot tell"
    assert found.pair("c", "b").seeds_needed.low > 3
    assert len(found.pairs) == 3
    assert found.pair("a", "d") is None


def test_the_seeds_needed_are_those_of_a_t_test_with_known_spread():
    """With a difference and a spread that are known well, the range closes around the number at
    which a paired t-test has a power of 80%.
    """
    difference = Difference(0.03, 1e-6, 1e9, 3, variance=0.05**2)
    needed = seeds_needed(difference)
    power = {}
    for n in (20, 30):
        critical = stats.t.ppf(0.975, n - 1)
        power[n] = stats.nct.sf(critical, n - 1, 0.03 / 0.05 * math.sqrt(n))
    assert power[20] < 0.8 < power[30]
    assert 20 < needed.low <= needed.high < 30


@pytest.mark.slow
def test_the_range_of_seeds_contains_the_needed_number_in_about_80_percent():
    """Differences of 0.02 with the spread 0.03, which need 19.6 seeds, seen with three."""
    rng, inside = np.random.default_rng(1), []
    for _ in range(400):
        sample = rng.normal(0.02, 0.03, 3)
        error = sample.std(ddof=1) / math.sqrt(3)
        needed = seeds_needed(Difference(sample.mean(), error, 2, 3, sample.var(ddof=1)))
        inside.append(needed.low <= 7.85 * (0.03 / 0.02) ** 2 + 1.9 <= needed.high)
    assert 0.7 < np.mean(inside) < 0.95


def test_draws_are_the_same_each_time():
    groups = runs("a", [3.0, 3.1, 3.2]), runs("b", [3.05, 3.02, 3.3])
    assert contest(*groups) == contest(*groups)
    assert contests.DRAWS >= 16_000
