"""The `Context` of a forward pass, which all modules get, and variables of the decoding cache."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Context:
    """In training and evaluation, a row is one text, or several with `segment_ids_BxT`.

    In decoding, it is a text's new tokens, padded at the end; "cache" stores the earlier ones.
    """

    train: bool = struct.field(pytree_node=False, default=False)  # applies dropout
    # The number of positions that a new cache can hold; None in training and evaluation.
    cache_length: int | None = struct.field(pytree_node=False, default=None)
    start_B: jax.Array | None = None  # in decoding, the position of each row's first new token
    # in decoding, the number of new tokens per row, without padding
    length_B: jax.Array | None = None
    # None in decoding; positions with equal ids belong to one text
    segment_ids_BxT: jax.Array | None = None
    # bool; positions in their text's bidirectional prefix (prefix LM). In decoding, only with a new
    # cache
    prefix_BxT: jax.Array | None = None
    tokens_BxT: jax.Array | None = None  # the model's inputs, for value embeddings
    # the first block's input, x0, with config.model.input_mix
    stack_input_BxTxD: jax.Array | None = None
    # False at padding and where the loss counts no target; None: all True
    loss_mask_BxT: jax.Array | None = None

    @property
    def decode(self) -> bool:
        return self.cache_length is not None

    def positions(self, time: int):
        """Returns the position of each token within its text, (B or 1, time)."""
        places_1xT = jnp.arange(time)[None]
        if self.decode:
            assert self.start_B is not None
            return self.start_B[:, None] + places_1xT
        if self.segment_ids_BxT is None:
            return places_1xT
        # Segment ids 0 0 0 1 1: texts begin at places 0 and 3, and the positions are 0 1 2 0 1.
        begins_BxT = jnp.diff(self.segment_ids_BxT, axis=1, prepend=-1) != 0
        starts_BxT = jax.lax.cummax(jnp.where(begins_BxT, places_1xT, 0), axis=1)
        return places_1xT - starts_BxT

    @property
    def is_text_BxT(self):
        """False at the padding, which ends a row after its last counted target; None: all True."""
        # Prompts, which the loss does not count, are text: they are a load for experts.
        if self.loss_mask_BxT is None:
            return None
        return jax.lax.cummax(self.loss_mask_BxT.astype(jnp.int32), axis=1, reverse=True) > 0


EVALUATION = Context()


def cache_variable(module: nn.Module, name: str, shape: tuple[int, ...], dtype):
    """Returns a variable of "cache", and whether it is new. Each call of a layer has its own."""
    calls = module.get_variable("calls", name, 0)
    module.put_variable("calls", name, calls + 1)
    name_of_call = f"{name}_{calls}"
    is_new = not module.has_variable("cache", name_of_call)
    variable = module.variable("cache", name_of_call, jnp.zeros, shape, dtype)
    return variable, is_new
