"""The setup, learning rates, curves and measures of a record."""

import dataclasses
import math

import pytest
from comparison_helpers import SESSION, TEXT, record, run

from smallgpt_jax.analysis import description
from smallgpt_jax.analysis.findings import Range, Spread
from smallgpt_jax.analysis.further_measures import find_measures
from smallgpt_jax.analysis.record import Grid, GridRate, Point, TextLoss, TrainingText


def test_the_setup_of_a_record():
    """The text has 1,000 tokens, of which the longest run reads 500. The shorter run has copied
    half of its steps.
    """
    long = run("gpt@1M", 1, 3.0, tokens_per_step=250.0)
    short = run(
        "gpt@1M",
        2,
        3.0,
        horizon=0.5,
        is_finished=False,
        config={"train__trunk": "/elsewhere"},
        sessions=(dataclasses.replace(SESSION, first_step=1, time="2026-11-25T00:00:00+00:00"),),
    )
    small = run("pgpt@0.5M", 1, 3.0, active_parameters=50, parameters=50)
    setup = description.describe_setup(record(long, small, short))
    assert (setup.corpus.tokens, setup.corpus.most_read) == (1000, 0.5)
    assert (setup.models, setup.sizes) == (("gpt", "pgpt"), ("0.5M", "1M"))
    assert setup.parameters == Range(50, 100) and setup.tokens == Range(200, 500)
    assert setup.hours == pytest.approx((2 + 2 + 1) / 3600)  # each run takes two seconds
    assert (setup.runs, setup.unfinished, setup.validation_tokens) == (2, 1, 512)
    assert setup.dates == ("2026-11-23", "2026-11-25")
    assert (setup.devices, setup.software) == (("1 × cpu",), ("jax 1",))
    assert description.describe_setup(record()) is None


def test_a_mixture_is_repeated_if_one_of_its_texts_is():
    """A tenth of the run's 200 tokens is from a text of 10 tokens."""
    store = TEXT["description"]
    small = {**store, "splits": {"train": {"tokens": 10}, "validation": {"tokens": 10}}}
    mixture = {"mixture": [{"weight": 0.9, **store}, {"weight": 0.1, **small}]}
    one = run("gpt", 1, 3.0, text=TrainingText(mixture, "0"))
    corpus = description.describe_setup(record(one)).corpus
    assert (corpus.tokens, corpus.most_read) == (1010, pytest.approx(2.0))


@pytest.mark.parametrize("center, curvature", [(1.3, 0.02), (0.8, 0.5)])
def test_the_minimum_of_a_parabola(center, curvature):
    def loss(multiple: float) -> float:
        return 3 + curvature / 2 * math.log(multiple / center) ** 2

    grid = Grid(6, 0.01, tuple(GridRate(x, loss(x), False) for x in (0.25, 1.0, 3.0)))
    (rates,) = description.describe_rates(record(learning_rates={"gpt": grid}))
    assert rates.minimum == pytest.approx(center)


@pytest.mark.parametrize(
    "losses",
    [
        {0.5: 3.0, 1.0: 2.0},
        {0.5: 3.0, 1.0: 2.0, 2.0: math.inf},
        {0.5: 3.0, 1.0: None, 2.0: 3.0},
        {0.5: 3.0, 1.0: 3.0, 2.0: 3.0},
        {0.5: math.inf, 1.0: math.inf, 2.0: math.inf},
    ],
)
def test_no_minimum_without_three_different_losses_around_the_best(losses):
    rates = []
    for multiple, loss in losses.items():
        diverged = loss == math.inf
        rates.append(GridRate(multiple, None if diverged else loss, diverged))
    (found,) = description.describe_rates(
        record(learning_rates={"gpt": Grid(6, 0.01, tuple(rates))})
    )
    assert found.minimum is None


def test_rates_within_the_spread_over_seeds_may_be_best():
    """Two standard deviations of the difference of two runs: 2 · √2 · 0.1 = 0.28."""
    runs = [run("gpt", seed, loss) for seed, loss in ((7, 2.9), (8, 3.0), (9, 3.1))]
    grid = Grid(
        6, 0.01, tuple(GridRate(x, y, False) for x, y in ((0.5, 3.27), (1.0, 3.0), (2.0, 3.3)))
    )
    (rates,) = description.describe_rates(record(*runs, learning_rates={"gpt": grid}))
    assert rates.plausible == (0.5, 1.0)


@pytest.mark.parametrize("of_other", [[2.9, 3.0, 3.1], [3.0]])
def test_rates_of_one_seed_may_be_best_by_the_spread_of_other_models(of_other):
    """Without a spread, any rate may be the best."""
    runs = [run("gpt", 7, 3.0)]
    runs += [run("llama", seed, loss) for seed, loss in enumerate(of_other)]
    grid = Grid(6, 0.01, tuple(GridRate(x, y, False) for x, y in ((1.0, 3.0), (2.0, 3.3))))
    (rates,) = description.describe_rates(record(*runs, learning_rates={"gpt": grid}))
    assert rates.plausible == ((1.0,) if len(of_other) > 1 else (1.0, 2.0))


def test_curves_have_the_steps_of_all_seeds_on_the_last_rows():
    one, other = run("gpt", 1, 3.0), run("gpt", 2, 3.2)
    early = Point(1, 100, None, None, 9.0, 1.5, 7)  # on other rows
    other = dataclasses.replace(other, curve=(early, other.curve[1]))
    (curve,) = description.describe_curves([one, other])
    (point,) = curve.points
    assert point.tokens == 200 and point.loss == Spread(pytest.approx(3.1), 3.0, 3.2)
    other = dataclasses.replace(other, curve=(early,))
    assert description.describe_curves([one, other]) == ()


def test_measures_of_finished_runs():
    text = TextLoss(2, "own", "books.txt", 128, 1.25, "f")
    runs = [
        run("gpt", 1, 3.0, benchmarks={"copa acc": 0.5}, texts=(text,)),
        run("gpt", 2, 3.0, benchmarks={"copa acc": 0.7}),
        run("gpt", 3, 3.0, is_finished=False, benchmarks={"copa acc": 0.0}),
        run("pgpt", 1, 3.0, benchmarks={"copa acc": 0.4}),
        run("pgpt", 2, 3.0, benchmarks={"copa acc": 0.5}),
    ]
    measures = find_measures(runs, "gpt", pair_level=None)
    by_name = {(one.kind, one.measure): one for one in measures}
    assert by_name["benchmark", "copa acc"].spreads["gpt"] == Spread(0.6, 0.5, 0.7)
    assert by_name["text", "own × 2"].spreads == {"gpt": Spread(1.25, 1.25, 1.25)}
    assert by_name["memory", "memory_bytes"].spreads["gpt"].mean == 10**6
    (pair,) = by_name["benchmark", "copa acc"].pairs
    assert (pair.model, pair.other, pair.seeds) == ("pgpt", "gpt", 2)
    assert pair.difference == pytest.approx(-0.15)
    assert by_name["memory", "memory_bytes"].pairs == ()
