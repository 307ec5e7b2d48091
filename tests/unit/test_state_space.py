"""Tests of ops/state_space.py: the chunked form against equation 2 of arXiv 2405.21060, token by token in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64_model import plain_state_space
from gradient_helpers import assert_gradients

from smallgpt_jax.ops.state_space import state_space

BATCH, HEADS, STATE, VALUE = 2, 2, 5, 6
run = jax.jit(state_space)


def random_inputs(time: int, seed: int = 0, log_decay=(-2.0, 0.0)):
    """Returns c, b, v, log a; all heads share c and b."""
    rng = np.random.default_rng(seed)
    c, b = (rng.standard_normal((BATCH, time, 1, STATE)) for _ in range(2))
    v, log_decay = rng.standard_normal((BATCH, time, HEADS, VALUE)), rng.uniform(*log_decay, (BATCH, time, HEADS))
    return [np.float32(x) for x in (c, b, v, log_decay)]


def expected_outputs(inputs, borders=()):
    """Returns the float64 outputs (B, T, H, V) of texts that begin at 0 and at the `borders`."""
    c, b, v, log_decay = (np.float64(x) for x in inputs)
    y, ends = np.zeros(v.shape), (*borders, v.shape[1])
    for start, end in zip((0, *borders), ends):
        for i, h in np.ndindex(BATCH, HEADS):
            y[i, start:end, h] = plain_state_space(
                c[i, start:end, 0], b[i, start:end, 0], v[i, start:end, h], np.exp(log_decay[i, start:end, h]))
    return y


def begins(time: int, *borders):
    return np.isin(np.arange(time), (0, *borders))[None]


def no_state():
    return np.zeros((BATCH, HEADS, STATE, VALUE), np.float32)


@pytest.mark.parametrize("time", [1, 7, 65, 150])
def test_chunks_are_the_recurrence(time):
    inputs = random_inputs(time)
    y, _ = run(*inputs, begins(time), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), rtol=1e-5, atol=1e-5)


def test_a_state_continues():
    inputs, parts, state = random_inputs(90), [], no_state()
    for start, end in ((0, 70), (70, 71), (71, 90)):
        y, state = run(*(x[:, start:end] for x in inputs), np.zeros((1, end - start), bool), state)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected_outputs(inputs), rtol=1e-5, atol=1e-5)


def test_texts_in_a_row_do_not_affect_each_other():
    borders, time = (9, 75, 76), 140
    inputs = random_inputs(time)
    found, _ = run(*inputs, begins(time, *borders), no_state())
    np.testing.assert_allclose(found, expected_outputs(inputs, borders), rtol=1e-5, atol=1e-5)
    other = [np.concatenate([x[:, :9] - 1000, x[:, 9:]], axis=1) for x in inputs]
    changed, _ = run(*other, begins(time, *borders), no_state())
    assert np.array_equal(found[:, 9:], changed[:, 9:]) and not np.allclose(found[:, :9], changed[:, :9])


@pytest.mark.parametrize("log_decay", [(-1e-6, 0.0), (-1e30, -1e20)])
def test_extreme_decays(log_decay):
    time = 16_384
    inputs = random_inputs(time, log_decay=log_decay)

    def total(inputs):
        y, _ = state_space(*inputs, begins(time), no_state())
        return jnp.sum(jnp.square(y)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(inputs)
    assert np.isfinite(y).all() and all(np.isfinite(x).all() for x in gradients)
    np.testing.assert_allclose(y[:, :100], expected_outputs([x[:, :100] for x in inputs]), rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_recurrence():
    """Central differences of the recurrence in float64, in random directions."""
    inputs, time, border = random_inputs(70), 70, 30
    weights = np.random.default_rng(3).standard_normal((BATCH, time, HEADS, VALUE))

    def total(inputs):
        return jnp.sum(weights * state_space(*inputs, begins(time, border), no_state())[0])

    assert_gradients(jax.jit(jax.grad(total))(inputs), inputs,
                     lambda inputs: np.sum(weights * expected_outputs(inputs, (border,))))
