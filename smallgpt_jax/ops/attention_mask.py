"""The attention mask, which all backends share."""

import flax
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class AttentionMask:
    """A causal mask with a window, borders between texts, or a bidirectional prefix."""

    # The length of the attention window in positions, including the query's own position; 0: unlimited.
    window: int = flax.struct.field(pytree_node=False, default=0)
    segment_ids_BxT: jax.Array | None = None  # positions with equal ids belong to one text; None: a row is one text
    prefix_lengths_B: jax.Array | None = None  # length of each row's bidirectional prefix (prefix LM)

    def allowed(self, start: int, time: int, keys: slice):
        """Returns (B or 1, time, number of keys) bools; `start` is the position of the first query."""
        queries_Tx1 = jnp.arange(start, start + time)[:, None]
        keys_1xS = jnp.arange(keys.start, keys.stop)[None]
        allowed_BxTxS = (keys_1xS <= queries_Tx1)[None]
        if self.window:
            allowed_BxTxS &= (keys_1xS > queries_Tx1 - self.window)[None]
        if self.prefix_lengths_B is not None:
            prefix_Bx1x1 = self.prefix_lengths_B[:, None, None]
            allowed_BxTxS |= (keys_1xS[None] < prefix_Bx1x1) & (queries_Tx1[None] < prefix_Bx1x1)
        if self.segment_ids_BxT is not None:
            ids_BxT = self.segment_ids_BxT
            allowed_BxTxS &= ids_BxT[:, start:start + time, None] == ids_BxT[:, None, keys]
        return allowed_BxTxS
