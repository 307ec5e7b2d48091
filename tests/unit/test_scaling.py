"""Tests of scaling laws on synthetic losses with known constants."""

import numpy as np
import pytest
from scipy import optimize

from smallgpt_jax.comparison import power_law, scaling
from smallgpt_jax.comparison.scaling import Record
from smallgpt_jax.errors import UserError

LAW = power_law.Law(1.5, 60.0, 60.0, 0.34, 0.28)
SIZES, HORIZONS = (300_000, 700_000, 1_600_000, 3_500_000), (5, 10, 20, 40)


def make_records(
    law=LAW,
    name: str = "gpt",
    noise: float = 0.005,
    seed: int = 0,
    sizes=SIZES,
    horizons=HORIZONS,
    seeds: int = 3,
    is_trunk: bool = False,
    cost: float = 6.0,
) -> list[Record]:
    """Returns runs of all sizes and horizons (tokens per parameter), `cost` FLOPs per parameter and
    token.

    With `is_trunk`, all horizons of a size and seed are one run and share half of the variance of
    their noise.
    """
    rng, records = np.random.default_rng(seed), []
    for size in sizes:
        for run_seed in range(seeds):
            shared = rng.standard_normal()
            for horizon in horizons:
                own = rng.standard_normal()
                error = noise * ((shared + own) / 2**0.5 if is_trunk else own)
                tokens = size * horizon
                run = f"{name} {size} {run_seed}" + f" {horizon}" * (not is_trunk)
                records.append(
                    Record(
                        name,
                        run,
                        run_seed,
                        size,
                        size - 100_000,
                        size,
                        tokens,
                        cost * size * tokens,
                        float(law.loss(size, tokens)) + error,
                    )
                )
    return records


def test_a_law_without_noise_is_found():
    fitted = scaling.fit(make_records(noise=0, seeds=1), draws=20)
    np.testing.assert_allclose(fitted.law, LAW, rtol=1e-3)
    np.testing.assert_allclose(fitted.draws.irreducible, 1.5, rtol=1e-3)
    # In non-embedding parameters, the same losses are another law.
    other = scaling.fit(make_records(noise=0, seeds=1), "non_embedding_parameters", draws=20)
    assert other.law.size_exponent < 0.3


def test_the_fit_is_the_one_of_a_general_optimizer():
    """A bounded search over all five constants finds no smaller squared error."""
    records = make_records(noise=0.01, seed=3)
    sizes, tokens, losses = (
        np.array([getattr(r, field) for r in records]) for field in ("parameters", "tokens", "loss")
    )

    def residuals(constants):
        e, log_a, log_b, alpha, beta = constants
        return (
            power_law.Law(e, np.exp(log_a), np.exp(log_b), alpha, beta).loss(sizes, tokens) - losses
        )

    reference = min(
        (
            optimize.least_squares(
                residuals,
                (1.0, 5.0, 5.0, *start),
                bounds=([0, -20, -20, 0.02, 0.02], [9, 40, 40, 3, 3]),
                max_nfev=5000,
            )
            for start in ((0.3, 0.3), (0.5, 0.2), (0.2, 0.5))
        ),
        key=lambda found: found.cost,
    )
    error = ((power_law.fit(sizes, tokens, losses).loss(sizes, tokens) - losses) ** 2).sum()
    assert error <= 2 * reference.cost * (1 + 1e-6)


def test_constants_stay_nonnegative():
    """Losses that do not depend on the size, and have no irreducible part, have the constants 0
    there.
    """
    tokens = np.repeat([1e6, 1e7, 1e8], 3)
    law = power_law.fit(np.tile([1e5, 1e6, 1e7], 3), tokens, 30 * tokens**-0.2)
    assert law.size_factor == pytest.approx(0, abs=1e-6) and law.irreducible == pytest.approx(
        0, abs=1e-3
    )
    assert law.token_exponent == pytest.approx(0.2, rel=1e-3)
    rng = np.random.default_rng(0)
    columns, target = rng.standard_normal((50, 8, 3)), rng.standard_normal((50, 8))
    found = power_law._nonnegative(
        np.swapaxes(columns, 1, 2) @ columns,
        (np.swapaxes(columns, 1, 2) @ target[..., None])[..., 0],
    )
    for matrix, right, solution in zip(columns, target, found):
        np.testing.assert_allclose(solution, optimize.nnls(matrix, right)[0], atol=1e-9)


@pytest.mark.parametrize("is_trunk", [False, True])
def test_intervals_contain_the_constants(is_trunk):
    inside, covered = coverage(is_trunk, 30, 200)
    assert inside.mean() >= 0.85 and covered >= 0.6


def coverage(is_trunk: bool, draws: int, samples: int) -> tuple[np.ndarray, float]:
    """Returns how often the 95% intervals contain the constants, and the 80% interval of a
    prediction a new loss.
    """
    inside, covered = [], []
    new_size, new_tokens = 14_000_000, 280_000_000
    for seed in range(draws):
        fitted = scaling.fit(make_records(seed=seed, is_trunk=is_trunk), draws=samples, seed=seed)
        (new,) = make_records(seed=10_000 + seed, sizes=(new_size,), horizons=(20,), seeds=1)
        low, high = np.quantile(np.array(fitted.draws), [0.025, 0.975], axis=1)
        inside.append((low <= LAW) & (high >= LAW))
        (prediction,) = scaling.predict(fitted, [new_size], [new_tokens])
        covered.append(prediction.low <= new.loss <= prediction.high)
    return np.mean(inside, 0), np.mean(covered)


def test_the_bootstrap_draws_whole_runs_and_repeats_itself():
    records = make_records(is_trunk=True, seeds=2)
    counts = scaling._sample_runs(records, "parameters", 50, np.random.default_rng(1))
    assert counts.shape == (50, len(records)) and (counts.sum(-1) > 0).all()
    by_run = counts.reshape(50, -1, len(HORIZONS))
    assert (by_run == by_run[..., :1]).all() and counts.max() > 1
    sizes = (by_run[..., 0].reshape(50, len(SIZES), 2).sum(-1) > 0).sum(-1)
    assert sizes.min() >= scaling.MIN_SIZES
    first, second = (scaling.fit(records, draws=50, seed=1).draws for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"sizes": SIZES[:2], "horizons": HORIZONS[:2], "seeds": 1},
            "train 2 more runs, 1 more size$",
        ),
        (
            {"sizes": SIZES[:1], "horizons": HORIZONS[:1], "seeds": 1},
            "train 5 more runs, 2 more sizes, 2 more numbers of tokens$",
        ),
        ({"horizons": (20,), "seeds": 2}, "whose tokens per parameter differ by a factor of 1.5"),
    ],
)
def test_too_few_runs(options, message):
    with pytest.raises(UserError, match=message):
        scaling.fit(make_records(**options))


def test_a_held_out_rung_is_checked_beside_the_ranking_at_one_size():
    """Model b falls faster with size: it is worse at all trained sizes, better at the held-out one.
    The law sees it.
    """
    better_later = LAW._replace(size_factor=708.0, size_exponent=0.5)
    laws, large = {"a": LAW, "b": better_later}, {"sizes": (8_000_000,), "horizons": (20,)}
    trained = [scaling.fit(make_records(law, name, 0.001), draws=200) for name, law in laws.items()]
    held_out = [
        record
        for name, law in laws.items()
        for record in make_records(law, name, 0.001, 9, **large)
    ]
    predictions = [
        row
        for fitted in trained
        for row in scaling.predict_runs(
            fitted, [record for record in held_out if record.name == fitted.name]
        )
    ]
    baseline = {fitted.name: scaling.loss_of_largest(fitted.records) for fitted in trained}
    check = scaling.check_predictions(predictions, baseline, held_out)
    assert check.by_law == scaling.Decisions(("b", "a"), 1.0, 0.0)
    assert check.at_one_size.ranking == ("a", "b") and check.at_one_size.accuracy == 0
    regret = LAW.loss(8e6, 1.6e8) - better_later.loss(8e6, 1.6e8)
    assert check.at_one_size.regret == pytest.approx(regret, abs=0.002) and regret > 0.005
    assert all(abs(outcome.error) < 0.01 and outcome.seeds == 3 for outcome in check.outcomes)
    # Of three models in the order c, a, b, the order a, b, c has one of three pairs right.
    assert scaling.decisions(
        {"a": 1, "b": 2, "c": 3}, {"a": 2.0, "b": 2.5, "c": 1.5}
    ) == scaling.Decisions(("a", "b", "c"), 1 / 3, 0.5)


def test_decisions_are_about_the_longest_training():
    """The mean over both lengths would prefer the other model."""
    losses = {"early": (3.0, 2.9), "late": (4.0, 2.5)}
    predictions = [
        scaling.Prediction(name, 10, tokens, loss, 0, 9)
        for name in losses
        for tokens, loss in zip((10, 20), losses["early"])
    ]
    held_out = [
        scaling.Record(name, name, 0, 10, 10, 10, tokens, 1.0, loss)
        for name, both in losses.items()
        for tokens, loss in zip((10, 20), both)
    ]
    check = scaling.check_predictions(predictions, {"early": 3.5, "late": 3.6}, held_out)
    assert check.at_one_size == scaling.Decisions(("early", "late"), 0.0, pytest.approx(0.4))


def test_the_frontier_is_the_best_trained_size_at_each_budget():
    fitted = scaling.fit(make_records(noise=0, seeds=1), draws=20)
    low, high = 6 * 5 * SIZES[0] ** 2, 6 * 40 * SIZES[-1] ** 2
    found = scaling.frontier(fitted, np.geomspace(low, high, 5))
    assert (
        found.sizes[0] == SIZES[0]
        and found.sizes[-1] == SIZES[-1]
        and (np.diff(found.losses) < 0).all()
    )
    sizes = np.geomspace(SIZES[0], SIZES[-1], 500)
    assert found.losses[2] == pytest.approx(
        LAW.loss(sizes, found.budgets[2] / 6 / sizes).min(), abs=2e-3
    )
    np.testing.assert_allclose(found.sizes * found.tokens * 6, found.budgets, rtol=1e-6)


def test_the_frontier_stays_within_the_trained_tokens_per_parameter():
    """Sizes were trained on 1 to 2 tokens per parameter. The law would rather train a smaller size
    on more tokens.
    """
    fitted = scaling.fit(make_records(noise=0, seeds=2, horizons=(1, 1.5, 2)), draws=20)
    found = scaling.frontier(
        fitted, np.geomspace(fitted.values("flops").min(), fitted.values("flops").max(), 9)
    )
    ratios = found.tokens / found.sizes
    assert (ratios < 2.05).all() and (ratios > 0.95).all() and ratios.max() > 1.9
