"""Tests of ops/gated_delta.py and ops/state_space.py: the chunked forms against equation 10 of arXiv
2412.06464 and equation 2 of arXiv 2405.21060, token by token in float64, in plain JAX and as a TPU
kernel, which runs in interpret mode on CPUs, with float32 in place of bfloat16.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from float64_model import plain_gated_delta_rule, plain_state_space
from recurrence_helpers import TIME, PaddedRule, assert_gradients_through_the_state, begins

from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.gated_delta import gated_delta, unit_lower_inverse
from smallgpt_jax.ops.recurrence_kernel import in_kernel
from smallgpt_jax.ops.state_space import state_space

BATCH, KEY, VALUE = 2, 5, 6
CLOSE = dict(rtol=1e-5, atol=1e-5)


class Recurrence(NamedTuple):
    rule: Callable  # in plain JAX
    float64_rule: Callable  # of one text and head
    heads: int
    key_heads: int
    padding: tuple[int, ...]  # of the inputs: log α = 0, and β = 0 or v = 0

    def random_inputs(self, time: int, seed: int = 0, log_decay=(-2.0, 0.0)) -> list[np.ndarray]:
        """Returns q, k, v, log α, and β if the rule has it; keys have norm 1."""
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((BATCH, time, self.key_heads, KEY)) for _ in range(2))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        shape = (BATCH, time, self.heads)
        inputs = (
            *(q, k, rng.standard_normal((*shape, VALUE)), rng.uniform(*log_decay, shape)),
            rng.uniform(0, 1, shape),
        )
        return [np.float32(x) for x in inputs[: len(self.padding)]]

    def expected_outputs(self, inputs, borders=()) -> np.ndarray:
        """Returns the float64 outputs (B, T, H, V) of texts that begin at 0 and at the `borders`."""
        q, k, v, log_decay, *beta = (np.float64(x) for x in inputs)
        y, ends = np.zeros(v.shape), (*borders, v.shape[1])
        for start, end in zip((0, *borders), ends):
            for row, head in np.ndindex(BATCH, self.heads):
                key_head = head % self.key_heads
                y[row, start:end, head] = self.float64_rule(
                    *(x[row, start:end, key_head] for x in (q, k)),
                    *(x[row, start:end, head] for x in (v, np.exp(log_decay), *beta)),
                )
        return y

    def no_state(self) -> np.ndarray:
        return np.zeros((BATCH, self.heads, KEY, VALUE), np.float32)


RECURRENCES = {
    "delta": Recurrence(gated_delta, plain_gated_delta_rule, 2, 2, (1, 1, 1, 0, 0)),
    # All heads share queries and keys, whose gradients the kernel sums over the 2 heads of a group.
    "mamba": Recurrence(state_space, plain_state_space, 4, 1, (1, 1, 0, 0)),
}


def padded_rule(recurrence: Recurrence, form: str) -> PaddedRule:
    def rule(*arguments):
        *inputs, begins_BxT, state = arguments
        options = {"dtype": "float32"} if form == "kernel" else {}
        run = in_kernel if form == "kernel" else recurrence.rule
        return run(RecurrenceInputs(*inputs), begins_BxT, state, **options)

    return PaddedRule(rule, recurrence.padding)


RULES = {  # compiled once
    (name, form): padded_rule(recurrence, form)
    for name, recurrence in RECURRENCES.items()
    for form in ("plain", "kernel")
}


@pytest.fixture(params=RECURRENCES)
def name(request):
    return request.param


@pytest.fixture
def recurrence(name):
    return RECURRENCES[name]


@pytest.fixture(params=["plain", "kernel"])
def rule(name, request):
    return RULES[name, request.param]


@pytest.mark.parametrize("time", [1, 7, 64, 65, 150])
def test_chunks_are_the_recurrence(recurrence, time):
    """Also for lengths that no chunk divides."""
    inputs = recurrence.random_inputs(time)
    y, _ = jax.jit(recurrence.rule)(RecurrenceInputs(*inputs), begins(time), recurrence.no_state())
    np.testing.assert_allclose(y, recurrence.expected_outputs(inputs), **CLOSE)


@pytest.mark.slow
def test_a_state_continues(recurrence, rule):
    """Parts of a text with the state of the part before give the outputs of the whole text; padding
    changes nothing.
    """
    inputs, parts, state = recurrence.random_inputs(400), [], recurrence.no_state()
    for part in (slice(0, 300), slice(300, 301), slice(301, 400)):
        part_inputs = [x[:, part] for x in inputs]
        y, state = rule(part_inputs, np.zeros((1, part_inputs[0].shape[1]), bool), state)
        parts.append(y)
    expected = recurrence.expected_outputs(inputs)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, **CLOSE)


def test_texts_in_a_row_do_not_affect_each_other(recurrence, rule):
    """The outputs of the second text have equal bits after any other first text, also after one
    with strong decays.
    """
    borders, state = (9, 75, 76), recurrence.no_state()
    inputs = recurrence.random_inputs(TIME)
    found, _ = rule(inputs, begins(TIME, *borders), state)
    np.testing.assert_allclose(found, recurrence.expected_outputs(inputs, borders), **CLOSE)
    decayed = recurrence.random_inputs(TIME, seed=1, log_decay=(-1e4, -1e3))
    other = [np.concatenate([a[:, :9], b[:, 9:]], axis=1) for a, b in zip(decayed, inputs)]
    changed, _ = rule(other, begins(TIME, *borders), state)
    assert np.array_equal(found[:, 9:], changed[:, 9:])
    assert not np.allclose(found[:, :9], changed[:, :9])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, form, log_decay",
    [
        ("delta", "plain", (0.0, 0.0)),
        ("delta", "plain", (-300.0, 0.0)),
        ("delta", "plain", (-1e30, -1e20)),
        ("delta", "kernel", (0.0, 0.0)),
        ("delta", "kernel", (-1e30, -1e20)),
        ("mamba", "plain", (-1e-6, 0.0)),
        ("mamba", "plain", (-1e30, -1e20)),
        ("mamba", "kernel", (-1e-6, 0.0)),
        ("mamba", "kernel", (-1e30, -1e20)),
    ],
)
def test_extreme_decays(name, form, log_decay):
    """At 16,384 positions nothing overflows. The keys of delta are equal: then powers of a chunk's
    matrix are largest, and each token overwrites half of what the key stores. The kernel, which is
    slow on CPUs, gets several of its blocks.
    """
    recurrence, time = RECURRENCES[name], 16_384 if form == "plain" else TIME
    inputs = recurrence.random_inputs(time, log_decay=log_decay)
    compared, read = slice(0, 100), slice(0, 100)
    if name == "delta":
        inputs[1][:] = inputs[1][:, :1]
        inputs[3][:, ::7] = log_decay[0]
        compared, read = slice(-300, None), slice(-600, None)
    state = recurrence.no_state()
    (y, _), (gradients, _) = RULES[name, form].run(
        inputs, begins(time), state, np.ones_like(inputs[2]), state
    )
    assert np.isfinite(y).all() and all(np.isfinite(x).all() for x in gradients)
    expected = recurrence.expected_outputs([x[:, read] for x in inputs])[:, compared]
    np.testing.assert_allclose(y[:, compared], expected, rtol=1e-4, atol=1e-4)


def test_a_strong_decay_between_weak_ones(recurrence, rule):
    """Sums of log α from the start of the chunk would lose the digits of the weak decays."""
    inputs = recurrence.random_inputs(64, log_decay=(-0.1, 0.0))
    inputs[3][:, 20] = -1e5
    y, _ = rule(inputs, begins(64), recurrence.no_state())
    np.testing.assert_allclose(y, recurrence.expected_outputs(inputs), **CLOSE)


@pytest.mark.slow
def test_gradients_are_those_of_the_recurrence(recurrence, rule):
    assert_gradients_through_the_state(
        rule, recurrence.random_inputs(400), recurrence.no_state(), recurrence.expected_outputs
    )


@pytest.mark.slow
def test_the_kernel_in_bfloat16(recurrence):
    inputs = recurrence.random_inputs(300)
    y, _ = jax.jit(in_kernel)(RecurrenceInputs(*inputs), begins(300), recurrence.no_state())
    expected = recurrence.expected_outputs(inputs)
    assert 1e-4 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.01


def test_inverse():
    matrices = np.tril(np.random.default_rng(0).uniform(-1, 1, (3, 16, 16)), -1) + np.eye(16)
    np.testing.assert_allclose(
        unit_lower_inverse(np.float32(matrices)), np.linalg.inv(matrices), rtol=1e-4, atol=1e-4
    )
