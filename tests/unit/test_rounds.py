"""Which models get further seeds, and the verdicts on a record whose seeds were added as needed."""

import dataclasses
import math

import numpy as np
import pytest
from decision_helpers import record, runs

from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.analysis.candidates import level_of_pair
from smallgpt_jax.analysis.further_runs import Rounds, next_seeds
from smallgpt_jax.comparison.merging import merge
from smallgpt_jax.report import page

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
