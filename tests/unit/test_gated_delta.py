"""Tests of ops/gated_delta.py: the chunked form against equation 10 of arXiv 2412.06464, token by
token in float64, in plain JAX and as a TPU kernel, which runs in interpret mode on CPUs, with
float32 in place of bfloat16.
"""

import jax
import numpy as np
import pytest
from float64_model import plain_gated_delta_rule
from recurrence_helpers import TIME, PaddedRule, assert_gradients_through_the_state, begins

from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.gated_delta import gated_delta, unit_lower_inverse
from smallgpt_jax.ops.recurrence_kernel import in_kernel

BATCH, HEADS, KEY, VALUE = 2, 2, 5, 6
PADDING = (1, 1, 1, 0, 0)  # of the inputs: log α = 0 and β = 0
RULES = {
    "plain": lambda *inputs: gated_delta(RecurrenceInputs(*inputs[:5]), *inputs[5:]),
    "kernel": lambda *inputs: in_kernel(
        RecurrenceInputs(*inputs[:5]), *inputs[5:], dtype="float32"
    ),
}


@pytest.fixture(params=RULES)
def rule(request):
    return PaddedRule(RULES[request.param], PADDING)


def random_inputs(time: int, seed: int = 0, log_decay=(-2.0, 0.0), dtype=np.float32):
    """Returns q, k, v, log α, β; keys have norm 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((BATCH, time, HEADS, width)) for width in (KEY, KEY, VALUE))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    shape = (BATCH, time, HEADS)
    return [dtype(x) for x in (q, k, v, rng.uniform(*log_decay, shape), rng.uniform(0, 1, shape))]


def expected_outputs(inputs, borders=()):
    """Returns the float64 outputs (B, T, H, V) of texts that begin at 0 and at the `borders`."""
    q, k, v, log_decay, beta = (np.float64(x) for x in inputs)
    y, ends = np.zeros(v.shape), (*borders, q.shape[1])
    for start, end in zip((0, *borders), ends):
        for b, h in np.ndindex(BATCH, HEADS):
            y[b, start:end, h] = plain_gated_delta_rule(
                *(x[b, start:end, h] for x in (q, k, v, np.exp(log_decay), beta))
            )
    return y


def no_state():
    return np.zeros((BATCH, HEADS, KEY, VALUE), np.float32)


@pytest.mark.parametrize("time", [1, 7, 64, 65, 150])
def test_chunks_are_the_recurrence(time):
    """Also for lengths that no chunk divides."""
    inputs = random_inputs(time)
    y, _ = jax.jit(RULES["plain"])(*inputs, begins(time), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), atol=1e-5)


@pytest.mark.slow
def test_a_state_continues(rule):
    """Parts of a text with the state of the part before give the outputs of the whole text; padding
    changes nothing.
    """
    inputs, parts, state = random_inputs(400), [], no_state()
    for part in (slice(0, 300), slice(300, 301), slice(301, 400)):
        part_inputs = [x[:, part] for x in inputs]
        y, state = rule(part_inputs, np.zeros((1, part_inputs[0].shape[1]), bool), state)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected_outputs(inputs), atol=1e-5)


def test_texts_in_a_row_do_not_affect_each_other(rule):
    """The outputs of the second text have equal bits after any other first text, also after one
    with strong decays.
    """
    borders = (9, 75, 76)
    inputs = random_inputs(TIME)
    found, _ = rule(inputs, begins(TIME, *borders), no_state())
    np.testing.assert_allclose(found, expected_outputs(inputs, borders), atol=1e-5)
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
        ("plain", (0.0, 0.0)),
        ("plain", (-300.0, 0.0)),
        ("plain", (-1e30, -1e20)),
        ("kernel", (0.0, 0.0)),
        ("kernel", (-1e30, -1e20)),
    ],
)
def test_extreme_decays(name, log_decay):
    """At 16,384 positions nothing overflows, even with equal keys, for which powers of a chunk's
    matrix are largest. The kernel, which is slow on CPUs, gets several of its blocks.
    """
    time = 16_384 if name == "plain" else TIME
    inputs = random_inputs(time, log_decay=log_decay)
    inputs[1][:] = inputs[1][:, :1]
    inputs[3][:, ::7] = log_decay[0]
    dy = np.ones_like(inputs[2])
    (y, _), (gradients, _) = PaddedRule(RULES[name], PADDING).run(
        inputs, begins(time), no_state(), dy, no_state()
    )
    assert np.isfinite(y).all() and all(np.isfinite(x).all() for x in gradients)
    expected = expected_outputs(
        [x[:, -600:] for x in inputs]
    )  # each token overwrites half of what the key stores
    np.testing.assert_allclose(y[:, -300:], expected[:, -300:], atol=1e-4)


def test_a_strong_decay_between_weak_ones(rule):
    """Sums of log α from the start of the chunk would lose the digits of the weak decays."""
    inputs = random_inputs(64, log_decay=(-0.1, 0.0))
    inputs[3][:, 20] = -1e5
    y, _ = rule(inputs, begins(64), no_state())
    np.testing.assert_allclose(y, expected_outputs(inputs), atol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_the_recurrence(rule):
    assert_gradients_through_the_state(rule, random_inputs(400), no_state(), expected_outputs)


@pytest.mark.slow
def test_the_kernel_in_bfloat16():
    inputs = random_inputs(300)
    y, _ = jax.jit(in_kernel)(RecurrenceInputs(*inputs), begins(300), no_state())
    expected = expected_outputs(inputs)
    assert 1e-4 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.01


def test_inverse():
    matrices = np.tril(np.random.default_rng(0).uniform(-1, 1, (3, 16, 16)), -1) + np.eye(16)
    np.testing.assert_allclose(
        unit_lower_inverse(np.float32(matrices)), np.linalg.inv(matrices), rtol=1e-4, atol=1e-4
    )
