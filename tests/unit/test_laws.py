"""Laws of losses over sizes and lengths, their predictions, and how many decisions they get right."""

import dataclasses
import math

import pytest
from comparison_helpers import record, run

from smallgpt_jax.analysis import laws
from smallgpt_jax.analysis.findings import Contest, Decisions, Pair
from smallgpt_jax.analysis.laws import LawPoint
from smallgpt_jax.analysis.record import Run

SIZES = {"1M": 1e6, "2M": 2e6, "4M": 4e6, "8M": 8e6}
LENGTHS = (5, 10, 20)  # tokens per parameter


def loss_of(model: str, parameters: float, tokens: float) -> float:
    """Returns a loss whose logarithm has the form "size times tokens"; that of llama is lower."""
    n, d = math.log(parameters), math.log(tokens)
    shift = -0.02 if model == "llama" else 0.0
    return math.exp(6.0 - 0.2 * n - 0.2 * d + 0.006 * n * d + shift)


def runs(model: str = "gpt", sizes=tuple(SIZES), error: float = 0.0) -> list[Run]:
    """Returns runs of two seeds, whose losses differ by 2%. `error` is added at size 8M."""
    found = []
    for size in sizes:
        for ratio in LENGTHS:
            for seed, factor in ((1, 0.99), (2, 1.01)):
                parameters = round(SIZES[size])
                tokens = ratio * SIZES[size]
                loss = factor * loss_of(model, parameters, tokens) + error * (size == "8M")
                one = run(
                    f"{model}@{size}",
                    seed,
                    loss,
                    parameters=parameters,
                    tokens_per_step=tokens / 2,
                    horizon=ratio / 20,
                )
                found.append(one)
    return found


def test_only_smaller_sizes_predict_the_largest_that_all_models_have():
    """gpt has 1M to 8M, llama 1M to 4M: 4M is predicted, and gpt at 8M tells nothing of it."""
    both = [*runs(), *runs("llama", sizes=("1M", "2M", "4M"), error=0.0)]
    assert laws.find_laws(record(*both), lambda size: None).size == "4M"
    worse = [*runs(error=9.0), *runs("llama", sizes=("1M", "2M", "4M"))]
    assert laws.find_laws(record(*worse), lambda size: None).error == pytest.approx(0, abs=1e-9)


def test_models_without_a_common_size_have_no_law():
    """Each of four models lacks one of four sizes."""
    points = []
    for model, missing in zip("abcd", SIZES):
        points += laws.law_points(runs(model, tuple(size for size in SIZES if size != missing)))
    wanted = [LawPoint(model, "16M", 16e6, 320e6) for model in "abcd"]
    found = laws.predict(points, wanted)
    assert found.losses == ()
    assert found.not_predicted == dict.fromkeys("abcd", "common sizes")


def planned(size: str = "8M") -> list[LawPoint]:
    return [LawPoint("gpt", size, round(SIZES[size]), ratio * SIZES[size]) for ratio in LENGTHS]


def test_the_form_that_predicts_the_largest_size_is_used():
    found = laws.find_laws(record(*runs()), lambda size: None)
    assert found.size == "8M"
    assert found.form == "size times tokens" and found.error == pytest.approx(0, abs=1e-9)
    assert laws.fit(found.form, laws.law_points(runs())) == pytest.approx(
        {"1": 6.0, "log N": -0.2, "log D": -0.2, "log N · log D": 0.006}, rel=1e-6
    )


def test_predictions_have_the_error_of_the_largest_size_that_was_fitted():
    """Losses at 4M are 0.1 above the law, so the half-width of the intervals is 0.1."""
    fitted = runs(sizes=("1M", "2M", "4M"))
    shifted = []
    for one in fitted:
        point = one.curve[-1]
        if one.size == "4M":
            point = dataclasses.replace(point, loss=point.loss + 0.1)
        shifted.append(dataclasses.replace(one, curve=(point,)))
    predictions = laws.predictions_of(shifted, planned(), "8M", "2026-11-25T10:00:00", "compare …")
    rows = predictions.predictions["parameters"]
    assert [(row.name, row.size, row.tokens) for row in rows] == [
        ("gpt", 8e6, ratio * 8e6) for ratio in LENGTHS
    ]
    assert all(row.high - row.loss == pytest.approx(0.1, abs=0.01) for row in rows)
    exact = laws.predictions_of(fitted, planned(), "8M", "", "").predictions["parameters"]
    for row in exact:
        assert row.loss == pytest.approx(loss_of("gpt", row.size, row.tokens), rel=1e-6)
    assert (
        predictions.records_sha256
        != laws.predictions_of(fitted, planned(), "8M", "", "").records_sha256
    )


@pytest.mark.parametrize(
    "sizes, lengths, lack",
    [(("1M", "2M"), 3, "sizes"), (("1M", "2M", "4M"), 1, ""), (("1M", "2M", "4M"), 3, "")],
)
def test_what_a_law_needs(sizes, lengths, lack):
    points = [
        LawPoint("gpt", size, SIZES[size], ratio * SIZES[size])
        for size in sizes
        for ratio in LENGTHS[:lengths]
    ]
    assert laws.missing_for_law(points) == lack
    few = [one for one in runs(sizes=sizes) if one.size in sizes]
    predictions = laws.predictions_of(few, planned(), "8M", "", "")
    assert predictions.not_predicted == ({"gpt": lack} if lack else {})


def test_predictions_are_checked_against_the_trained_losses():
    """The losses at 8M are 0.05 above the predictions, whose intervals are narrower."""
    everything = runs(error=0.05)
    fitted = [one for one in everything if one.size != "8M"]
    predictions = laws.predictions_of(fitted, planned(), "8M", "2026-11-25T10:00:00", "c")
    content = record(*everything, held_out="8M", predictions=predictions)
    found = laws.check_predictions(content, lambda size: None)
    assert (found.error, found.coverage) == (pytest.approx(0.05, abs=1e-6), 0.0)
    assert [one.seeds for one in found.outcomes] == [2, 2, 2]
    untrained = laws.check_predictions(
        record(*fitted, held_out="8M", predictions=predictions), lambda size: None
    )
    assert untrained.error is None and untrained.outcomes[0].loss is None
    assert laws.check_predictions(record(*everything), lambda size: None) is None


def test_only_decided_pairs_count():
    """At 8M, llama is decided to be higher than gpt, against the laws and the order at 4M."""
    content = record(*runs(), *runs("llama"))
    pair = Pair("llama", "gpt", 2, 0.1, None, 0.01, "higher", None)
    decided = Contest((), (pair,), None, "uncertain", (), 0.0)
    found = laws.find_laws(content, lambda size: decided if size == "8M" else None)
    assert found.by_law == found.by_largest_size == Decisions(0, 1)
    right = Contest((), (dataclasses.replace(pair, verdict="lower"),), None, "uncertain", (), 0.0)
    found = laws.find_laws(content, lambda size: right)
    assert found.by_law == Decisions(1, 1)
    open_pair = dataclasses.replace(pair, verdict="cannot tell")
    found = laws.find_laws(
        content, lambda size: Contest((), (open_pair,), None, "uncertain", (), 0.0)
    )
    assert found.by_law == Decisions(0, 0)


def test_a_solved_task_has_a_law():
    """Its mean loss is exactly 0, whose logarithm is not finite."""
    points = []
    for size, parameters in SIZES.items():
        for ratio in LENGTHS:
            is_solved = (size, ratio) == ("4M", 20)
            tokens = ratio * parameters
            points.append(LawPoint("gpt", size, parameters, tokens, 0.0 if is_solved else 1.0))
    for form in laws.FORMS:
        assert all(map(math.isfinite, laws.fit(form, points).values()))


def test_diverged_runs_determine_no_law():
    diverged = [dataclasses.replace(one, diverged=one.size != "8M") for one in runs()]
    assert laws.find_laws(record(*diverged), lambda size: None) is None
