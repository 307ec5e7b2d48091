"""Position encodings inside attention: rotary embeddings (RoPE) and ALiBi.

Learned position embeddings are part of `LanguageModel`.
"""

import jax.numpy as jnp
import numpy as np


def apply_rope(x_BxHxTxK, positions_BxT, base: float):
    """Returns queries or keys with rotary position embedding (RoPE), in the dtype of the input.

    Entries i and i + K/2 of a head are rotated by the angle position · base^(−2i/K), computed in float32 (Su et al.,
    arXiv 2104.09864, equation 34). The paper pairs adjacent entries instead. Both pairings are equivalent up to the
    order of the entries. Most published models pair as this function does.
    """
    half = x_BxHxTxK.shape[-1] // 2
    frequencies = np.float32(base ** (-np.arange(half) / half))
    angles_Bx1xTxI = positions_BxT[:, None, :, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles_Bx1xTxI), jnp.sin(angles_Bx1xTxI)
    first, second = jnp.split(x_BxHxTxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxHxTxK.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the ALiBi slopes of H heads, (H,) float32: 2^(−8/H), 2^(−16/H), …, 2^−8.

    Attention subtracts slope · distance from the score of a query and a key, with the distance in positions (Press et
    al., arXiv 2108.12409, section 3). The formula is the same if H is not a power of two.
    """
    return np.float32(2.0 ** (-8 * np.arange(1, heads + 1) / heads))
