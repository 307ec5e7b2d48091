"""Checksums of arrays, computed on the devices that hold them."""

import jax
import jax.numpy as jnp


def bit_checksums(tree) -> dict[str, int]:
    """Returns Σᵢ bitsᵢ · (2i + 1) modulo 2³² per array; bitsᵢ: element i as an unsigned integer."""
    # A sum, which does not depend on the sharding, and which any single flipped bit changes.
    sums = jax.device_get(_bit_checksums(tree))
    return {
        jax.tree_util.keystr(path): int(x) for path, x in jax.tree_util.tree_leaves_with_path(sums)
    }


@jax.jit
def _bit_checksums(tree):
    def bit_sum(x):
        if x.dtype != bool:  # of which bitcast_convert_type knows no bits
            x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        bits = x.astype(jnp.uint32)  # all bits: JAX computes with at most 32 here
        # 2i + 1, built axis by axis. Odd, so that no bit is lost modulo 2³².
        factors = jnp.ones(bits.shape, jnp.uint32)
        stride = 2
        for axis in reversed(range(bits.ndim)):
            factors += jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(
                jnp.uint32, bits.shape, axis
            )
            stride *= bits.shape[axis]
        return jnp.sum(bits * factors, dtype=jnp.uint32)

    return jax.tree.map(bit_sum, tree)
