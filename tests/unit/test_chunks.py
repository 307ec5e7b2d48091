"""Tests of ops/chunks.py: the states between chunks, also in groups of chunks as on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_helpers import assert_gradients

from smallgpt_jax.ops import chunks

CHUNKS, BATCH, HEADS, KEY, VALUE = 7, 1, 2, 3, 4


def states_one_by_one(kept, erased, added, state):
    """Returns, in float64, the states before each chunk and, last, the state after all."""
    states = [np.float64(state)]
    for k, e, a in zip(*(np.float64(x) for x in (kept, erased, added))):
        states.append(k[..., None, None] * states[-1] - e @ states[-1] + a)
    return np.array(states)


@pytest.mark.parametrize(
    "group, platform, has_erased",
    [(16, "tpu", True), (2, "cpu", True), (2, "tpu", True), (2, "tpu", False)],
)
def test_states_before_chunks(monkeypatch, group, platform, has_erased):
    """Groups of two chunks, whose last is padded, form groups themselves. Gradients by central
    differences.
    """
    monkeypatch.setattr(chunks, "GROUP", group)
    monkeypatch.setattr(chunks, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    kept = rng.uniform(0, 1, (CHUNKS, BATCH, HEADS))
    kept[2, 0, 0] = 0  # a new text
    erased, added, state = (
        rng.standard_normal(shape)
        for shape in (
            (CHUNKS, BATCH, HEADS, KEY, KEY),
            (CHUNKS, BATCH, HEADS, KEY, VALUE),
            (BATCH, HEADS, KEY, VALUE),
        )
    )
    erased *= 0.3 * has_erased
    weights, inputs = (
        rng.standard_normal((CHUNKS + 1, *state.shape)),
        [np.float32(x) for x in (kept, erased, added, state)],
    )

    def total(inputs):
        kept, erased, added, state = inputs
        states, last = chunks.states_before_chunks(
            kept, erased if has_erased else None, added, state
        )
        found = jnp.concatenate([states, last[None]])
        return jnp.sum(weights * found), found

    gradients, found = jax.jit(jax.grad(total, has_aux=True))(inputs)
    np.testing.assert_allclose(found, states_one_by_one(*inputs), rtol=1e-5, atol=1e-5)
    if has_erased:
        assert_gradients(
            gradients, inputs, lambda inputs: np.sum(weights * states_one_by_one(*inputs))
        )
