"""Targets that copying predicts."""

import jax
import jax.numpy as jnp


def is_repeat(tokens_BxT1, segment_ids_BxT=None) -> jax.Array:
    """Returns whether a target follows its pair of tokens as when the pair last occurred in the row,
    (B, T). With `segment_ids_BxT`, only pairs in the same text count.

    In "a b c … a b", c is such a target: what induction heads predict (Olsson et al., arXiv
    2209.11895).
    """
    second_BxT, targets_BxT = tokens_BxT1[:, :-1], tokens_BxT1[:, 1:]
    first_BxT = jnp.pad(second_BxT, ((0, 0), (1, 0)))[:, :-1]
    places_1x1xT = jnp.arange(second_BxT.shape[1])[None, None]
    # (B, T, S): the pair at T occurred at S; the pair at 0 would begin before the row.
    is_earlier = places_1x1xT < places_1x1xT.mT
    is_same = is_earlier & (places_1x1xT > 0)
    pairs = [first_BxT, second_BxT]
    if segment_ids_BxT is not None:
        first_segment_BxT = jnp.pad(segment_ids_BxT, ((0, 0), (1, 0)), mode="edge")[:, :-1]
        pairs += [segment_ids_BxT, first_segment_BxT]
    for x_BxT in pairs:
        is_same = is_same & (x_BxT[:, :, None] == x_BxT[:, None, :])
    last_BxT = jnp.max(jnp.where(is_same, places_1x1xT, 0), axis=2)
    predicted_BxT = jnp.take_along_axis(targets_BxT, last_BxT, axis=1)
    return (last_BxT > 0) & (predicted_BxT == targets_BxT)
