"""The attention mask, which all backends share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct


class Block(NamedTuple):
    """A block of a row's scores, as the positions of its T queries and S keys."""

    queries: slice
    keys: slice

    def distances(self):
        """Returns how many positions a key is before a query, (T, S); negative for later keys."""
        queries_Tx1 = jnp.arange(self.queries.start, self.queries.stop)[:, None]
        keys_1xS = jnp.arange(self.keys.start, self.keys.stop)[None]
        return queries_Tx1 - keys_1xS


@struct.dataclass
class AttentionMask:
    """A causal or bidirectional mask with a window, borders of texts, or prefixes."""

    # The length of the attention window in positions, including the query's own position; 0:
    # unlimited. A bidirectional mask allows as many later positions as earlier ones.
    window: int = struct.field(pytree_node=False, default=0)
    # positions with equal ids belong to one text; None: a row is one text
    segment_ids_BxT: jax.Array | None = None
    # bool; the positions of a text's prefix see each other, whatever the window (prefix LM). None:
    # no prefixes
    prefix_BxT: jax.Array | None = None
    is_causal: bool = struct.field(pytree_node=False, default=True)

    def allowed(self, block: Block):
        """Returns whether query t may attend to key s, (B or 1, T, S)."""
        distances_TxS = block.distances()
        allowed_TxS = distances_TxS >= 0 if self.is_causal else jnp.ones_like(distances_TxS, bool)
        allowed_BxTxS = allowed_TxS[None]
        if self.window:
            allowed_BxTxS &= (jnp.abs(distances_TxS) < self.window)[None]
        if self.prefix_BxT is not None:  # after the window, which does not limit a prefix
            queries_BxT = self.prefix_BxT[:, block.queries, None]
            allowed_BxTxS |= queries_BxT & self.prefix_BxT[:, None, block.keys]
        if self.segment_ids_BxT is not None:  # last: texts never see each other
            queries_BxT = self.segment_ids_BxT[:, block.queries, None]
            allowed_BxTxS &= queries_BxT == self.segment_ids_BxT[:, None, block.keys]
        return allowed_BxTxS

    def keys(self, start: int, end: int, time: int) -> slice:
        """Returns the keys, of `time`, that the queries from `start` to `end` may attend to."""
        if self.prefix_BxT is not None:
            return slice(0, time)
        # With a window of 3, query 5 attends to keys 3 to 5, and to 6 and 7 if bidirectional.
        first = max(0, start - self.window + 1) if self.window else 0
        if self.is_causal:
            return slice(first, end)
        return slice(first, min(end + self.window - 1, time) if self.window else time)
