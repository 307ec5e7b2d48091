"""Tests of the products of bfloat16 matrices on CPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallgpt_jax.devices.platform import has_bfloat16_instructions
from smallgpt_jax.ops import bfloat16
from smallgpt_jax.ops.cross_entropy import cross_entropy


def rounded(rng, *shape):
    """Returns a float64 array whose numbers bfloat16 represents exactly."""
    return np.asarray(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), np.float64)


@pytest.mark.parametrize(
    "rows, inputs, outputs, stack", [(24, 16, 40, ()), (24, 40, 16, ()), (12, 8, 20, (3, 2))]
)
def test_product_and_its_gradients(rows, inputs, outputs, stack):
    """With float32 arguments, gradients are not rounded. All operands are exact in bfloat16, so the
    sums are exact.
    """
    rng = np.random.default_rng(0)
    a, b, d_y = (
        rounded(rng, *stack, *shape)
        for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )
    y, vjp = jax.vjp(jax.jit(bfloat16.product), jnp.float32(a), jnp.float32(b))
    d_a, d_b = vjp(jnp.float32(d_y))
    for found, expected in (
        (y, a @ b),
        (d_a, d_y @ b.swapaxes(-1, -2)),
        (d_b, a.swapaxes(-1, -2) @ d_y),
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_have_the_dtype_of_the_arguments():
    a, b = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((4, 8), jnp.float32)
    d_a, d_b = jax.grad(lambda a, b: bfloat16.product(a, b).sum(), (0, 1))(a, b)
    assert (d_a.dtype, d_b.dtype) == (jnp.bfloat16, jnp.float32)


def test_gradients_of_a_shared_operand():
    """`a` is shared by three products, as in the paths of a pgpt; its gradient is the sum of
    theirs.
    """
    rng = np.random.default_rng(0)
    a, b, d_y = rounded(rng, 12, 8), rounded(rng, 3, 8, 20), rounded(rng, 3, 12, 20)
    y, vjp = jax.vjp(jax.jit(jax.vmap(bfloat16.product, (None, 0))), jnp.float32(a), jnp.float32(b))
    d_a, d_b = vjp(jnp.float32(d_y))
    for found, expected in ((y, a @ b), (d_a, (d_y @ b.swapaxes(1, 2)).sum(0)), (d_b, a.T @ d_y)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not has_bfloat16_instructions(), reason="this processor has no bfloat16 instructions"
)
def test_products_are_not_computed_in_float32():
    """All operands of the three products are bfloat16 in the compiled program, also if they are
    transposed arrays.
    """
    a, b = jnp.ones((64, 96), jnp.bfloat16), jnp.ones((32, 96), jnp.bfloat16)
    compiled = (
        jax.jit(jax.grad(lambda a, b: jnp.square(bfloat16.product(a, b.T)).sum(), (0, 1)))
        .lower(a, b)
        .compile()
    )
    text = compiled.as_text()
    dots = re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\)", text)
    operands = {name for pair in dots for name in pair}
    assert len(dots) == 3
    assert all(re.search(rf"%?{re.escape(name)} = bf16\[", text) for name in operands)
    compiled(a, b)


def test_cross_entropy_in_bfloat16():
    """Loss and gradients are close to float32's; bfloat16 has 8 bits."""
    rng = np.random.default_rng(0)
    x, head = rounded(rng, 3, 16, 8), rounded(rng, 50, 8)
    targets, weights = rng.integers(0, 50, (3, 16)), jnp.ones((3, 16))

    def loss(x, head):
        return cross_entropy(x, head, targets, weights, chunks=4)

    def of(dtype):
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(
            jnp.asarray(x, dtype), jnp.asarray(head, dtype)
        )
        return value, *(np.asarray(gradient, np.float32) for gradient in gradients)

    for found, expected in zip(of("bfloat16"), of("float32")):
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
