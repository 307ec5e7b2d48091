"""How a model knows the order of its tokens: `config.model.position`.

"learned": a vector for each position is added to the embedding (see `LanguageModel`). The others have no
parameters, and so no longest text: "rope" rotates queries and keys, "alibi" lowers the scores of what is far
away, "none" leaves the order to the causal mask. They are parts of each attention.
"""

import jax.numpy as jnp
import numpy as np

KINDS = ("learned", "rope", "alibi", "none")
ROPE_BASE = 10_000.0


def rotated(x_BxHxTxK, positions_BxT):
    """Queries or keys turned by their positions, in their own type: a score then depends on the distance.

    Rotary embedding (Su et al., arXiv 2104.09864, equation 34): entries i and i + K/2 are a point that is
    turned by position · 10000^(−2i/K), computed in float32. The paper pairs neighbours instead, which is
    this with the entries in another order; halves are what most published models have.
    """
    half = x_BxHxTxK.shape[-1] // 2
    frequencies = np.float32(ROPE_BASE ** (-np.arange(half) / half))
    angles_Bx1xTxI = positions_BxT[:, None, :, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles_Bx1xTxI), jnp.sin(angles_Bx1xTxI)
    first, second = jnp.split(x_BxHxTxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxHxTxK.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """What each head's scores lose with each position of distance, (H,) float32: 2^(−8/H), 2^(−16/H), …, 2^−8.

    Press et al., arXiv 2108.12409, section 3; the same sequence where H is no power of two.
    """
    return np.float32(2.0 ** (-8 * np.arange(1, heads + 1) / heads))
