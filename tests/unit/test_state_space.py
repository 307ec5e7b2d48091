"""Tests of ops/state_space.py: the chunked form against equation 2 of arXiv 2405.21060, token by
token in float64, in plain JAX and as a TPU kernel, which runs in interpret mode on CPUs, with
float32 in place of bfloat16.
"""

import jax
import numpy as np
import pytest
from float64_model import plain_state_space
from recurrence_helpers import TIME, PaddedRule, assert_gradients_through_the_state, begins

from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.recurrence_kernel import in_kernel
from smallgpt_jax.ops.state_space import state_space

BATCH, STATE, VALUE = 2, 5, 6
HEADS = 4  # the kernel sums gradients of c and b over the 2 heads of a group
PADDING = (1, 1, 0, 0)  # of the inputs: log a = 0 and v = 0
RULES = {
    "plain": lambda *inputs: state_space(RecurrenceInputs(*inputs[:4]), *inputs[4:]),
    "kernel": lambda *inputs: in_kernel(
        RecurrenceInputs(*inputs[:4]), *inputs[4:], dtype="float32"
    ),
}


@pytest.fixture(params=RULES)
def rule(request):
    return PaddedRule(RULES[request.param], PADDING)


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


def no_state():
    return np.zeros((BATCH, HEADS, STATE, VALUE), np.float32)


@pytest.mark.parametrize("time", [1, 7, 65, 150])
def test_chunks_are_the_recurrence(time):
    """Also for lengths that no chunk divides."""
    inputs = random_inputs(time)
    y, _ = jax.jit(RULES["plain"])(*inputs, begins(time), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), rtol=1e-5, atol=1e-5)


def test_a_state_continues(rule):
    """Parts of a text with the state of the part before give the outputs of the whole text; padding
    changes nothing.
    """
    inputs, parts, state = random_inputs(400), [], no_state()
    for part in (slice(0, 300), slice(300, 301), slice(301, 400)):
        part_inputs = [x[:, part] for x in inputs]
        y, state = rule(part_inputs, np.zeros((1, part_inputs[0].shape[1]), bool), state)
        parts.append(y)
    np.testing.assert_allclose(
        np.concatenate(parts, axis=1), expected_outputs(inputs), rtol=1e-5, atol=1e-5
    )


def test_texts_in_a_row_do_not_affect_each_other(rule):
    """The outputs of the second text have equal bits after any other first text, also after one
    with strong decays.
    """
    borders = (9, 75, 76)
    inputs = random_inputs(TIME)
    found, _ = rule(inputs, begins(TIME, *borders), no_state())
    np.testing.assert_allclose(found, expected_outputs(inputs, borders), rtol=1e-5, atol=1e-5)
    other = [
        np.concatenate([a[:, :9], b[:, 9:]], axis=1)
        for a, b in zip(random_inputs(TIME, seed=1, log_decay=(-1e4, -1e3)), inputs)
    ]
    changed, _ = rule(other, begins(TIME, *borders), no_state())
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
    """The kernel, which is slow on CPUs, gets several of its blocks."""
    time = 16_384 if name == "plain" else TIME
    inputs = random_inputs(time, log_decay=log_decay)
    dy = np.ones_like(inputs[2])
    (y, _), (gradients, _) = PaddedRule(RULES[name], PADDING).run(
        inputs, begins(time), no_state(), dy, no_state()
    )
    assert np.isfinite(y).all() and all(np.isfinite(x).all() for x in gradients)
    np.testing.assert_allclose(
        y[:, :100], expected_outputs([x[:, :100] for x in inputs]), rtol=1e-4, atol=1e-4
    )


def test_a_strong_decay_between_weak_ones(rule):
    """Sums of log a from the start of the chunk would lose the digits of the weak decays."""
    inputs = random_inputs(64, log_decay=(-0.1, 0.0))
    inputs[3][:, 20] = -1e5
    y, _ = rule(inputs, begins(64), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_the_recurrence(rule):
    assert_gradients_through_the_state(rule, random_inputs(400), no_state(), expected_outputs)


def test_the_kernel_in_bfloat16():
    inputs = random_inputs(300)
    y, _ = jax.jit(in_kernel)(RecurrenceInputs(*inputs), begins(300), no_state())
    expected = expected_outputs(inputs)
    assert 1e-4 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.01
