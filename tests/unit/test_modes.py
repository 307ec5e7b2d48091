"""Losses that split into two groups over seeds."""

import math

import numpy as np
import pytest

from smallgpt_jax.analysis.spreads import modes

UNKNOWN = [None] * 10


def test_a_split_is_described_by_shares_and_losses():
    losses = [3.21, 3.94, 3.22, 3.93, 3.2]
    low, high = modes(losses, UNKNOWN[:5])
    assert (low.share, low.runs) == (pytest.approx(3 / 5), 3)
    assert low.loss == pytest.approx(3.21)
    assert (high.runs, high.loss) == (2, pytest.approx(3.935))


def test_three_seeds_show_a_split_only_by_an_extreme_gap():
    assert modes([3.2, 3.21, 3.9], UNKNOWN[:3]) == ()
    assert modes([3.2, 3.2001, 3.9], UNKNOWN[:3]) != ()


def test_normal_losses_rarely_split():
    rng = np.random.default_rng(0)
    for count in (3, 5, 10):
        splits = [
            bool(modes(list(rng.standard_normal(count)), UNKNOWN[:count])) for _ in range(500)
        ]
        assert np.mean(splits) < 0.025  # 1% expected


def test_the_loss_of_repeats_tells_who_copies():
    """Where it was logged, it decides: the first two seeds have learned to copy."""
    losses, repeats = [3.2, 3.3, 3.4], [1.2, 1.4, 3.5]
    low, high = modes(losses, repeats)
    assert (low.runs, low.loss, high.runs, high.loss) == (2, pytest.approx(3.25), 1, 3.4)
    assert modes([3.2, 3.2001, 3.9], [3.5, 3.4, 3.6]) == ()


@pytest.mark.parametrize("losses", [[3.2, 3.9], [3.2, 3.2001, math.inf]])
def test_no_modes_of_few_or_diverged_runs(losses):
    assert modes(losses, UNKNOWN[: len(losses)]) == ()
