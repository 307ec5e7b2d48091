"""The context of a forward pass: what layers need besides the activations, and the decoding cache."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.ops.attention import AttentionMask


@flax.struct.dataclass
class Context:
    """How a model is applied.

    In training and evaluation a row is one text starting at position 0, or, with `segment_ids_BxT`, several texts that
    do not see each other. In decoding, rows continue where their caches end; layers store what later positions need in
    the collection "cache". Rows may differ in length; padding comes last.
    """

    train: bool = flax.struct.field(pytree_node=False, default=False)  # dropout is applied
    # Decoding: positions of a new cache; None when not decoding.
    cache_length: int | None = flax.struct.field(pytree_node=False, default=None)
    start_B: jax.Array | None = None  # decoding: the position of each row's first token
    length_B: jax.Array | None = None  # decoding: tokens per row
    segment_ids_BxT: jax.Array | None = None  # not decoding: the text in its row of each position
    prefix_lengths_B: jax.Array | None = None  # not decoding: first positions of each row that all see each other
    # Training: whether this is the first microbatch of an update. For modules with state.
    begins_update: jax.Array | bool = True

    @property
    def decode(self) -> bool:
        return self.cache_length is not None

    def positions(self, time: int):
        """Returns the position of each token in its text, (B or 1, time)."""
        places_1xT = jnp.arange(time)[None]
        if self.decode:
            return self.start_B[:, None] + places_1xT
        if self.segment_ids_BxT is None:
            return places_1xT
        begins_BxT = jnp.diff(self.segment_ids_BxT, axis=1, prepend=-1) != 0
        return places_1xT - jax.lax.cummax(jnp.where(begins_BxT, places_1xT, 0), axis=1)

    def attention_mask(self, window: int) -> AttentionMask:
        """Returns the attention mask of a layer with this window, in positions (0: all)."""
        return AttentionMask(window, self.segment_ids_BxT, self.prefix_lengths_B)


EVALUATION = Context()


def cache_variable(module: nn.Module, name: str, shape: tuple[int, ...], dtype):
    """Returns a variable of the collection "cache", initially zero, and whether it is new.

    A module that is called several times per pass, as shared layers are, has one variable per call.
    """
    calls = module.get_variable("calls", name, 0)
    module.put_variable("calls", name, calls + 1)
    is_new = not module.has_variable("cache", f"{name}_{calls}")
    return module.variable("cache", f"{name}_{calls}", jnp.zeros, shape, dtype), is_new
