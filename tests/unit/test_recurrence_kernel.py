"""Tests of ops/recurrence_kernel.py under vmap, and of when it is used. test_recurrences.py compares
it with the recurrences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallgpt_jax.ops import gated_delta, recurrence_kernel, state_space
from smallgpt_jax.ops.chunks import RecurrenceInputs
from smallgpt_jax.ops.recurrence_kernel import in_kernel

PATHS, ROWS, TIME, HEADS, KEY, VALUE = 2, 2, 300, 4, 5, 6
RULES = {"delta": (gated_delta, "gated_delta", HEADS), "mamba": (state_space, "state_space", 1)}


def random_inputs(mixer: str):
    """Returns queries, keys, values, logarithms of decays and, for "delta", β, with a leading axis
    of paths.
    """
    rng, shared = np.random.default_rng(0), RULES[mixer][2]
    q, k, v, decay, beta = (
        rng.standard_normal((PATHS, ROWS, TIME, *shape)).astype(np.float32)
        for shape in ((shared, KEY), (shared, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    )
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return [q, k, v, -np.abs(decay), *[1 / (1 + np.exp(beta))] * (mixer == "delta")]


def begins():
    return (np.arange(TIME) % 200 == 0)[None]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", RULES)
def test_paths_side_by_side(mixer):
    """Under vmap, as in pgpt, each path has its own outputs, states and gradients: the same as beside
    copies of itself. Outputs and states are those of the rule in plain JAX.
    """

    @jax.jit
    @jax.vmap
    def run(inputs, state):
        def total(inputs, state):
            y, last = in_kernel(RecurrenceInputs(*inputs), begins(), state, dtype="float32")
            return jnp.sum(jnp.square(y)) + jnp.sum(last), (y, last)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(inputs, state)

    module, name, _ = RULES[mixer]
    in_plain_jax = jax.jit(getattr(module, name))
    inputs = random_inputs(mixer)
    state = (
        np.random.default_rng(1)
        .standard_normal((PATHS, ROWS, HEADS, KEY, VALUE))
        .astype(np.float32)
    )
    results = run(inputs, state)
    for path in range(PATHS):
        copies = jax.tree.map(lambda x: np.stack([x[path]] * PATHS), (inputs, state))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[path], b[path], rtol=1e-5, atol=1e-5),
            results,
            run(*copies),
        )
        (_, outputs), _ = results
        expected = in_plain_jax(RecurrenceInputs(*(x[path] for x in inputs)), begins(), state[path])
        for x, y in zip(outputs, expected):
            np.testing.assert_allclose(x[path], y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixer", RULES)
def test_backend(mixer, monkeypatch):
    """TPUs have the kernel from a whole chunk on, unless the backend is "xla"."""
    module, name, _ = RULES[mixer]
    rule, state = getattr(module, name), np.zeros((ROWS, HEADS, KEY, VALUE), np.float32)

    def uses_kernel(time: int, backend: str) -> bool:
        inputs = [x[0, :, :time] for x in random_inputs(mixer)]
        program = jax.make_jaxpr(
            lambda *inputs: rule(
                RecurrenceInputs(*inputs), begins()[:, :time], state, backend=backend
            )
        )(*inputs)
        return f"{name}_forward" in str(program)

    assert not uses_kernel(300, "auto")
    monkeypatch.setattr(recurrence_kernel, "platform", lambda: "tpu")
    assert [uses_kernel(300, "auto"), uses_kernel(300, "xla"), uses_kernel(100, "auto")] == [
        True,
        False,
        False,
    ]
