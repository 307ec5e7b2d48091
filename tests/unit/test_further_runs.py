"""Which runs are worth training: further seeds, the verdicts on a record whose seeds were added as
needed, and the single run that is worth most, with the command that trains it.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
from comparison_helpers import config_of, run, saved
from conftest import call
from decision_helpers import evidence, record, runs
from scipy import stats

from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.analysis.candidates import level_of_pair
from smallgpt_jax.analysis.further_runs import Rounds, expected_gain, next_runs, next_seeds
from smallgpt_jax.analysis.record import Grid, GridRate
from smallgpt_jax.comparison.merging import merge
from smallgpt_jax.errors import UserError
from smallgpt_jax.report import page
from smallgpt_jax.report.choosing import choose, choose_next

COMMAND = "python -m smallgpt_jax.compare --config=configs/compare/scaling.py:tiny --output=runs/s"
ROUNDS = Rounds(first=3, most=8, stake=0.01, pair_level=0.05)
CLOSE = [3.00, 3.10, 3.05]
CLOSE_TOO = [3.08, 3.04, 3.06]


def counts(**losses) -> tuple[int, ...]:
    return tuple(next_seeds(losses, ROUNDS).values())


def test_only_close_models_get_another_seed():
    assert counts(a=CLOSE, b=CLOSE_TOO, c=[9.0, 9.02, 9.01]) == (4, 4, 3)


def test_the_pair_gets_a_seed_that_both_have():
    """b has one seed more than a, from a pair with another model."""
    assert counts(a=CLOSE, b=[*CLOSE_TOO, 3.05]) == (4, 4)


def test_a_large_difference_gets_seeds_until_it_is_told():
    """Little is at stake, because b is hardly better, but three seeds are too few to be sure."""
    a, b = [3.0, 3.02, 3.01, 3.01, 3.0, 3.02], [3.06, 3.09, 3.06, 3.08, 3.07, 3.08]
    count = 3
    while counts(a=a[:count], b=b[:count]) == (count + 1, count + 1):
        count += 1
    assert count == 4


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([3.001, 3.101, 3.0505], id="hardly anything at stake"),
        pytest.param([3.0, math.inf, 3.1], id="diverged"),
        pytest.param([9.0, 9.1, 9.05], id="told"),
    ],
)
def test_no_seeds_are_added(other):
    assert counts(a=CLOSE, b=other) == (3, 3)


def test_no_more_than_the_most_seeds_are_added():
    a, b = [3.0, 3.2] * 4, [3.2, 3.0] * 4
    assert counts(a=a[:7], b=b[:7]) == (8, 8)
    assert counts(a=a, b=b) == (8, 8)


def test_the_level_is_divided_among_the_pairs_of_each_size():
    assert level_of_pair(["a", "b", "c", "a"]) == pytest.approx(0.05 / 3)
    assert level_of_pair(["a@1", "b@1", "a@2", "b@2", "c@2"]) == pytest.approx(0.05 / 4)
    assert level_of_pair(["a"]) == 0.05


# ------------------------------------------------------------------ verdicts
def looked_at(*groups):
    return dataclasses.replace(record(*groups), seeds_as_needed=True)


def test_a_fixed_test_is_not_applied_to_seeds_that_were_added():
    groups = runs("a", [3.0, 3.02, 3.01]), runs("b", [3.06, 3.09, 3.06])
    fixed, as_needed = analyse(record(*groups)), analyse(looked_at(*groups))
    assert fixed.ranking.chosen == "a" and fixed.ranking.pair("b", "a").verdict == "higher"
    assert as_needed.ranking.chosen is None and as_needed.ranking.blockers == ("b",)
    assert as_needed.ranking.pair("b", "a").verdict == "cannot tell"
    assert fixed.choices[-1].chosen == "a" and as_needed.choices[-1].chosen is None


def test_further_seeds_tell_and_the_interval_excludes_zero():
    a, b = [3.0, 3.02, 3.01, 3.01, 3.0], [3.1, 3.13, 3.1, 3.12, 3.11]
    ranking = analyse(looked_at(runs("a", a), runs("b", b))).ranking
    pair = ranking.pair("b", "a")
    assert ranking.chosen == "a" and pair.verdict == "higher" and pair.interval.low > 0
    assert (pair.interval.low + pair.interval.high) / 2 == pytest.approx(np.mean(b) - np.mean(a))


def test_only_seeds_that_both_have_count():
    """The fourth seed of b is much lower, which says nothing about a."""
    a, b = [3.0, 3.1, 3.2], [3.2, 3.29, 3.41]
    few = analyse(looked_at(runs("a", a), runs("b", b))).ranking.pair("b", "a")
    more = analyse(looked_at(runs("a", a), runs("b", [*b, 2.0]))).ranking.pair("b", "a")
    assert few.seeds == more.seeds == 3
    assert more.interval.low == pytest.approx(few.interval.low)


def test_the_report_says_that_verdicts_hold_after_each_seed():
    groups = runs("a", CLOSE), runs("b", CLOSE_TOO)
    fixed, added = record(*groups), looked_at(*groups)
    line = "Verdicts hold after each seed"
    assert line in page.summary(added, analyse(added))
    assert line in page.markdown(added, analyse(added))
    assert line not in page.summary(fixed, analyse(fixed))


def test_a_merged_record_stays_one_whose_seeds_were_added(tmp_path):
    fixed = record(runs("a", [3.0, 3.1]))
    added = dataclasses.replace(record(runs("b", [3.0, 3.1])), seeds_as_needed=True)
    assert merge([(tmp_path / "a", fixed), (tmp_path / "b", added)], "").seeds_as_needed
    assert not merge([(tmp_path / "a", fixed)], "").seeds_as_needed


# ------------------------------------------------------------------ the run that is worth most
@pytest.mark.parametrize("lead", [0.0, 0.05, 0.3])
def test_the_gain_of_two_models_is_that_of_the_closed_form(lead):
    """Their difference moves by a normal number with the deviation s; with the lead d, the minimum
    is lower by s·φ(d/s) − d·Φ(−d/s).
    """
    variances, noise = np.array([0.04, 0.01]), 0.09
    gain = expected_gain(np.array([3.0, 3.0 + lead]), np.diag(variances), 0, noise)
    s = 0.04 / math.sqrt(0.04 + noise)
    expected = s * stats.norm.pdf(lead / s) - lead * stats.norm.cdf(-lead / s)
    assert gain == pytest.approx(expected, rel=0.02, abs=1e-4)


def test_the_run_that_tells_most_per_flop_comes_first():
    """a and b are close; c is not. At size 2, the same losses cost ten times as much."""
    losses = {"a": [3.0, 3.1, 3.2], "b": [3.2, 3.0, 3.12], "c": [9.0, 9.05, 9.2]}
    made = []
    for size, parameters in ((1, 100), (2, 1000)):
        for model, of_model in losses.items():
            made.append(runs(f"{model}@{size}", of_model, parameters=parameters))
    worth = next_runs(evidence(*made))
    assert {one.name for one in worth[:2]} == {"a@1", "b@1"}
    assert all(one.seed == 3 and 0 < one.gain < one.at_stake for one in worth[:2])
    of_c = next(one for one in worth if one.name == "c@1")
    assert of_c.gain < 1e-6 and worth[0].flops == 6 * 100 * 100 * 100


def test_a_seed_that_others_have_tells_more():
    a, b = [3.0, 3.9, 3.4, 3.6], [3.1, 3.8, 3.45, 3.5]
    behind = next_runs(evidence(runs("a", a[:3]), runs("b", b)))
    level = next_runs(evidence(runs("a", a[:3]), runs("b", b[:3])))
    gains = [next(one.gain for one in found if one.name == "a") for found in (behind, level)]
    assert gains[0] > gains[1]


def test_costs_are_those_of_finished_runs_and_gaps_of_seeds_are_filled():
    """The first run of a has ended at one step of 100."""
    first, *others = runs("a", {0: 3.0, 1: 3.1, 3: 3.2})
    (point,) = first.curve
    early = dataclasses.replace(point, step=1, flops=point.flops / 100)
    first = dataclasses.replace(first, is_finished=False, steps_done=1, curve=(early,))
    found = next_runs(evidence([first, *others], runs("b", {0: 3.2, 1: 3.0, 3: 3.12})))
    assert {(one.name, one.seed, one.flops) for one in found} == {
        ("a", 2, point.flops),
        ("b", 2, point.flops),
    }


def record_of(tmp_path, spread: float, **fields):
    made = []
    for seed, error in ((1, -spread), (2, 0.0), (3, spread)):
        made += [run("gpt@20k", seed, 3.0 + error), run("llama@20k", seed, 3.01 - error)]
    return saved(tmp_path / "results.json", *made, command=COMMAND, **fields)


def test_nothing_at_stake(tmp_path):
    path = record_of(tmp_path, 0.01)
    advice = choose_next(path)
    assert advice.run is None and 0 < advice.at_stake < 0.01
    assert "No run is worth it" in str(advice)
    assert choose_next(path, stake=1e-4).run


def test_the_command_trains_one_run_at_the_rate_of_the_grid(tmp_path):
    grid = Grid(0, 0.01, (GridRate(1.0, 3.0, False), GridRate(2.0, 2.9, False)))
    grids = {"gpt@20k": grid, "llama@20k": grid}
    path = record_of(tmp_path, 0.2, learning_rates=grids, seeds_as_needed=True)
    advice = choose_next(path)
    config = config_of(advice.command)
    assert f" --results={path} " in advice.command
    assert config.compare.names == advice.run.name and config.compare.seeds == 4
    assert config.compare.learning_rates == () and advice.run.seed == 4
    assert config.compare.most_seeds == 0
    rate = json.loads(path.read_text())["runs"][0]["config"]["optimizer.learning_rate"]
    assert config.runs[advice.run.name].optimizer.learning_rate == rate
    assert advice.merge_command.endswith(f"{path},runs/next/results.json --output=runs/merged")


def test_two_seeds_of_two_models_may_agree_by_chance(tmp_path):
    """`choose` names no model then, so a run is worth it, however little seems to be at stake."""
    deep = {"config": {"model__num_layers": 3}}
    made = [run("gpt", 1, 3.0), run("gpt", 2, 3.1)]
    made += [run("deep", 1, 3.2, **deep), run("deep", 2, 3.3, **deep)]
    path = saved(tmp_path / "results.json", *made)
    advice = choose_next(path)
    assert advice.run and advice.at_stake < 0.01
    assert str(advice).startswith("There are too few seeds to know how much the losses vary.\n")
    assert choose(path, "flops", 2e6).choice.contest.refusal == "few seeds"


def test_next_on_the_command_line(tmp_path):
    path = record_of(tmp_path, 0.2)
    done = call("choose", f"--results={path}", "--next")
    assert done.returncode == 0 and done.stdout.startswith("Next run: "), done.stderr
    assert "(1 run, " in done.stdout
    assert json.loads(call("choose", f"--results={path}", "--next", "--json").stdout)["run"]["name"]
    done = call("choose", f"--results={path}", "--next", "--flops=1")
    assert (done.returncode, "--next: cannot be combined with --flops" in done.stderr) == (2, True)


def test_one_seed_tells_nothing(tmp_path):
    path = saved(tmp_path / "results.json", run("gpt", 1, 3.0), run("llama", 1, 3.1))
    with pytest.raises(UserError, match="train two seeds of two models"):
        choose_next(path)
