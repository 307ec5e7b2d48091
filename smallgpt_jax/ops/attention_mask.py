"""The attention mask, which all backends share."""

import flax
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class AttentionMask:
    """A causal attention mask. Its fields add a window, the borders between texts, or a bidirectional prefix.

    `attention.select_backend` falls back to "xla" if a backend does not support a field.
    """

    # The length of the attention window in positions, including the query's own position; 0: unlimited.
    window: int = flax.struct.field(pytree_node=False, default=0)
    segment_ids_BxT: jax.Array | None = None  # positions with equal ids belong to one text; None: a row is one text
    prefix_lengths_B: jax.Array | None = None  # length of each row's bidirectional prefix (prefix LM)

    def allowed(self, start: int, time: int, keys: slice):
        """Returns the mask for `time` queries, whose first position is `start`, and the keys at positions `keys`.

        The mask is a (B or 1, time, number of keys) bool array. It is True where a query attends to a key.
        """
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
