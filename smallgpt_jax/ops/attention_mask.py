"""The attention mask, which all backends share."""

import flax
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class AttentionMask:
    """A causal or bidirectional mask with a window, borders between texts, or bidirectional
    prefixes.
    """

    # The length of the attention window in positions, including the query's own position; 0:
    # unlimited. A bidirectional mask allows as many later positions as earlier ones.
    window: int = flax.struct.field(pytree_node=False, default=0)
    segment_ids_BxT: jax.Array | None = (
        None  # positions with equal ids belong to one text; None: a row is one text
    )
    # bool; the positions of a text's prefix see each other, whatever the window (prefix LM). None:
    # no prefixes
    prefix_BxT: jax.Array | None = None
    is_causal: bool = flax.struct.field(pytree_node=False, default=True)

    def allowed(self, start: int, time: int, keys: slice):
        """Returns (B or 1, time, number of keys) bools; `start` is the position of the first
        query.
        """
        distances_TxS = (
            jnp.arange(start, start + time)[:, None] - jnp.arange(keys.start, keys.stop)[None]
        )
        allowed_BxTxS = (
            distances_TxS >= 0 if self.is_causal else jnp.ones_like(distances_TxS, bool)
        )[None]
        if self.window:
            allowed_BxTxS &= (jnp.abs(distances_TxS) < self.window)[None]
        if self.prefix_BxT is not None:
            allowed_BxTxS |= (
                self.prefix_BxT[:, start : start + time, None] & self.prefix_BxT[:, None, keys]
            )
        if self.segment_ids_BxT is not None:
            ids_BxT = self.segment_ids_BxT
            allowed_BxTxS &= ids_BxT[:, start : start + time, None] == ids_BxT[:, None, keys]
        return allowed_BxTxS

    def keys(self, start: int, end: int, time: int) -> slice:
        """Returns the keys, of `time`, that the queries from `start` to `end` may attend to."""
        if self.prefix_BxT is not None:
            return slice(0, time)
        first, last = (start - self.window + 1, end + self.window - 1) if self.window else (0, time)
        return slice(max(0, first), end if self.is_causal else min(last, time))
