"""How a model is applied: what layers need to know besides the activations, and what they keep when decoding."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.ops.attention import AttentionMask


@flax.struct.dataclass
class Context:
    """How a model is applied.

    In training and evaluation each row is a whole text from position 0 on, or, with `segment_ids_BxT`, several that do
    not see each other. In decoding the rows continue where their caches end; layers keep what later positions need in
    the collection "cache". Rows may differ in length: their padding comes last.
    """

    train: bool = flax.struct.field(pytree_node=False, default=False)  # dropout is applied
    # Decoding: the positions that a new cache has room for; None when not decoding.
    cache_length: int | None = flax.struct.field(pytree_node=False, default=None)
    start_B: jax.Array | None = None  # decoding: the position of each row's first token
    length_B: jax.Array | None = None  # decoding: how many tokens each row has
    segment_ids_BxT: jax.Array | None = None  # not decoding: integers that number the texts of a row
    prefix_lengths_B: jax.Array | None = None  # not decoding: positions of each row that all see each other
    # In training: whether a new update begins, i.e. this is its first microbatch. For modules that carry state.
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
        """Returns who sees whom in a layer whose attention spans `window` positions (0: all)."""
        return AttentionMask(window, self.segment_ids_BxT, self.prefix_lengths_B)


EVALUATION = Context()


def cache_variable(module: nn.Module, name: str, shape: tuple[int, ...], dtype):
    """Returns a variable of the collection "cache", zero at first, and whether it is new.

    A module that is called several times per pass has one per call: layers may be shared.
    """
    calls = module.get_variable("calls", name, 0)
    module.put_variable("calls", name, calls + 1)
    is_new = not module.has_variable("cache", f"{name}_{calls}")
    return module.variable("cache", f"{name}_{calls}", jnp.zeros, shape, dtype), is_new
