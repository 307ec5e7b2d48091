"""The model to choose for a budget."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from decision_helpers import evidence, record, runs

from experiments import made_up
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.candidates import evidence_of
from smallgpt_jax.analysis.choice import Chooser, choose, default_choices
from smallgpt_jax.analysis.record import DecodingStep, Inference, Quartiles
from smallgpt_jax.errors import UserError

RESULTS = Path(__file__).parents[2] / "docs/results"


def near(loss: float, seeds: int = 3) -> list[float]:
    """Returns losses of several seeds around one."""
    return [loss + 0.004 * (seed - (seeds - 1) / 2) for seed in range(seeds)]


def decoding(milliseconds: float) -> Inference:
    times = Quartiles(milliseconds, milliseconds, milliseconds, 9)
    return Inference("cpu", "float32", 32, 1000, 10, None, (DecodingStep(1, "full", times),))


# ------------------------------------------------------------------ the committed records
def test_a_model_outside_a_window_of_the_budget_stays_in_the_contest():
    """mixers.json at 4.3e12 FLOPs: hybrid reached 3.1757 with fewer FLOPs than delta its 3.1854."""
    answer = choose(records.read(RESULTS / "mixers.json"), "flops", 4.3e12)
    standings = {one.model: one for one in answer.contest.standings}
    assert answer.contest.standings[0].model == "hybrid"
    assert answer.chosen is None
    assert standings["delta"].loss == pytest.approx(3.1854, abs=1e-4)
    assert answer.refusal == "more training"  # conv was trained with less than half of it


def test_a_model_just_above_the_budget_blocks_a_choice():
    """scaling.json at 4.11e10 FLOPs: within it are lgpt and cgpt; moe has 5.18 for 2.7% more."""
    answer = choose(records.read(RESULTS / "scaling.json"), "flops", 4.11e10)
    assert answer.chosen is None
    assert answer.refusal == "dearer"
    assert "moe" in answer.contest.blockers


# ------------------------------------------------------------------ training budgets
def test_the_best_model_at_a_budget_between_runs_is_interpolated():
    answer = choose(
        record(
            runs("a", near(4.0), steps=10), runs("a", near(3.0), steps=40),
            runs("b", near(4.2), steps=10), runs("b", near(3.3), steps=40),
        ),
        "flops",
        1.2e7,
    )  # fmt: skip
    assert (answer.chosen, answer.refusal, answer.compared_at) == ("a", None, 1.2e7)
    first = answer.contest.standings[0]
    assert (first.known, first.cost) == ("interpolated", 1.2e7)
    assert first.loss == pytest.approx(math.sqrt(12), abs=1e-3)
    assert first.tokens == pytest.approx(2000)


def test_a_cheaper_run_with_a_lower_loss_is_the_models_loss():
    """More training made a worse: who has the larger budget trains with the smaller one."""
    answer = choose(
        record(
            runs("a", near(3.0), steps=10), runs("a", near(3.6), steps=12),
            runs("b", near(3.4), steps=12), runs("b", near(3.5), steps=10),
        ),
        "flops",
        7.2e6,
    )  # fmt: skip
    assert answer.chosen == "a"
    assert answer.contest.standings[0].steps == 10
    assert [point.name for point in answer.front] == ["a"]


def test_a_model_that_was_trained_with_less_may_be_the_best_with_the_whole_budget():
    """a falls from 3.6 to 3.2 with twice the FLOPs, so with 2.5 times more it may be below b."""
    groups = (
        runs("a", near(3.6), steps=10), runs("a", near(3.2), steps=20),
        runs("b", near(3.9), steps=25), runs("b", near(3.1), steps=50),
        runs("c", near(4.4), steps=25), runs("c", near(3.9), steps=50),
    )  # fmt: skip
    assert choose(record(*groups), "flops", 3e7, models=("b", "c")).chosen == "b"
    answer = choose(record(*groups), "flops", 3e7)
    assert (answer.chosen, answer.refusal) == (None, "more training")
    assert answer.contest.blockers == ("a",)
    (a,) = (one for one in answer.contest.standings if one.model == "a")
    assert (a.known, a.loss) == ("cheaper", pytest.approx(3.2))
    assert [one.model for one in answer.contest.trained] == ["b"]
    slope = math.log(3.6 / 3.2) / math.log(2)
    assert a.potential == pytest.approx(3.2 * 2.5**-slope, abs=1e-3)


def test_single_seeds_of_four_models_have_the_spread_of_the_record():
    """At size s, three models have three seeds, which tell how much losses vary."""
    groups = []
    for model, losses in (
        ("a", [4.0, 4.01, 4.03]),
        ("b", [4.3, 4.33, 4.31]),
        ("c", [4.5, 4.5, 4.52]),
    ):
        groups.append(runs(f"{model}@s", losses, steps=10))
    for model, loss in (("a", 3.0), ("b", 3.5), ("c", 3.6), ("d", 3.7)):
        groups.append(runs(f"{model}@m", [loss], steps=40, parameters=2000))
    answer = choose(record(*groups), "flops", 4.8e7)
    assert answer.contest.standings[0].interval is not None
    assert answer.refusal != "few seeds"


def test_a_model_that_is_worse_wherever_both_were_trained_does_not_block():
    """b was not trained with as little as a, but is much worse where both were."""
    answer = choose(
        record(
            runs("a", near(4.0), steps=10), runs("a", near(3.0), steps=40),
            runs("b", near(5.0), steps=40), runs("b", near(4.0), steps=160),
        ),
        "flops",
        1.2e7,
    )  # fmt: skip
    assert answer.chosen == "a"
    assert answer.contest.standings[1].known == "dearer"
    assert answer.contest.standings[1].potential > 4.9


def test_sizes_that_only_one_model_has_do_not_make_it_better():
    """At 2e7 FLOPs, a is best at size m, which b was not trained at. At size s, they are equal."""
    groups = (
        runs("a@s", near(4.0), steps=10), runs("a@s", near(3.6), steps=40),
        runs("a@m", near(3.9), steps=10, parameters=2000),
        runs("a@m", near(3.0), steps=40, parameters=2000),
        runs("b@s", near(4.0)[::-1], steps=10), runs("b@s", near(3.6)[::-1], steps=40),
    )  # fmt: skip
    answer = choose(record(*groups), "flops", 2e7)
    assert answer.chosen is None
    assert answer.contest.standings[0].name == "a@m"
    assert answer.contest.standings[1].potential == pytest.approx(
        answer.contest.standings[0].loss, abs=0.01
    )


def test_there_is_no_answer_far_beyond_the_runs_or_below_them():
    groups = runs("a", near(3.0), steps=10), runs("b", near(3.5), steps=10)
    beyond = choose(record(*groups), "flops", 1e7)
    assert (beyond.chosen, beyond.refusal, beyond.compared_at) == (None, "beyond", 6e6)
    assert beyond.factor == pytest.approx(1e7 / 6e6)
    assert beyond.contest.chosen == "a"
    below = choose(record(*groups), "flops", 3e6)
    assert (below.chosen, below.refusal, below.factor) == (None, "nothing within", 0.5)


def test_the_best_learning_rate_counts():
    answer = choose(
        record(
            runs("a", near(3.0), rate=0.01), runs("a", near(3.4), rate=0.02),
            runs("b", near(3.2), rate=0.01), runs("b", [math.inf] * 3, rate=0.02),
        ),
        "flops",
        6e7,
    )  # fmt: skip
    assert answer.chosen == "a"
    assert [one.learning_rate for one in answer.contest.standings] == [0.01, 0.01]
    assert [one.diverged for one in answer.contest.standings] == [0, 0]


# ------------------------------------------------------------------ other budgets
@pytest.mark.parametrize(
    ("steps", "limits"),
    [
        # 1e5 is below all costs
        ({"a": [1, 1000], "c": [100, 10_000]}, [1e6, 1e7, 1e8, 6e8, 1e9]),
        ({"a": [1, 200], "c": [1, 1000]}, [1e6, 1e7, 1e8, 1e9]),  # all reach 1.2e8, near 1e8
        # c alone was trained with 6e9, and with nothing less
        ({"c": [10_000]}, [1e6, 1e7, 1e8, 6e8, 1e9]),
    ],
)
def test_a_report_asks_about_powers_of_ten_that_several_models_were_trained_with(steps, limits):
    """A step takes 6e5 FLOPs."""
    steps = {"b": [1, 3, 10, 30, 100, 300, 1000], "d": [1, 3, 10, 30, 100, 300, 1000], **steps}
    groups = []
    for model, counts in steps.items():
        for count in counts:
            groups.append(runs(model, near(5.0 - math.log10(count) / 4), steps=count))
    choices = default_choices(evidence_of(record(*groups)))
    asked = [one.limit for one in choices if one.budget == "flops"]
    assert asked == [pytest.approx(limit) for limit in limits]


def test_a_dearer_model_competes_in_a_report():
    """It may be the better one, though its mean loss is higher."""
    few = (runs("a", [3.0, 3.1], parameters=1000), runs("b", [2.99, 3.14], parameters=1200))
    asked = {one.limit: one for one in default_choices(evidence_of(record(*few)))}
    assert {one.model for one in asked[1200].contest.standings} == {"a", "b"}


def test_limits_are_met_by_trained_models_without_their_shorter_runs():
    groups = (
        runs("a@s", near(3.5), parameters=1000), runs("a@m", near(3.0), parameters=2000),
        runs("b@s", near(3.8), parameters=1000), runs("b@m", near(3.3), parameters=2100),
        runs("a@s", near(2.0), parameters=1000, steps=50, horizon=0.5),
    )  # fmt: skip
    answer = choose(record(*groups), "parameters", 2050)
    assert (answer.chosen, answer.contest.standings[0].name) == ("a", "a@m")
    assert {one.name for one in answer.contest.standings} == {"a@m", "b@s"}
    assert choose(record(*groups), "parameters", 1500).contest.standings[0].name == "a@s"
    assert choose(record(*groups), "parameters", 900).refusal == "nothing within"


def test_a_model_without_the_measurement_blocks_while_it_may_be_the_best():
    fast = runs("a", near(3.5), inference=decoding(1.0))
    slow = runs("b", near(3.6), inference=decoding(2.0))
    assert choose(record(fast, slow, runs("c", near(4.0))), "decode_ms", 2).chosen == "a"
    answer = choose(record(fast, slow, runs("c", near(3.4))), "decode_ms", 2)
    assert (answer.chosen, answer.refusal) == (None, "not measured")
    assert answer.contest.blockers == ("c",)
    assert answer.contest.standings[0].model == "a"  # of those that are known to fit
    unmeasured = (runs("c@s", near(4.0)), runs("c@m", near(3.4)))
    standings = choose(record(fast, slow, *unmeasured), "decode_ms", 2).contest.standings
    assert [one.name for one in standings] == ["a", "b", "c@m"]
    assert standings[2].loss == pytest.approx(3.4, abs=0.05)
    assert choose(record(runs("a", near(3.5))), "decode_ms", 2).refusal == "no cost"


def test_several_devices_are_named():
    other = dataclasses.replace(decoding(2.0), device="gpu")
    groups = runs("a", near(3.5), inference=decoding(1.0)), runs("b", near(3.6), inference=other)
    assert choose(record(*groups), "decode_ms", 2).devices == ("cpu", "gpu")


# ------------------------------------------------------------------ equal models
def test_models_of_one_function_are_one_contender_the_cheaper_one():
    """Two names of one function would share its probability of being best."""
    groups = (
        runs("a", near(3.0), parameters=2000),
        runs("same", near(3.0002), parameters=1000),
        runs("b", near(3.4), parameters=1000),
    )
    answer = choose(record(*groups), "parameters", 2000)
    assert answer.chosen == "same"
    assert answer.contest.standings[0].equal_to == ("a",)
    assert len(answer.contest.standings) == 2


def test_cgpt_with_kernel_1_is_lgpt_though_rounding_tells_their_losses_apart():
    def model(name, losses, **config):
        settings = {"model.architecture": name, "model.name": "", **config}
        return runs(name, losses, config=settings)

    lgpt = model("lgpt", near(3.0))
    one = evidence(lgpt, model("cgpt", near(3.02), **{"model.conv_kernel": 1}))
    three = evidence(lgpt, model("cgpt", near(3.02), **{"model.conv_kernel": 3}))
    assert one.equal == (("lgpt", "cgpt"),)
    assert three.equal == (("lgpt",), ("cgpt",))


def test_solved_tasks_have_equal_losses_without_being_one_function():
    assert len(evidence(runs("a", [1e-5, 2e-5]), runs("b", [3e-5, 1e-5])).equal) == 2


@pytest.mark.parametrize("losses", [([3.21], [3.2105]), ([2.7726, 2.7727], [2.7725, 2.7726])])
def test_a_coincidence_makes_no_equal_function(losses):
    """Single losses, and models at chance on a task with 16 answers, log(16) = 2.7726."""
    one, other = losses
    assert len(evidence(runs("a", one), runs("b", other)).equal) == 2


def test_an_equal_model_that_was_trained_with_more_does_not_replace_one_within_the_budget():
    """same was trained with 8 and 64 times the budget of a."""
    groups = (
        runs("a", near(3.2), flops=1e9, steps=100), runs("a", near(3.0), flops=64e9, steps=6400),
        runs("same", near(3.1), flops=8e9, steps=800), runs("same", near(3.0), flops=64e9, steps=6400),
        runs("b", near(3.5), flops=1e9, steps=100), runs("b", near(3.3), flops=64e9, steps=6400),
    )  # fmt: skip
    answer = choose(record(*groups), "flops", 1e9)
    assert answer.chosen == "a"
    assert answer.contest.standings[0].equal_to == ("same",)


def test_a_seed_whose_time_is_unknown_does_not_remove_its_model():
    best, other = runs("best", near(3.0)), runs("b", near(3.5))
    timed = []
    for number, run in enumerate([*best, *other]):
        point = dataclasses.replace(run.curve[-1], seconds=10.0 if number else None)
        timed.append(dataclasses.replace(run, curve=(point,)))
    assert choose(record(timed), "seconds", 10.0).chosen == "best"


def test_a_solved_task_is_chosen_for_a_training_budget():
    answer = choose(
        record(runs("a", [0.0, 0.0]), runs("b", near(1.0, 2)), runs("b", near(0.5, 2), steps=50)),
        "flops",
        6e7,
    )
    assert answer.contest.standings[0].model == "a"


def test_runs_are_paired_by_one_kind_of_seed():
    """One run of a has another data.seed than train.seed; b has the order 7 as well."""
    fields = [{"data.seed": 7}, {"data.seed": 8}]
    a = runs("a", {0: 3.0}, config=fields[0])
    b = [*runs("b", {0: 3.1}, config=fields[0]), *runs("b", {1: 3.3}, config=fields[1])]
    one, other = evidence(a, b).candidates
    assert (one.losses, other.losses) == ({7: 3.0}, {7: 3.1, 8: 3.3})


# ------------------------------------------------------------------ errors
def test_what_cannot_be_asked():
    unfinished = [dataclasses.replace(run, is_finished=False) for run in runs("a", [3.0])]
    with pytest.raises(UserError, match="no finished run"):
        choose(record(unfinished), "flops", 1e9)
    with pytest.raises(UserError, match="below one training step, which takes 6e\\+05"):
        choose(record(runs("a", [3.0])), "flops", 1e5)
    prefix = runs("b", [3.0], config={"train.objective": "prefix"})
    with pytest.raises(UserError, match="different"):
        choose(record(runs("a", [3.0]), prefix), "flops", 6e7)


# ------------------------------------------------------------------ properties
def made_up_contest(kind: str, rng: np.random.Generator, seeds_of=None):
    """Returns the candidates within a random budget, which is between those of runs, and the contest
    there; `seeds_of(number of the model)` replaces the seeds of models.
    """
    seeds = 6 if seeds_of else int(rng.integers(2, 5))
    design = made_up.Design(kind, int(rng.integers(2, 6)), seeds, sizes=3)
    drawn = made_up.draw_models(design, 0.05 * rng.random(), rng)
    if seeds_of:
        drawn = [dataclasses.replace(m, seeds=seeds_of(number)) for number, m in enumerate(drawn)]
    made = evidence_of(made_up.make_record(design, drawn, 0.8 * rng.random(), rng))
    budget = math.exp(rng.uniform(math.log(1e12), math.log(1e14)))
    within = [one for one in made.candidates if one.flops <= budget]
    return within, Chooser(made, "flops").contest(budget)


@pytest.mark.slow
@pytest.mark.parametrize("kind", made_up.KINDS)
def test_a_dominated_model_is_never_named(kind):
    """The chosen, and the first of those that may be the best, has the lowest loss of all runs
    within the budget.
    """
    rng = np.random.default_rng(len(kind))
    for _ in range(40):
        models, seeds = int(rng.integers(2, 6)), int(rng.integers(2, 5))
        design = made_up.Design(kind, models, seeds, sizes=3)
        drawn = made_up.draw_models(design, 0.05 * rng.random(), rng)
        evidence = evidence_of(made_up.make_record(design, drawn, 0.8 * rng.random(), rng))
        budget = math.exp(rng.uniform(math.log(1e12), math.log(2e14)))
        answer = Chooser(evidence, "flops").choice(budget)
        within = [one.loss for one in evidence.candidates if one.flops <= budget]
        if answer.contest and answer.compared_at == answer.limit:
            first = answer.contest.standings[0]
            assert answer.chosen in (None, first.model)
            assert first.loss <= min(within) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [None, (3, 4, 5), (2, 3, 4)])
def test_with_other_seeds_too_no_model_is_named_that_is_worse_than_each_run_of_another(seeds):
    """Every second model was trained elsewhere, with other seeds, or each has its own number."""
    rng = np.random.default_rng(5)
    kind, seeds_of = "unequal seeds", None
    if seeds:
        kind, seeds_of = "normal", lambda number: seeds if number % 2 else (0, 1, 2)
    for _ in range(25):
        within, found = made_up_contest(kind, rng, seeds_of)
        first = found.standings[0]
        assert found.chosen in (None, first.model)
        most = max(len(one.losses) for one in within)
        for one in within:
            # Expected losses are those over all orders; with fewer, a model may have had easy ones.
            if len(one.losses) == most:
                assert max(one.losses.values()) >= first.loss
