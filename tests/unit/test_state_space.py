"""Tests of ops/state_space.py: the chunked form against equation 2 of arXiv 2405.21060, token by
token in float64, in plain JAX and as a TPU kernel, which runs in interpret mode on CPUs, with
float32 in place of bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64_model import plain_state_space
from gradient_helpers import assert_gradients

from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.recurrence_kernel import in_kernel
from smallgpt_jax.ops.state_space import state_space

BATCH, HEADS, STATE, VALUE = (
    2,
    4,
    5,
    6,
)  # the kernel sums gradients of c and b over the 2 heads of a group
RULES = {
    "plain": lambda *inputs: state_space(RecurrenceInputs(*inputs[:4]), *inputs[4:]),
    "kernel": lambda *inputs: in_kernel(
        RecurrenceInputs(*inputs[:4]), *inputs[4:], dtype="float32"
    ),
}


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture
def run(rule):
    return jax.jit(rule)


def random_inputs(time: int, seed: int = 0, log_decay=(-2.0, 0.0)):
    """Returns c, b, v, log a; all heads share c and b."""
    rng = np.random.default_rng(seed)
    c, b = (rng.standard_normal((BATCH, time, 1, STATE)) for _ in range(2))
    v, log_decay = (
        rng.standard_normal((BATCH, time, HEADS, VALUE)),
        rng.uniform(*log_decay, (BATCH, time, HEADS)),
    )
    return [np.float32(x) for x in (c, b, v, log_decay)]


def expected_outputs(inputs, borders=()):
    """Returns the float64 outputs (B, T, H, V) of texts that begin at 0 and at the `borders`."""
    c, b, v, log_decay = (np.float64(x) for x in inputs)
    y, ends = np.zeros(v.shape), (*borders, v.shape[1])
    for start, end in zip((0, *borders), ends):
        for i, h in np.ndindex(BATCH, HEADS):
            y[i, start:end, h] = plain_state_space(
                c[i, start:end, 0],
                b[i, start:end, 0],
                v[i, start:end, h],
                np.exp(log_decay[i, start:end, h]),
            )
    return y


def begins(time: int, *borders):
    return np.isin(np.arange(time), (0, *borders))[None]


def no_state():
    return np.zeros((BATCH, HEADS, STATE, VALUE), np.float32)


@pytest.mark.parametrize(
    "name, time", [*(("plain", time) for time in (1, 7, 65, 150)), ("kernel", 700)]
)
def test_chunks_are_the_recurrence(name, time):
    """Also for lengths that no chunk divides."""
    inputs = random_inputs(time)
    y, _ = jax.jit(RULES[name])(*inputs, begins(time), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), rtol=1e-5, atol=1e-5)


def test_a_state_continues(run):
    """Parts of a text with the state of the part before give the outputs of the whole text; padding
    changes nothing.
    """
    inputs, parts, state = random_inputs(90), [], no_state()
    for start, end in ((0, 70), (70, 71), (71, 90)):
        part = [
            np.pad(
                x[:, start:end], [(0, 0), (0, 3), *[(0, 0)] * (x.ndim - 2)], constant_values=value
            )
            for x, value in zip(inputs, (1, 1, 0, 0))
        ]  # padding has log a = 0 and v = 0
        y, state = run(*part, np.zeros((1, end - start + 3), bool), state)
        parts.append(y[:, : end - start])
    np.testing.assert_allclose(
        np.concatenate(parts, axis=1), expected_outputs(inputs), rtol=1e-5, atol=1e-5
    )


def test_texts_in_a_row_do_not_affect_each_other(run):
    """The outputs of the second text have equal bits after any other first text, also after one
    with strong decays.
    """
    borders, time = (9, 75, 76), 140
    inputs = random_inputs(time)
    found, _ = run(*inputs, begins(time, *borders), no_state())
    np.testing.assert_allclose(found, expected_outputs(inputs, borders), rtol=1e-5, atol=1e-5)
    other = [
        np.concatenate([a[:, :9], b[:, 9:]], axis=1)
        for a, b in zip(random_inputs(time, seed=1, log_decay=(-1e4, -1e3)), inputs)
    ]
    changed, _ = run(*other, begins(time, *borders), no_state())
    assert np.array_equal(found[:, 9:], changed[:, 9:]) and not np.allclose(
        found[:, :9], changed[:, :9]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, log_decay",
    [
        ("plain", (-1e-6, 0.0)),
        ("plain", (-1e30, -1e20)),
        ("kernel", (-1e-6, 0.0)),
        ("kernel", (-1e30, -1e20)),
    ],
)
def test_extreme_decays(name, log_decay):
    time = 16_384
    inputs = random_inputs(time, log_decay=log_decay)

    def total(inputs):
        y, _ = RULES[name](*inputs, begins(time), no_state())
        return jnp.sum(jnp.square(y)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(inputs)
    assert np.isfinite(y).all() and all(np.isfinite(x).all() for x in gradients)
    np.testing.assert_allclose(
        y[:, :100], expected_outputs([x[:, :100] for x in inputs]), rtol=1e-4, atol=1e-4
    )


def test_a_strong_decay_between_weak_ones(run):
    """Sums of log a from the start of the chunk would lose the digits of the weak decays."""
    inputs = random_inputs(64, log_decay=(-0.1, 0.0))
    inputs[3][:, 20] = -1e5
    y, _ = run(*inputs, begins(64), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_the_recurrence(rule):
    """Central differences of the recurrence in float64, in random directions. Gradients pass
    through a given state.
    """
    inputs, time, border, split = random_inputs(70), 70, 30, 50
    weights = np.random.default_rng(3).standard_normal((BATCH, time, HEADS, VALUE))

    def total(inputs):
        first, state = rule(*(x[:, :split] for x in inputs), begins(split, border), no_state())
        second, _ = rule(*(x[:, split:] for x in inputs), np.zeros((1, time - split), bool), state)
        return jnp.sum(weights * jnp.concatenate([first, second], axis=1))

    assert_gradients(
        jax.jit(jax.grad(total))(inputs),
        inputs,
        lambda inputs: np.sum(weights * expected_outputs(inputs, (border,))),
    )


def test_the_kernel_in_bfloat16():
    inputs = random_inputs(300)
    y, _ = jax.jit(in_kernel)(RecurrenceInputs(*inputs), begins(300), no_state())
    expected = expected_outputs(inputs)
    assert 1e-4 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.01
