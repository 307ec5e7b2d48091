"""The `Context` that all modules of a model get in a forward pass, and variables of the decoding cache."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.ops.attention_mask import AttentionMask


@flax.struct.dataclass
class Context:
    """The mode of a forward pass, and all its inputs except the activations.

    In training and evaluation, a row is one text that starts at position 0. With `segment_ids_BxT`, a row contains
    several texts that do not attend to each other.

    In decoding, a row contains only the new tokens of a text. Layers store their values for the earlier tokens in the
    variable collection "cache". Rows may differ in length; shorter rows are padded at the end.
    """

    train: bool = flax.struct.field(pytree_node=False, default=False)  # applies dropout
    # The number of positions that a new cache can hold; None in training and evaluation.
    cache_length: int | None = flax.struct.field(pytree_node=False, default=None)
    start_B: jax.Array | None = None  # in decoding, the position of each row's first new token
    length_B: jax.Array | None = None  # in decoding, the number of new tokens per row, without padding
    segment_ids_BxT: jax.Array | None = None  # None in decoding; positions with equal ids belong to one text
    prefix_lengths_B: jax.Array | None = None  # None in decoding; length of each row's bidirectional prefix (prefix LM)
    loss_mask_BxT: jax.Array | None = None  # False at padding, which is no load for experts; None: all True

    @property
    def decode(self) -> bool:
        return self.cache_length is not None

    def positions(self, time: int):
        """Returns the position of each token within its text, (B or 1, time)."""
        places_1xT = jnp.arange(time)[None]
        if self.decode:
            return self.start_B[:, None] + places_1xT
        if self.segment_ids_BxT is None:
            return places_1xT
        begins_BxT = jnp.diff(self.segment_ids_BxT, axis=1, prepend=-1) != 0
        return places_1xT - jax.lax.cummax(jnp.where(begins_BxT, places_1xT, 0), axis=1)

    def attention_mask(self, window: int) -> AttentionMask:
        """Returns the attention mask for a window of `window` positions (0: unlimited)."""
        return AttentionMask(window, self.segment_ids_BxT, self.prefix_lengths_B)


EVALUATION = Context()


def cache_variable(module: nn.Module, name: str, shape: tuple[int, ...], dtype):
    """Returns a variable of the collection "cache" and whether this call created it. New variables are zero.

    A module that is called several times per forward pass, such as a shared layer, has one variable per call.
    """
    calls = module.get_variable("calls", name, 0)
    module.put_variable("calls", name, calls + 1)
    is_new = not module.has_variable("cache", f"{name}_{calls}")
    return module.variable("cache", f"{name}_{calls}", jnp.zeros, shape, dtype), is_new
