"""Differences that may be looked at after each seed."""

import math

import numpy as np
import pytest

from smallgpt_jax.analysis import sequential
from smallgpt_jax.analysis.sequential import (
    evidence,
    half_width,
    interval,
    level_of_question,
    seeds_of_effects,
)


def integrated(differences, precision: float, degrees: float = 0.0, variance: float = 1.0):
    """The definition: likelihoods, integrated over effects and, with dσ/σ, over deviations; with
    `degrees`, over deviations as likely as after a sample with that variance.
    """
    x = np.asarray(differences)
    sigmas = np.exp(np.linspace(math.log(0.005), math.log(50), 400))[:, None]
    effects = np.linspace(-40, 40, 1001)[None, :]

    def likelihood(effect):
        z = (x[:, None, None] / sigmas) - effect
        return np.exp(-0.5 * np.sum(z**2, axis=0)) / sigmas ** len(x)

    weights = np.exp(-0.5 * precision * effects**2) * math.sqrt(precision / 2 / math.pi)
    step = effects[0, 1] - effects[0, 0]
    mixed = np.sum(likelihood(effects) * weights, axis=1) * step
    null = likelihood(np.zeros((1, 1)))[:, 0]
    sigmas = sigmas[:, 0]
    before = sigmas**-degrees * np.exp(-degrees * variance / 2 / sigmas**2)
    return float(np.sum(before * mixed) / np.sum(before * null))


@pytest.mark.parametrize("differences", [(0.3, 0.1), (0.3, 0.1, -0.2), (1.0, 1.2, 0.9, 1.1)])
@pytest.mark.parametrize("precision", [0.1, 1.0])
def test_evidence_is_the_ratio_of_integrated_likelihoods(differences, precision, monkeypatch):
    monkeypatch.setattr(sequential, "PRECISION", precision)
    expected = integrated(differences, precision)
    assert evidence(differences) == pytest.approx(expected, rel=1e-3)


def test_evidence_has_no_unit_and_no_direction():
    differences = (0.3, 0.1, 0.25)
    assert evidence([3 * x for x in differences]) == pytest.approx(evidence(differences))
    assert evidence([-x for x in differences]) == pytest.approx(evidence(differences))


def test_one_difference_says_nothing():
    assert evidence([]) == evidence([0.5]) == evidence([0.0, 0.0]) == 1
    assert interval([0.5]) == interval([0.5, 0.4], level=1e-4) == (-math.inf, math.inf)


def test_the_interval_has_the_means_that_the_evidence_does_not_exclude():
    differences = (0.3, 0.1, 0.25, 0.4)
    low, high = interval(differences, level=0.05)
    for limit in (low, high):
        assert evidence([x - limit for x in differences]) == pytest.approx(20)
    inside = [evidence([x - mean for x in differences]) for mean in np.linspace(low, high, 9)]
    assert max(inside) < 20.001 and (low + high) / 2 == pytest.approx(np.mean(differences))


@pytest.mark.parametrize("differences", [(0.3,), (0.3, 0.1, 0.4)])
def test_a_variance_that_others_tell_narrows_the_interval(differences):
    """Before, a sample with 6 degrees of freedom had the variance 0.04."""
    count, total = len(differences), 6 + len(differences) - 1
    deviations = np.sum((np.asarray(differences) - np.mean(differences)) ** 2)
    half = half_width(count, (6 * 0.04 + deviations) / total, total, level=0.05)
    limit = np.mean(differences) - half
    evidence_there = integrated(np.asarray(differences) - limit, 0.1, 6, 0.04)
    assert evidence_there == pytest.approx(20, rel=1e-3)


def test_seeds_of_an_effect_are_those_at_which_the_evidence_is_enough():
    differences = [1.0 + (-1) ** number for number in range(40)]  # mean and deviation are 1
    seeds = round(float(seeds_of_effects(np.array(1.0), 0.01)))
    assert evidence(differences[: seeds - 4]) < 100 < evidence(differences[: seeds + 4])


def test_looks_after_each_seed_keep_the_level():
    random = np.random.default_rng(0)
    false = 0
    for _ in range(2000):
        differences = random.standard_normal(12).tolist()
        false += any(evidence(differences[:count]) >= 20 for count in range(2, 13))
    assert false / 2000 <= 0.05


def test_levels_of_all_questions_have_the_sum_of_one():
    assert [level_of_question(number, 0.06) for number in (1, 2, 3)] == pytest.approx(
        [0.03, 0.01, 0.005]
    )
    assert sum(level_of_question(number) for number in range(1, 10_000)) < 0.05
