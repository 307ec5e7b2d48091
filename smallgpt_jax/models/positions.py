"""Position encodings inside attention: RoPE and ALiBi."""

import jax.numpy as jnp
import numpy as np


def apply_rope(x_BxHxTxK, positions_BxT, base: float):
    """Rotates entries i and i + K/2 by position · base^(−2i/K), in float32 (Su et al., arXiv
    2104.09864, equation 34). The paper pairs adjacent entries, which is equivalent up to their
    order; most published models do not.
    """
    half = x_BxHxTxK.shape[-1] // 2
    frequencies_I = np.float32(base ** (-np.arange(half) / half))
    angles_Bx1xTxI = positions_BxT[:, None, :, None] * frequencies_I[None, None, None]
    cos, sin = jnp.cos(angles_Bx1xTxI), jnp.sin(angles_Bx1xTxI)
    first, second = jnp.split(x_BxHxTxK.astype(jnp.float32), 2, axis=-1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    rotated = jnp.concatenate([rotated_first, rotated_second], axis=-1)
    return rotated.astype(x_BxHxTxK.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns 2^(−8/H), 2^(−16/H), …, 2^−8, (H,) float32 (ALiBi, arXiv 2108.12409)."""
    return np.float32(2.0 ** (-8 * np.arange(1, heads + 1) / heads))
