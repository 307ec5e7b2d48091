"""Tests of sampling, compared with plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallgpt_jax.inference import decoder
from smallgpt_jax.inference.sampling import Sampling, filter_logits, sample

INF = -np.inf
LOGITS = np.array([[2.0, -1.0, 0.5, 1.5, 0.0], [0.0, 3.0, -2.0, 1.0, 2.9]], np.float32)
SEEN = np.array([[True, True, False, False, False], [False, False, True, True, False]])
PENALIZED = np.where(SEEN, np.where(LOGITS > 0, LOGITS / 1.3, LOGITS * 1.3), LOGITS)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(), LOGITS),
        (dict(temperature=0.7), LOGITS / 0.7),
        (dict(temperature=None, repetition_penalty=1.3), PENALIZED),
        (dict(temperature=0.5, repetition_penalty=1.3), PENALIZED / 0.5),
        (dict(top_k=2), [[2.0, INF, INF, 1.5, INF], [INF, 3.0, INF, INF, 2.9]]),
        # The probabilities are .49 .02 .11 .30 .07 in the first row of LOGITS, and .02 .47 .00 .06
        # .43 in the second row.
        (dict(top_p=0.5), [[2.0, INF, INF, 1.5, INF], [INF, 3.0, INF, INF, 2.9]]),
        (dict(top_p=0.1), [[2.0, INF, INF, INF, INF], [INF, 3.0, INF, INF, INF]]),
        (dict(top_p=0.8), [[2.0, INF, 0.5, 1.5, INF], [INF, 3.0, INF, INF, 2.9]]),
        (dict(top_k=2, top_p=0.3), [[2.0, INF, INF, INF, INF], [INF, 3.0, INF, INF, INF]]),
    ],
)
def test_filters_match_the_formulas(settings, expected):
    found = filter_logits(jnp.array(LOGITS), jnp.array(SEEN), Sampling(**settings))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_smallest_set_has_only_some_of_equally_likely_tokens():
    """Of five tokens with probability 0.2, three are the fewest with 0.5 together."""
    rows = jnp.array([[1.0] * 5, [0.0, 3.0, 3.0, 0.0, 0.0]])
    found = filter_logits(rows, None, Sampling(top_p=0.5))
    # 3.0 is e³ / (2·e³ + 3) = 0.465 likely
    np.testing.assert_array_equal(found, [[1, 1, 1, INF, INF], [INF, 3, 3, INF, INF]])
    found = filter_logits(rows, None, Sampling(top_p=0.4))
    np.testing.assert_array_equal(found, [[1, 1, INF, INF, INF], [INF, 3, INF, INF, INF]])


def test_samples_have_the_distribution():
    logits = jnp.tile(jnp.array([[1.0, 0.0, -1.0, 2.0]]), (20_000, 1))
    keys = jax.random.split(jax.random.key(0), 20_000)
    frequencies = (
        np.bincount(sample(logits, None, Sampling(temperature=0.5), keys), minlength=4) / 20_000
    )
    expected = np.exp([2, 0, -2, 4]) / np.exp([2, 0, -2, 4]).sum()
    np.testing.assert_allclose(frequencies, expected, atol=0.01)


def test_settings_without_effect_become_none():
    assert Sampling(temperature=0, top_p=1, repetition_penalty=1).validated() == Sampling(
        temperature=None
    )


@pytest.mark.parametrize(
    "settings", [dict(temperature=1e-40), dict(top_p=1e-46), dict(temperature=1e-29)]
)
def test_tiny_settings_give_the_likeliest_token(settings):
    logits, keys = jnp.array([[0.5, -1.0, 3.0, 20.0, 2.0]]), jax.random.split(jax.random.key(0), 1)
    assert sample(logits, None, Sampling(**settings).validated(), keys).tolist() == [3]


def test_buckets():
    lengths = (1, 16, 17, 33, 64, 65, 96, 97, 128, 129, 700, 1000)
    assert [decoder.bucket(n, 1000) for n in lengths] == [
        16,
        16,
        32,
        48,
        64,
        96,
        96,
        128,
        128,
        192,
        768,
        1000,
    ]
